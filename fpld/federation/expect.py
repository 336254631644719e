"""What a run on this machine will take: disk, memory and time, in round numbers and from above."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fpld.federation.check import Check, Finding
from fpld.federation.training import make_student
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.config import Config
    from fpld.students import Student

_STEPS = 3  # that are timed
_MOST = 20_000_000  # parameters of a model that is made only to be timed
_PROCESS = 300_000_000  # bytes of a process with PyTorch in it
_COPIES = 4  # of a model while it trains: weights, gradients and the two moments of AdamW


def expect(config: Config) -> Iterator[Finding]:
    """Yield disk, memory and time to expect; what is more than there is, is wrong. A sound configuration is needed.

    Pretrained models are not loaded for this, and so nothing is said of them.
    """
    vocab = Check(config, local=False).vocab
    settings = replace(config.student.settings, vocab=vocab)
    if config.student.kind == "huggingface" or not 0 < settings.parameters <= _MOST:
        return
    student = make_student(config.student, vocab, 0)
    logits = 4 * config.probe.contexts * vocab
    size = 4 * student.parameters
    federations = 1 + ("float32" in config.baselines.methods)
    # Models of each node and of the rounds; the prior's integers, and a node's last frame and reconstruction.
    disk = federations * ((3 * len(config.nodes) + 4) * size + 2 * logits) + 8 * config.data.limit
    free = shutil.disk_usage(_existing(Path(config.run.out))).free
    text = f"{show_size(disk)} at most, {show_size(free)} are free"
    yield Finding("run.out", f"disk: {text}", wrong=disk > free)
    workers = config.engine.workers
    memory = 3 * logits + max(workers, 1) * (_COPIES * size + logits // 4) + (workers + 1) * _PROCESS
    there = _available()
    known = "" if there is None else f", {show_size(there)} are free"
    yield Finding("engine.workers", f"memory: about {show_size(memory)}{known}", wrong=memory > (there or memory))
    seconds = _step(student) * steps(config) / max(min(config.engine.workers, len(config.nodes)), 1)
    yield Finding("run.rounds", f"training: about {_minutes(seconds)}, by {_STEPS} steps on this machine", wrong=False)


def steps(config: Config) -> int:
    """Count the training steps of a run with its baselines."""
    nodes, rounds = len(config.nodes), config.run.rounds
    local = rounds * config.local.steps * _private_share(config)
    federation = nodes * local + rounds * config.distill.steps
    each = {"alone": nodes * local, "pooled": local, "fedavg": nodes * local, "float32": federation}
    base = config.base.steps if config.base is not None else 0
    return base + federation + sum(each.get(name, 0) for name in config.baselines.methods)


def _private_share(config: Config) -> int:
    """Return how many ordinary steps a step of the nodes takes: private ones go through more windows, one by one."""
    if config.privacy is None:
        return 1
    batch = int(getattr(config.student.settings, "batch", 1))
    windows = (config.privacy.batch or batch) * (1 if config.privacy.unit == "window" else config.privacy.windows)
    return max(-(-2 * windows // batch), 1)


def _step(student: Student) -> float:
    """Return the seconds of a training step, after a first one that warms up."""
    text = np.random.default_rng(0).integers(student.vocab, size=4 * student.window + 64).astype(np.int32)
    student.finetune(text, steps=1, seed=0)
    start = time.perf_counter()
    student.finetune(text, steps=_STEPS, seed=0)
    return (time.perf_counter() - start) / _STEPS


def _minutes(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def _available() -> int | None:
    """Return the bytes of memory that are free, where the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None
