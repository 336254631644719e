"""Write the tables of README, docs/students.md and docs/privacy.md from results that are kept in docs/results/.

    python docs/make_tables.py                                   the tables again
    python docs/make_tables.py --take rivals runs/rivals         first keep what `fpld run rivals --seeds ...` found
    python docs/make_tables.py --take equal-bytes out            first keep what `python -m benchmarks.labels` found
    python docs/make_tables.py --take privacy out/privacy        first keep what `python -m benchmarks.privacy` found
    python docs/make_tables.py --take audits runs/audits         first keep what `fpld audit` found, a folder a seed

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", DOCS / "students.md", DOCS / "privacy.md")
NAMES = {
    "base": "base model, before the federation",
    "best node alone": "best node alone",
    "pooled": "all text pooled, as many steps as one node",
    "fedavg": "FedAvg, float32",
    "fedavg-1bit": "FedAvg, one bit per weight",
    "flora": "FLoRA, float32",
    "ensemble": "mixture of the nodes' models (cannot be sent)",
    "fpld": "**fpld**",
}
ORDER = ("samples", "predictive", "uniform")
_TABLE = re.compile(r"(<!-- table ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def take(name: str, folder: Path) -> None:
    """Keep what a command has found, with the commit of the checkout that its folder lies in."""
    asked = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True)
    found = TAKEN[name](folder) if name in TAKEN else take_runs(name, folder)
    kept = {"command": found.pop("command"), "commit": commit.stdout.strip(), **found}
    (DOCS / "results").mkdir(exist_ok=True)
    (DOCS / "results" / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def take_runs(name: str, folder: Path) -> dict[str, Any]:
    """Return what `fpld run --seeds` has found."""
    found: dict[str, Any] = json.loads((folder / "seeds.json").read_text())
    return {"command": f"fpld run {name} --seeds {','.join(map(str, found['seeds']))}", **found}


def take_students(folder: Path) -> dict[str, Any]:
    """Return means over seeds of students at equal bytes, and how far a codec is behind `samples`, paired by seed."""
    with (folder / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = {(float(row["megabytes"]), row["codec"], int(row["seed"])): float(row["heldout_loss"]) for row in rows}
    seeds = sorted({seed for *_, seed in losses})
    means = []
    for size, codec in sorted(
        {(size, codec) for size, codec, _ in losses}, key=lambda key: (key[0], ORDER.index(key[1]))
    ):
        own = [losses[size, codec, seed] for seed in seeds]
        behind = [loss - losses[size, "samples", seed] for loss, seed in zip(own, seeds, strict=True)]
        contexts = {int(row["contexts"]) for row in rows if (float(row["megabytes"]), row["codec"]) == (size, codec)}
        found = {"megabytes": size, "codec": codec, "contexts": max(contexts)}
        found |= dict(zip(("heldout_loss", "heldout_se"), mean_and_error(own), strict=True))
        means.append(found | dict(zip(("behind", "behind_se"), mean_and_error(behind), strict=True)))
    runs = " ".join(f"runs/rivals/seed-{seed}" for seed in seeds)
    return {"command": f"python -m benchmarks.labels {runs}", "seeds": seeds, "rows": means}


def take_privacy(folder: Path) -> dict[str, Any]:
    """Return what federations with several promises have found."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("privacy-*.csv")):
        with path.open(newline="") as file:
            rows += [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    command = "python -m benchmarks.privacy --epsilons inf,8,3,1` and `--preset private-hospitals --epsilons inf,8"
    return {"command": command, "seeds": list(range(int(rows[0]["runs"]))), "rows": rows}


def _number(text: str) -> float | str | None:
    """Return a number of a table, None where it is missing or infinite, which JSON has not; words as they are."""
    try:
        number = float(text or "inf")
    except ValueError:
        return text
    return number if math.isfinite(number) else None


def take_audits(folder: Path) -> dict[str, Any]:
    """Return, for each audit, what its best attack has shown."""
    rows, seeds = [], []
    for path in sorted(folder.glob("seed-*/audit.json")):
        found = json.loads(path.read_text())
        seeds.append(int(path.parent.name.removeprefix("seed-")))
        rows.append(
            {
                "seed": seeds[-1],
                "epsilon_lower": max(row["epsilon_lower"] for row in found),
                "epsilon_upper": found[0]["epsilon_upper"],
                "aucs": [min(row["auc"] for row in found), max(row["auc"] for row in found)],
                "tpr": max(row["tpr_at_1_percent"] for row in found),
            }
        )
    command = "fpld audit audit --epsilon 3 --seed N --out runs/audits/seed-N"
    return {"command": command, "seeds": seeds, "rows": rows}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return a mean and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def table(name: str) -> str:
    """Return a table with the command that makes it."""
    kept = json.loads((DOCS / "results" / f"{name}.json").read_text())
    lines = LINES.get(name, run_lines)(kept["rows"])
    seeds = ", ".join(map(str, kept["seeds"]))
    source = f"`{kept['command']}`, {kept['commit']}."
    if name in ("audits", "privacy"):
        said = source if name == "audits" else f"Nats per token, seed {seeds}: {source}"
    else:
        said = f"Means over seeds {seeds} with standard errors; *behind* is paired: {source}"
    return "\n".join([*lines, "", said, ""])


def student_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of students at equal bytes."""
    lines = ["| uplink of all nodes | codec | contexts | nats per token | behind `samples` |", "|---|---|---|---|---|"]
    for row in rows:
        error = "" if row["behind_se"] is None else f" ± {row['behind_se']:.3f}"
        behind = "" if row["codec"] == "samples" else f"{row['behind']:+.3f}{error}"
        loss = f"{row['heldout_loss']:.3f} ± {row['heldout_se']:.3f}"
        lines.append(f"| {row['megabytes']:g} MB | `{row['codec']}` | {row['contexts']:,} | {loss} | {behind} |")
    return lines


def run_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of methods side by side."""
    lines = ["| method | nats per token | behind fpld | uplink | downlink |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -row["heldout_loss"]):
        behind = "" if row["method"] == "fpld" else f"{row['behind']:+.3f} ± {row['behind_se']:.3f}"
        loss = f"{row['heldout_loss']:.3f} ± {row['heldout_se']:.3f}"
        lines.append(
            f"| {label(row)} | {loss} | {behind} | {size(row['uplink_bytes'])} | {size(row['downlink_bytes'])} |"
        )
    return lines


def privacy_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of federations with several promises."""
    lines = [
        "| preset | unit | epsilon | base | best node alone | nodes alone, mean | student |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = [f"{row[name]:.4f}" for name in ("base", "best_alone", "mean_alone", "fpld")]
        promise = "none" if row["epsilon"] is None else f"{row['epsilon']:g}"
        lines.append(f"| `{row['preset']}` | {row['unit']} | {promise} | {' | '.join(shown)} |")
    return lines


def audit_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of audits."""
    lines = [
        "| seed | epsilon at least | epsilon at most | AUC of the attacks | best TPR at 1 % FPR |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["aucs"]
        bounds = f"{row['epsilon_lower']:.2f} | {row['epsilon_upper']:.2f}"
        lines.append(f"| {row['seed']} | {bounds} | {low:.2f} to {high:.2f} | {row['tpr']:.2f} |")
    return lines


TAKEN = {"equal-bytes": take_students, "privacy": take_privacy, "audits": take_audits}
LINES = {"equal-bytes": student_lines, "privacy": privacy_lines, "audits": audit_lines}


def label(row: dict[str, Any]) -> str:
    """Name a method for a reader."""
    method, _, rounds = row["method"].partition(", ")
    return NAMES.get(method, method) + (f", {rounds}" if rounds else "")


def size(count: int) -> str:
    """Show bytes in megabytes."""
    return f"{count / 1e6:.2f} MB" if count else "0"


def rendered(text: str) -> str:
    """Return a page with its tables as kept."""
    return _TABLE.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def main() -> None:
    """Take results, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"))
    for name, folder in parser.parse_args().take:
        take(name, Path(folder))
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()
