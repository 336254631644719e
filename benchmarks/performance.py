"""Measure the speed of the codecs and the growth of a round on this machine; keep both under out/bench/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.scaling import GRID, child

ROOT = Path(__file__).parent.parent
OUT = ROOT / "out" / "bench"
UNIFORM = "1,1.5,2,2.37,3,3.37,4,4.5,5,5.5,6,6.5,7,7.5,8"
PREDICTIVE = "0.02,0.05,0.1,0.25,0.5,1,2"
SAMPLES = "30,100,640"
OTHERS = "4,32"
FEWER = "--peers", "benchmarks.peers", "--contexts", "16", "--repeat", "3"


def speed(*arguments: str) -> list[dict[str, Any]]:
    """Run `fpld bench speed`."""
    command = [sys.executable, "-m", "fpld", "bench", "speed", "--json", "--out", "out", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def growth_row(rule: str, point: dict[str, Any]) -> dict[str, Any]:
    """Return a size of a round: times of a node in milliseconds, and memory."""
    nodes = point["nodes"]
    row = {"rule": rule, **{name: point[name] for name in ("nodes", "contexts", "vocab")}}
    row["coding_ms"] = round(1e3 * point["coding_seconds_per_node"], 1)
    for name in ("checking", "combining", "processor"):
        row[f"{name}_ms"] = round(1e3 * point[f"{name}_seconds"] / nodes, 1)
    row["all_seconds"] = round(point["checking_seconds"] + point["combining_seconds"], 2)
    row |= {name: round(point[name]) for name in ("frames_mb", "peak_mb")}
    return row | {"beyond_mb": round(point["peak_mb"] - point["start_mb"] - point["frames_mb"])}


def main() -> None:
    """Measure and keep."""
    rows = speed("--codec", "uniform", "--bits", UNIFORM)
    rows += speed("--codec", "predictive", "--bits", PREDICTIVE, "--repeat", "3")
    rows += speed("--bits", OTHERS, *FEWER)
    labels = speed("--codec", "samples", "--context-bits", SAMPLES, "--repeat", "9")
    ratios = [{name: row[name] for name in ("codec", "bits", "operation", "ratio")} for row in rows]
    ratios += [{name: row[name] for name in ("codec", "context_bits", "operation", "ratio")} for row in labels]
    points = [growth_row("mean", child(*point, "mean")) for part in GRID.values() for point in part]
    points += [growth_row("mixture", child(*point, "mixture")) for point in GRID["large"]]
    OUT.mkdir(parents=True, exist_ok=True)
    for name, found in (("speed", ratios), ("growth", points)):
        kept = {"command": "make bench", "seeds": [0], "rows": found}
        (OUT / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
        print(f"wrote out/bench/{name}.json: python -m docs.kept_results {name} out/bench")


if __name__ == "__main__":
    main()
