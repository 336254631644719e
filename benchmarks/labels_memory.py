"""Measure the aggregator's memory in a round of sampled labels on a large probe set.

Every node codes a frame in a process of its own; then a fresh process checks, spools and combines them, and its peak is
measured. Nothing of the size m x V exists anywhere: logits and prior repeat every 64 contexts, draws do not. With
`--computed` the prior is computed and rounded block by block as in a run, which takes longer. Frames stay in the folder
`--frames`, so that a second call only combines. `python -m benchmarks.labels_memory` prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.scaling import peak, resident
from fpld.codecs.prior import block_digest, in_eighths, join_digests, ranges
from fpld.codecs.samples.codec import SAMPLES
from fpld.protocol import Aggregator, Budget, Settings
from fpld.protocol.priors import ComputedPrior, collect, take_notes
from fpld.protocol.wire import seal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.codecs import Prior
    from fpld.types import Plan

Array = np.ndarray[Any, np.dtype[Any]]
PERIOD, BLOCK = 64, 32  # contexts that differ, and contexts at a time


@dataclass(frozen=True, eq=False, slots=True)
class Repeated:
    """Rows that repeat: those of a table, over and over; a block is a view of it."""

    shape: tuple[int, int]
    table: Array  # two periods

    @property
    def digest(self) -> bytes:
        """Return the digest of all integers, as a prior has it."""
        return join_digests(b"".join(block_digest(self.block(rows)) for rows in ranges(self.shape)))

    def block(self, rows: range) -> Array:
        """Return some rows."""
        first = rows.start % PERIOD
        if first + len(rows) <= len(self.table):
            return self.table[first : first + len(rows)]
        return self.table[np.arange(rows.start, rows.stop) % PERIOD]

    def blocks(self) -> Iterator[Array]:
        """Return all rows, some at a time."""
        for start in range(0, self.shape[0], BLOCK):
            yield self.block(range(start, min(start + BLOCK, self.shape[0])))


def logits(shape: tuple[int, int], node: int | None) -> Repeated:
    """Return logits of a language model's shape: those of a node, or what all nodes expect."""
    rng = np.random.default_rng(0)
    size = PERIOD, shape[1]
    ranks = rng.random(size, np.float32).argsort(axis=1) + 1
    values = 1.3 * (rng.standard_normal(size, np.float32) - 1.1 * np.log(ranks, dtype=np.float32))
    if node is not None:
        own = np.random.default_rng(1 + node).standard_normal(size, np.float32)
        values = values + 0.85 * rng.standard_normal(size, np.float32) + 0.65 * own
    return Repeated(shape, np.concatenate([values, values]).astype(np.float32))


def prior_of(shape: tuple[int, int], *, computed: bool) -> Prior:
    """Return the prior: from a table, or computed block by block."""
    expected = logits(shape, None)
    if not computed:
        return Repeated(shape, in_eighths(expected.table))
    noted = take_notes(map(expected.block, ranges(shape)), shape)
    return ComputedPrior(expected.block, collect(noted, shape))


def aggregator_of(shape: tuple[int, int], nodes: int, bits: float, prior: Prior) -> tuple[Aggregator, list[Plan]]:
    """Return an aggregator that collects, and its nodes' plans."""
    contexts, vocab = shape
    caps = np.full(nodes, bits)
    settings = Settings(
        names=[f"node {k}" for k in range(nodes)],
        run_key=bytes(16),
        probe=bytes(32),
        contexts=contexts,
        vocab=vocab,
        rounds=1,
        budget=Budget(caps=caps, floors=caps, vocab=vocab),
        clips=[None] * nodes,
        codec="samples",
        rule="mixture",
        threads=1,
    )
    aggregator = Aggregator(settings)
    tasks = aggregator.open("none", {}, prior=prior)
    return aggregator, [tasks[node].plan for node in range(nodes)]


def encode(shape: tuple[int, int], nodes: int, bits: float, node: int, path: Path) -> None:
    """Write a node's frame."""
    _, plans = aggregator_of(shape, nodes, bits, prior_of(shape, computed=False))
    payload = SAMPLES.encode(logits(shape, node).blocks(), plans[node])
    path.write_bytes(seal(payload, plans[node], SAMPLES.code))


def aggregate(shape: tuple[int, int], bits: float, frames: list[Path], *, computed: bool) -> dict[str, Any]:
    """Check, spool and combine the frames in this process; measure its peak beyond what it held before them."""
    prior = prior_of(shape, computed=computed)
    aggregator, _ = aggregator_of(shape, len(frames), bits, prior)
    before, start, sent = resident(), time.perf_counter(), 0
    for node, path in enumerate(frames):
        data = path.read_bytes()
        sent += len(data)
        receipt = aggregator.frame(node, data)
        if receipt.verdict != "accepted":
            raise SystemExit(f"a frame was refused: {receipt.reason}")
    checked = time.perf_counter()
    aggregator.close()
    target = aggregator.combine().target
    return {
        "nodes": len(frames),
        "contexts": shape[0],
        "vocab": shape[1],
        "context_bits": bits,
        "computed": computed,
        "checking_seconds": checked - start,
        "combining_seconds": time.perf_counter() - checked,
        "frames_mb": sent / 1e6,
        "target_mb": (target.starts.nbytes + target.tokens.nbytes + target.changes.nbytes) / 1e6,
        "start_mb": before,
        "peak_mb": peak(),
        "beyond_mb": peak() - before - sent / 1e6,
    }


def main() -> None:
    """Read the arguments, code what is missing, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--contexts", type=int, default=400_000)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--bits", type=float, default=30.0, help="per context")
    parser.add_argument("--frames", type=Path, default=Path("out/labels-memory"))
    parser.add_argument("--computed", action="store_true")
    parser.add_argument("--node", type=int, help="code the frame of this node only")
    arguments = parser.parse_args()
    shape = arguments.contexts, arguments.vocab
    folder = arguments.frames / "-".join(f"{size:g}" for size in (arguments.nodes, *shape, arguments.bits))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{node}.frame" for node in range(arguments.nodes)]
    if arguments.node is not None:
        encode(shape, arguments.nodes, arguments.bits, arguments.node, paths[arguments.node])
        return
    for node, path in enumerate(paths):
        if not path.exists():  # in a process of its own: a peak never falls
            command = [sys.executable, "-m", "benchmarks.labels_memory", *sys.argv[1:], "--node", str(node)]
            subprocess.run(command, check=True)
    print(json.dumps(aggregate(shape, arguments.bits, paths, computed=arguments.computed)))


if __name__ == "__main__":
    main()
