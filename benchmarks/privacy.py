"""What privacy costs: a federation with several promises, beside the same one without any and beside each node alone.

    python -m benchmarks.privacy --epsilons 8,3,1
    python -m benchmarks.privacy --preset private-hospitals --epsilons 8
    python -m benchmarks.privacy --unit window --batch 64 --rate 1e-3 --epsilons 8

A row has the held-out loss of the base model, of the best node alone, of the mean of the nodes alone and of the
student, all trained with the same epsilon, and how far the student is ahead of the best node; inf is the same
configuration without [privacy]. Runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld import config as configuration
from fpld.cli.arguments import numbers
from fpld.engines.local import run_local
from fpld.storage.files import write_csv

if TYPE_CHECKING:
    from fpld.config import Config

    Row = dict[str, Any]

SHOWN = "base", "best_alone", "mean_alone", "fpld"


def promising(config: Config, epsilon: float, changes: dict[str, Any], rate: float | None) -> Config:
    """Return a configuration with another promise; without any where epsilon is infinite."""
    terms = config.privacy
    if terms is None:
        raise SystemExit("the preset must have [privacy]")
    terms = None if math.isinf(epsilon) else terms.model_copy(update={"epsilon": epsilon, **changes})
    local = config.local if rate is None else config.local.model_copy(update={"rate": rate})
    return config.model_copy(update={"privacy": terms, "local": local})


def losses(folder: Path) -> dict[str, float]:
    """Return the losses of a finished run that a row shows."""
    rows = json.loads((folder / "result.json").read_text())
    found = {row["method"]: row["heldout_loss"] for row in rows}
    alone = [loss for method, loss in found.items() if method.startswith("alone: ")]
    shown = dict(zip(SHOWN, (found["base"], min(alone), statistics.mean(alone), found["fpld"]), strict=True))
    return shown | {"ahead": shown["best_alone"] - shown["fpld"]}


def main() -> None:
    """Run what is missing, and print a table of means and standard errors over seeds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--preset", default="private", help="a preset with [privacy] (default: private)")
    parser.add_argument("--epsilons", type=numbers, default=[math.inf, 8.0, 3.0, 1.0], metavar="E,E,...")
    parser.add_argument("--unit", choices=("document", "window"), default="document")
    parser.add_argument("--batch", type=int, metavar="N", help="units in a step, in place of privacy.batch")
    parser.add_argument("--rate", type=float, help="in place of local.rate")
    parser.add_argument("--seeds", type=numbers, default=[0.0], metavar="N,N,...")
    parser.add_argument("--out", type=Path, default=Path("out/privacy"), help="folder for runs and table")
    given = parser.parse_args()
    changes = {"unit": given.unit} | ({} if given.batch is None else {"batch": given.batch})
    rows: list[Row] = []
    for epsilon in given.epsilons:
        found = []
        for seed in map(int, given.seeds):
            config, text = configuration.read_config(given.preset, seed=seed)
            config = promising(config, epsilon, changes, given.rate)
            folder = given.out / f"{given.preset}-{given.unit}-{epsilon:g}" / f"seed-{seed}"
            if not (folder / "result.json").exists():
                said = {"epsilon": epsilon, "rate": config.local.rate, **changes}
                run_local(config, f"{text}\n# {said}\n", folder, resume=folder.exists())
            found.append(losses(folder))
        row: Row = {"preset": given.preset, "unit": given.unit, "epsilon": epsilon, "runs": len(found)}
        for name in (*SHOWN, "ahead"):
            values = [each[name] for each in found]
            row[name] = statistics.mean(values)
            row[f"{name}_se"] = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        rows.append(row)
        print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
        write_csv(given.out / f"privacy-{given.preset}-{given.unit}.csv", rows)


if __name__ == "__main__":
    main()
