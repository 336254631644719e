"""Measure what a round costs: seconds and peak memory for K nodes and m contexts, each in a fresh process.

Synthetic logits go through the real protocol: every node codes and seals a frame, the aggregator checks, keeps,
decodes and combines. There is no training. `python benchmarks/scaling.py` measures the whole grid and prints JSON
lines; with --nodes and --contexts, one point of it.
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
from typing import Any

import numpy as np

from fpld.protocol import Aggregator, Budget, Node, Settings

VOCAB, BITS = 256, 4.0
NODES, CONTEXTS = (4, 16, 64), (500, 2000, 8000)


def measure(nodes: int, contexts: int) -> dict[str, Any]:
    """Run one round in this process; seconds for coding (all nodes) and at the aggregator, and peak memory in MB."""
    before = _peak()
    per_context = np.full(nodes, BITS * VOCAB)
    settings = Settings(
        names=[f"node {k}" for k in range(nodes)],
        run_key=bytes(16),
        probe=bytes(32),
        contexts=contexts,
        vocab=VOCAB,
        rounds=1,
        budget=Budget(caps=per_context, floors=np.full(nodes, float(VOCAB)), vocab=VOCAB),
        clips=[None] * nodes,
        rule="mixture",
    )
    aggregator = Aggregator(settings)
    tasks = {k: task.to_bytes() for k, task in aggregator.open("none", {}).items()}
    coding = collecting = 0.0
    for k in range(nodes):
        logits = np.random.default_rng(k).standard_normal((contexts, VOCAB), np.float32)
        start = time.perf_counter()
        node, task, _ = Node(k, bytes(32)).receive(tasks[k])
        _, frame = node.answer(task, logits)
        coding += time.perf_counter() - start
        start = time.perf_counter()
        receipt = aggregator.frame(k, frame)
        collecting += time.perf_counter() - start
        if receipt.verdict != "accepted":
            raise SystemExit(f"a frame was refused: {receipt.reason}")
        frame_bytes = len(frame)
    start = time.perf_counter()
    aggregator.close()
    aggregator.combine()
    combining = time.perf_counter() - start
    return {
        "nodes": nodes,
        "contexts": contexts,
        "coding_seconds_per_node": coding / nodes,
        "checking_seconds": collecting,
        "combining_seconds": combining,
        "frames_mb": nodes * frame_bytes / 1e6,
        "start_mb": before,
        "peak_mb": _peak(),
    }


def child(nodes: int, contexts: int) -> dict[str, Any]:
    """Measure one point in a fresh process, since a process's peak never falls."""
    command = [sys.executable, __file__, "--nodes", str(nodes), "--contexts", str(contexts)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def _peak() -> float:
    """Give this process's peak memory in MB; on Linux getrusage would count what the parent held when it forked."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)[0]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main() -> None:
    """Read the arguments and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--contexts", type=int)
    arguments = parser.parse_args()
    if arguments.nodes and arguments.contexts:
        print(json.dumps(measure(arguments.nodes, arguments.contexts)))
        return
    for nodes in NODES:
        for contexts in CONTEXTS:
            print(json.dumps(child(nodes, contexts)), flush=True)


if __name__ == "__main__":
    main()
