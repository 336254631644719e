"""Write the tables of README and docs/students.md from results that are kept in docs/results/.

    python docs/make_tables.py                                   the tables again
    python docs/make_tables.py --take rivals runs/rivals         first keep what `fpld run rivals --seeds ...` found

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", DOCS / "students.md")
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
_TABLE = re.compile(r"(<!-- table ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def take(name: str, folder: Path) -> None:
    """Keep what a command with several seeds has found, with the commit that found it."""
    found = json.loads((folder / "seeds.json").read_text())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)  # noqa: S607
    seeds = ",".join(map(str, found["seeds"]))
    kept = {"command": f"fpld run {name} --seeds {seeds}", "commit": commit.stdout.strip(), **found}
    (DOCS / "results").mkdir(exist_ok=True)
    (DOCS / "results" / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def table(name: str) -> str:
    """Return a table with the command that makes it."""
    kept = json.loads((DOCS / "results" / f"{name}.json").read_text())
    lines = ["| method | nats per token | behind fpld | uplink | downlink |", "|---|---|---|---|---|"]
    for row in sorted(kept["rows"], key=lambda row: -row["heldout_loss"]):
        behind = "" if row["method"] == "fpld" else f"{row['behind']:+.3f} ± {row['behind_se']:.3f}"
        loss = f"{row['heldout_loss']:.3f} ± {row['heldout_se']:.3f}"
        lines.append(
            f"| {label(row)} | {loss} | {behind} | {size(row['uplink_bytes'])} | {size(row['downlink_bytes'])} |"
        )
    seeds = ", ".join(map(str, kept["seeds"]))
    said = f"Means over seeds {seeds} with standard errors; *behind* is paired: `{kept['command']}`, {kept['commit']}."
    return "\n".join([*lines, "", said, ""])


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
