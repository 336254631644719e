"""Make, open, evaluate and compare students."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import students
from fpld.federation.heldout import losses
from fpld.numerics import log_softmax, split
from fpld.storage.files import read_utf8, write_atomic
from fpld.students import Student, student_class

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.storage.folder import Arrays
    from fpld.students.choice import StudentChoice

_DEVICE = ".device"
_BLOCK = 1 << 15  # coordinates that are worked on at a time: what is computed from them stays in the cache


def make_student(choice: StudentChoice, vocab: int, seed: int) -> Student:
    """Make the student of a [student] table, for a vocabulary of V tokens."""
    one_thread(choice.kind)
    return student_class(choice.kind)(replace(choice.settings, vocab=vocab), seed=seed, device=choice.device)


def save_base(student: Student, path: Path, device: str) -> None:
    """Write a model that this machine's processes open on a device.

    The device is a matter of the machine and not of the model, which goes to others: so it is in a file beside it.
    """
    if device != "cpu":
        write_atomic(path.with_suffix(_DEVICE), device.encode())
    student.save(path)


def open_student(base: Path, state: Arrays | None = None) -> Student:
    """Load a model to work with in this process, on its device and one thread; `state` replaces its weights."""
    student = students.load(base)
    beside = base.with_suffix(_DEVICE)
    if beside.exists():
        student.to(read_utf8(beside))
    one_thread(student.kind)
    if state is not None:
        student.load_state(state)
    return student


def one_thread(kind: str) -> None:
    """Set PyTorch to one thread: bits depend on it, and one process per node is faster than threads."""
    student_class(kind)
    if "torch" in sys.modules:  # the kind's own import has brought it, if it needs it
        from fpld.students.gradient import use_threads

        use_threads(1)


def heldout_losses(student: Student, heldout: Sequence[np.ndarray[Any, Any]], length: int) -> list[float]:
    """Return the loss in nats per token on the held-out text of each node."""
    return losses([student.token_nats(tokens, length) for tokens in heldout])


def blank_kl(target: np.ndarray[Any, Any]) -> float:
    """Return the mean over contexts of KL(softmax(target) || equal probabilities): log V less the entropy."""
    total = 0.0
    for rows in split(len(target), target.shape[1], _BLOCK):
        log_p = log_softmax(target[rows.start : rows.stop])
        total += float((np.exp(log_p) * log_p).sum(dtype=np.float64))
    return total / len(target) + math.log(target.shape[1])


def average(states: Sequence[Arrays]) -> Arrays:
    """Average weights, as FedAvg does with nodes that count alike."""
    return {
        name: np.asarray(np.mean([state[name] for state in states], axis=0, dtype=np.float64), np.float32)
        for name in states[0]
    }
