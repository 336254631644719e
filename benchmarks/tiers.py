"""What tiers of aggregators change: labels combined by groups, and their results once more, beside all at once.

    python -m benchmarks.tiers [--nodes 64] [--groups 8] [--seeds 0,1,2,3,4] [--out out/bench]

Nodes have logits around a common truth, as Gaussian noise; an eighth of them lies by large logits on one token. Groups
have as many nodes each. A row is a rule, with the mean and the largest distance (total variation) over contexts between
the two results, and of each to the mixture of the honest nodes: means over the seeds, the largest of all of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.numerics import softmax
from fpld.registry import rules
from fpld.rules import combine
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.rules import Rule

CONTEXTS = 256
VOCAB = 64
RULES = ("mean", "mixture", "trimmed", "median")
LIE = 12.0  # nats

Row = dict[str, Any]


def decoded(logits: np.ndarray[Any, Any]) -> Decoded:
    """Return logits as a label without error."""
    zero = np.zeros((len(logits), 1))
    return Decoded(logits, zero, zero)


def distances(one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the total variation of two predictions in each context."""
    both: np.ndarray[Any, Any] = np.abs(softmax(one) - softmax(two)).sum(axis=1) / 2
    return both


def tiered(rule: Rule, nodes: list[Decoded], groups: int) -> np.ndarray[Any, Any]:
    """Combine groups of nodes, and then what they came to."""
    size = len(nodes) // groups
    parts = [combine(rule, nodes[start : start + size]) for start in range(0, len(nodes), size)]
    return np.asarray(combine(rule, [decoded(np.asarray(part)) for part in parts]))


def measure(nodes: int, groups: int, seed: int) -> list[Row]:
    """Return a row for each rule."""
    if nodes % groups:
        raise SystemExit(f"--nodes must be a multiple of --groups, got {nodes} and {groups}")
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(CONTEXTS, VOCAB))
    honest = [decoded(truth + rng.normal(size=truth.shape)) for _ in range(nodes)]
    liars = max(nodes // 8, 1)
    lie = np.zeros((1, VOCAB))
    lie[0, 0] = LIE
    mixed = [decoded(node.values + lie) if index < liars else node for index, node in enumerate(honest)]
    wanted = np.asarray(combine(rules.get("mixture"), honest[liars:]))
    rows = []
    for name in RULES:
        rule = rules.get(name)
        flat = np.asarray(combine(rule, mixed))
        tiers = tiered(rule, mixed, groups)
        apart = distances(flat, tiers)
        row: Row = {"rule": name, "mean": float(apart.mean()), "largest": float(apart.max())}
        row["flat_to_honest"] = float(distances(flat, wanted).mean())
        row["tiers_to_honest"] = float(distances(tiers, wanted).mean())
        rows.append(row)
    return rows


def summarized(runs: Sequence[list[Row]]) -> list[Row]:
    """Return a row for each rule over several seeds."""
    means: list[Row] = []
    for rows in zip(*runs, strict=True):
        row: Row = {"rule": rows[0]["rule"], "largest": max(each["largest"] for each in rows)}
        row |= {name: mean(each[name] for each in rows) for name in ("mean", "flat_to_honest", "tiers_to_honest")}
        means.append({name: value if name == "rule" else float(f"{value:.2g}") for name, value in row.items()})
    return means


def main() -> None:
    """Print the rows, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where the rows go")
    a = parser.parse_args()
    seeds = [int(seed) for seed in a.seeds.split(",")]
    rows = summarized([measure(a.nodes, a.groups, seed) for seed in seeds])
    for row in rows:
        print(", ".join(f"{name}: {value}" for name, value in row.items()))
    a.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.tiers --nodes {a.nodes} --groups {a.groups} --seeds {a.seeds}"
    kept = {"command": command, "seeds": seeds, "rows": rows}
    (a.out / "tiers.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
