"""Measure the aggregator's memory in a round of sampled labels on a large probe set.

Every node codes a frame in a process of its own; then a fresh process checks, spools and combines them, and its peak is
measured. Nothing of the size m x V exists anywhere: logits and prior repeat every 64 contexts, draws do not. With
`--computed` the aggregator computes its prior as in a run: a small transformer predicts all contexts, block by block,
once for every frame and once for all together, which takes far longer. Frames stay in the folder `--frames`, so that a
second call only combines. `python -m benchmarks.labels_memory` prints one JSON line.
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
from fpld.codecs.prior import block_digest, block_ranges, in_eighths, join_digests
from fpld.codecs.samples.codec import SAMPLES
from fpld.node.prior_cache import Predictions
from fpld.node.training import open_student
from fpld.protocol import Aggregator, Budget, Settings
from fpld.protocol.shared_prior import ComputedPrior, RoundedBlock, collect_notes, round_blocks
from fpld.protocol.wire import encode_frame
from fpld.students.configs import TransformerConfig
from fpld.students.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.codecs import Prior
    from fpld.students import Student
    from fpld.types import Array, Plan

# contexts that differ, contexts at a time, and of a sequence
PERIOD = 64
BLOCK = 32
LENGTH = 32


@dataclass(frozen=True, eq=False, slots=True)
class Repeated:
    """Rows that repeat: those of a table, over and over; a block is a view of it."""

    shape: tuple[int, int]
    table: Array  # two periods

    @property
    def digest(self) -> bytes:
        """Return the digest of all integers, as a prior has it; blocks repeat as well."""
        keys = [(rows.start % PERIOD, len(rows)) for rows in block_ranges(self.shape)]
        found = {key: block_digest(self.block(range(key[0], sum(key)))) for key in set(keys)}
        return join_digests(b"".join(found[key] for key in keys))

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


def student_of(vocab: int, folder: Path) -> Student:
    """Return a small transformer that knows how often tokens are; it is made once for all processes."""
    file = folder / "student.safetensors"
    if not file.exists():
        ranks = np.random.default_rng(0).zipf(1.2, 20_000)
        student = Transformer(TransformerConfig(vocab=vocab, layers=1, width=16, heads=2, length=LENGTH), seed=0)
        student.finetune(np.minimum(ranks, vocab) - 1, steps=50, seed=0)
        student.save(file)
    return open_student(file)


def sequences_of(shape: tuple[int, int]) -> Array:
    """Return sequences that repeat, [m / length, length]."""
    some = np.minimum(np.random.default_rng(1).zipf(1.2, (PERIOD // LENGTH, LENGTH)), shape[1]) - 1
    return np.resize(some, (-(-shape[0] // LENGTH), LENGTH))


def expected_of(shape: tuple[int, int], student: Student | None) -> Repeated:
    """Return the logits that all nodes expect, of a language model's shape: a student's, or drawn."""
    if student is None:
        rng = np.random.default_rng(0)
        ranks = rng.random((PERIOD, shape[1]), np.float32).argsort(axis=1) + 1
        values = 1.3 * (rng.standard_normal(ranks.shape, np.float32) - 1.1 * np.log(ranks, dtype=np.float32))
    else:
        values = student.logits(sequences_of((PERIOD, shape[1])))
    return Repeated(shape, np.concatenate([values, values]).astype(np.float32))


def node_logits(expected: Repeated, node: int) -> Repeated:
    """Return the logits of a node: what all nodes have in common beside what is expected, and its own."""
    common, own = (np.random.default_rng([seed, 2]) for seed in (0, 1 + node))
    size = PERIOD, expected.shape[1]
    apart = 0.85 * common.standard_normal(size, np.float32) + 0.65 * own.standard_normal(size, np.float32)
    return Repeated(expected.shape, expected.table + np.concatenate([apart, apart]))


def computed_prior(expected: Repeated, student: Student) -> ComputedPrior:
    """Return the prior as an aggregator has it that computes it; what is noted of it repeats as well."""
    shape = expected.shape
    found = dict[tuple[int, int], RoundedBlock]()

    def noted() -> Iterator[RoundedBlock]:
        for rows in block_ranges(shape):
            key = rows.start % PERIOD, len(rows)
            if key not in found:
                (found[key],) = round_blocks([expected.block(rows)], (len(rows), shape[1]))
            yield found[key]

    return ComputedPrior(Predictions(student, sequences_of(shape)), collect_notes(noted(), shape))


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


def encode(expected: Repeated, nodes: int, bits: float, node: int, path: Path) -> None:
    """Write a node's frame."""
    shape = expected.shape
    _, plans = aggregator_of(shape, nodes, bits, Repeated(shape, in_eighths(expected.table)))
    payload = SAMPLES.encode(node_logits(expected, node).blocks(), plans[node])
    path.write_bytes(encode_frame(payload, plans[node], SAMPLES.code))


def aggregate(expected: Repeated, bits: float, frames: list[Path], student: Student | None) -> dict[str, Any]:
    """Check, spool and combine the frames in this process; measure its peak beyond what it held before them."""
    shape = expected.shape
    table = Repeated(shape, in_eighths(expected.table))
    prior = table if student is None else computed_prior(expected, student)
    aggregator, _ = aggregator_of(shape, len(frames), bits, prior)
    before = resident()
    start = time.perf_counter()
    sent = 0
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
        "computed": student is not None,
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
    name = "-".join(f"{size:g}" for size in (arguments.nodes, *shape, arguments.bits))
    folder = arguments.frames / (f"{name}-computed" if arguments.computed else name)
    folder.mkdir(parents=True, exist_ok=True)
    student = student_of(arguments.vocab, folder) if arguments.computed else None
    expected = expected_of(shape, student)
    paths = [folder / f"{node}.frame" for node in range(arguments.nodes)]
    if arguments.node is not None:
        encode(expected, arguments.nodes, arguments.bits, arguments.node, paths[arguments.node])
        return
    for node, path in enumerate(paths):
        if not path.exists():  # in a process of its own: a peak never falls
            command = [sys.executable, "-m", "benchmarks.labels_memory", *sys.argv[1:], "--node", str(node)]
            subprocess.run(command, check=True)
    print(json.dumps(aggregate(expected, arguments.bits, paths, student)))


if __name__ == "__main__":
    main()
