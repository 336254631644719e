"""How the lead over averaging grows with local training: FedAvg, FedDF and fpld by the number of local steps.

    python -m benchmarks.lead --out out/lead [--steps 300,600,1200,2400] [--rounds 2,3] [--seeds 0]

Each is the preset `policies` with so many local steps, in a folder of its own. FedAvg splits the steps of a node into
each number of rounds, and its best one is kept: in one bit among those that send no more than fpld. What was
interrupted is continued, and what has ended is read. `lead.csv` has the rows, `lead.png` the figure.
"""

from __future__ import annotations

import argparse
import csv
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fpld
from fpld.report.draw import save_figure
from fpld.report.seeds import summarize_seeds
from fpld.storage.run_folder import CONFIG

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    Row = dict[str, Any]

METHODS = ["fedavg", "fedavg-1bit", "feddf-kbit", "updates", "ensemble"]
LABELS = {
    "base": "base model",
    "fedavg": "FedAvg, float32",
    "fedavg-1bit": "FedAvg, one bit",
    "feddf": "FedDF, 3 bits",
    "fpld": "fpld: labels and text",
    "updates": "fpld: updates, 3 bits",
    "ensemble": "mixture of the nodes' models",
}

OURS = ("fpld", "updates")


def run(preset: str, folder: Path, seed: int, overrides: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a run, continued or read if the folder has one."""
    if (folder / CONFIG).exists():
        done = fpld.read_run(folder)
        ended = done if done.table else fpld.resume(folder)
    else:
        ended = fpld.run(preset, out=folder, seed=seed, overrides=overrides)
    return [row.model_dump() for row in ended.table]


def best(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each kind of method: its best number of rounds, in one bit within the bytes of fpld."""
    most = next(row["uplink_bytes"] for row in rows if row["method"] == "fpld")
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row["heldout_loss"]):
        kind = row["method"].split(",")[0]
        if kind in LABELS and not (kind == "fedavg-1bit" and row["uplink_bytes"] > most):
            found.setdefault(kind, row)
    return [found[kind] for kind in LABELS if kind in found]


def measure(
    steps: Sequence[int], seeds: Sequence[int], out: Path, overrides: Mapping[str, Any], preset: str = "policies"
) -> list[Row]:
    """Return the rows of all numbers of steps."""
    found = []
    for count in steps:
        of_count = {**overrides, "local.steps": count, "baselines.methods": METHODS}
        runs = [run(preset, out / f"{count}-{seed}", seed, of_count) for seed in seeds]
        found += [{"steps": count, **row} for row in best(summarize_seeds(runs))]
    return found


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Draw the held-out loss of each method against the local steps, without the base model."""
    axes = figure.subplots()
    for kind, label in LABELS.items():
        own = [row for row in rows if row["method"].split(",")[0] == kind]
        if not own or kind == "base":
            continue
        counts, losses = zip(*((row["steps"], row["heldout_loss"]) for row in own), strict=True)
        if kind == "ensemble":
            axes.plot(counts, losses, marker="o", label=label, linestyle=":", color="gray")
        else:
            axes.plot(counts, losses, marker="o", label=label, linestyle="-" if kind in OURS else "--")
    axes.set_xscale("log")
    ticks = sorted({row["steps"] for row in rows})
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.minorticks_off()
    axes.set_xlabel("local steps of a node")
    axes.set_ylabel("held-out loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def write(rows: Sequence[Row], out: Path) -> None:
    """Write the rows and the figure."""
    with (out / "lead.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    save_figure(partial(draw, rows), out / "lead", (7.0, 4.2))


def main() -> None:
    """Run all, and print loss and bytes of each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/lead"), help="the folder of runs (default: out/lead)")
    parser.add_argument("--steps", default="300,600,1200,2400", help="numbers of local steps")
    parser.add_argument("--rounds", default="2,3", help="numbers of rounds of FedAvg")
    parser.add_argument("--seeds", default="0", help="seeds, whose means are taken")
    asked = parser.parse_args()
    steps, rounds, seeds = (
        [int(part) for part in text.split(",")] for text in (asked.steps, asked.rounds, asked.seeds)
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = measure(steps, seeds, asked.out, {"baselines.rounds": rounds})
    write(rows, asked.out)
    print(f"{'steps':>6}  {'method':<24} {'nats per token':>14} {'uplink, MB':>11}")
    for row in rows:
        print(f"{row['steps']:>6}  {row['method']:<24} {row['heldout_loss']:>14.3f} {row['uplink_bytes'] / 1e6:>11.2f}")


if __name__ == "__main__":
    main()
