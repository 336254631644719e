"""Measure what a step of the preset `huggingface` costs: seconds of one core for 512 tokens, 8 windows of 64.

    fpld data fetch smollm2
    python -m benchmarks.pretrained

The tokens are random: time does not depend on them. Kept under out/bench/ for docs/results-huggingface.md
(`python -m docs.kept_results pretrained-steps out/bench`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fpld.config import read_config
from fpld.students.huggingface import HuggingFace
from fpld.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

OUT = Path(__file__).parent.parent / "out" / "bench"
WINDOWS = 8
LENGTH = 64
STEPS = 4


def seconds(work: Callable[[], Any]) -> float:
    """Return the processor's time for some work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def per_step(train: Callable[[int], Any]) -> float:
    """Return the time of one more step: what is done once, before the first, is left out."""
    return (seconds(lambda: train(1 + STEPS)) - seconds(lambda: train(1))) / STEPS


def measure(student: HuggingFace) -> dict[str, float]:
    """Return the seconds of each kind of work on 8 windows."""
    rng = np.random.default_rng(0)
    warm, new, probe = rng.integers(0, student.vocab, (3, WINDOWS, LENGTH))
    text = rng.integers(0, student.vocab, 4096)
    starts = np.zeros(probe.size + 1, np.int64)
    reference = student.copy()
    unchanged = Target.sparse(starts, np.zeros(0, np.int32), np.zeros(0, np.float32), vocab=student.vocab)
    with torch.inference_mode():
        student.features(warm)  # the first pass of a process takes longer
        forward = seconds(lambda: student.features(new))
        features = student.features(probe)
        logits = seconds(lambda: student.read_out(features))
    return {
        "forward without logits": forward,
        "logits over V": logits,
        "a training step": per_step(lambda steps: student.finetune(text, steps=steps, seed=0)),
        "a step of distillation, lower layers and reference known": per_step(
            lambda steps: student.distill(probe, unchanged, steps=steps, seed=0, reference=reference)
        ),
    }


def main() -> None:
    """Measure and keep."""
    torch.set_num_threads(1)
    student = HuggingFace(read_config("huggingface")[0].student.settings, seed=0)
    rows = [{"step": name, "seconds": found} for name, found in measure(student).items()]
    for row in rows:
        print(f"{row['seconds']:6.2f} s  {row['step']}")
    OUT.mkdir(parents=True, exist_ok=True)
    kept = {"command": "python -m benchmarks.pretrained", "seeds": [0], "rows": rows}
    (OUT / "pretrained-steps.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
