"""Measure what a round costs: seconds and peak memory for K nodes, m contexts and V tokens, each in a fresh process.

Synthetic logits go through the real protocol: every node codes and seals a frame, the aggregator checks, spools,
decodes and combines. There is no training. A few nodes take several rounds, of which the medians count: a round of
milliseconds says little. `python benchmarks/scaling.py` measures the whole grid and prints JSON lines; with --nodes,
--contexts and --vocab, one point of it.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fpld.protocol import Aggregator, Budget, Node, Settings

BITS = 4.0
_FRAMES = 128  # that are timed at least
# Nodes, contexts, vocabulary: growth in each of them, and a large round.
GRID = {
    "K": [(nodes, 64, 32_000) for nodes in (8, 32, 128, 512)],
    "K at m = 512": [(nodes, 512, 32_000) for nodes in (8, 32, 128)],
    "m": [(16, contexts, 32_000) for contexts in (64, 256, 1024)],
    "V": [(16, 256, vocab) for vocab in (1000, 8000, 32_000)],
    "large": [(64, 256, 32_000)],
}


def measure(nodes: int, contexts: int, vocab: int, rule: str) -> dict[str, Any]:
    """Run rounds in this process; seconds for coding and at the aggregator, and peak memory in MB."""
    _round(2, 2, vocab, rule)  # compiles, or reads what was compiled
    before = peak()
    rounds = [_round(nodes, contexts, vocab, rule) for _ in range(-(-_FRAMES // nodes))]
    found = {name: median(each[name] for each in rounds) for name in rounds[0]}
    return (
        {"nodes": nodes, "contexts": contexts, "vocab": vocab, "rule": rule}
        | found
        | {
            "start_mb": before,
            "peak_mb": peak(),
        }
    )


def _round(nodes: int, contexts: int, vocab: int, rule: str) -> dict[str, Any]:
    per_context = np.full(nodes, BITS * vocab)
    settings = Settings(
        names=[f"node {k}" for k in range(nodes)],
        run_key=bytes(16),
        probe=bytes(32),
        contexts=contexts,
        vocab=vocab,
        rounds=1,
        budget=Budget(caps=per_context, floors=np.full(nodes, float(vocab)), vocab=vocab),
        clips=[None] * nodes,
        rule=rule,
    )
    aggregator = Aggregator(settings)
    tasks = aggregator.open("none", {})
    coding = checking = processor = 0.0
    frame_bytes = 0
    logits = np.random.default_rng(0).standard_normal((contexts, vocab), np.float32)
    for k in range(nodes):
        start = time.perf_counter()
        task = tasks[k]
        node, _ = Node(k, bytes(32)).receive(task)
        _, frame = node.answer(task, logits)
        coding += time.perf_counter() - start
        start = time.perf_counter()
        used = time.process_time()
        receipt = aggregator.frame(k, frame)
        checking += time.perf_counter() - start
        processor += time.process_time() - used
        if receipt.verdict != "accepted":
            raise SystemExit(f"a frame was refused: {receipt.reason}")
        frame_bytes += len(frame)
    start = time.perf_counter()
    used = time.process_time()
    aggregator.close()
    aggregator.combine()
    combining = time.perf_counter() - start
    processor += time.process_time() - used
    return {
        "coding_seconds_per_node": coding / nodes,
        "checking_seconds": checking,
        "combining_seconds": combining,
        "processor_seconds": processor,
        "frames_mb": frame_bytes / 1e6,
    }


def child(nodes: int, contexts: int, vocab: int, rule: str) -> dict[str, Any]:
    """Measure one point in a fresh process, since a process's peak never falls."""
    sizes = "--nodes", str(nodes), "--contexts", str(contexts), "--vocab", str(vocab), "--rule", rule
    done = subprocess.run([sys.executable, __file__, *sizes], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def peak() -> float:
    """Return this process's peak memory in MB; on Linux getrusage would count what the parent held when it forked."""
    status = Path("/proc/self/status")
    if status.exists():
        return _status(status, "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def resident() -> float:
    """Return the memory that this process holds, in MB; where the system does not say, its peak."""
    status = Path("/proc/self/status")
    return _status(status, "VmRSS") if status.exists() else peak()


def _status(status: Path, name: str) -> float:
    return int(re.findall(rf"^{name}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)[0]) * 1024 / 1e6


def main() -> None:
    """Read the arguments and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--contexts", type=int)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--rule", default="mean")
    arguments = parser.parse_args()
    if arguments.nodes and arguments.contexts:
        print(json.dumps(measure(arguments.nodes, arguments.contexts, arguments.vocab, arguments.rule)))
        return
    for points in GRID.values():
        for point in points:
            print(json.dumps(child(*point, arguments.rule)), flush=True)


if __name__ == "__main__":
    main()
