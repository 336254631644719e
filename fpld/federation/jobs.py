"""The heavy work as functions of plain arguments, so that worker processes can do it side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.prior import in_eighths
from fpld.data import ProbeSet
from fpld.errors import InputError
from fpld.federation.training import blank_kl, heldout_losses, open_student, probe_kl
from fpld.federation.work import work
from fpld.storage.arrays import read_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.federation.part import Part
    from fpld.federation.work import Place
    from fpld.storage.folder import Arrays


def node_round(part: Part, place: Place, task: bytes) -> bytes:
    """Let a node do a task."""
    return work(part, place, task)


def distill(
    base: Path,
    state: Arrays,
    probe: Path,
    target: np.ndarray[Any, Any],
    options: dict[str, Any],
    public: Path | None,
) -> tuple[Arrays, float]:
    """Distil the student from combined logits; return its weights and its KL to them on the probe set."""
    student, contexts = open_student(base, state), ProbeSet.load(probe)
    text = None if public is None else read_arrays(public)[0]["tokens"]
    student.distill(contexts.sequences, target, public=text, **options)
    divergence = probe_kl(student, contexts.sequences, target)
    # A student that knows less than nothing must not be broadcast: the last good one stays in the checkpoint.
    blank = blank_kl(target)
    if not divergence < blank:
        raise InputError(
            f"distill.rate must be lower: the student diverged, with a KL of {divergence:.3g} to its target; equal "
            f"probabilities have {blank:.3g}; the last checkpoint is intact"
        )
    return student.state(), divergence


def predict(base: Path, state: Arrays, probe: Path) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Return a student's prediction of the probe set as a prior: small integers, which travel to all nodes."""
    student, contexts = open_student(base, state), ProbeSet.load(probe)
    return np.concatenate([in_eighths(block) for block in student.logit_blocks(contexts.sequences)])


def finetune(
    base: Path, state: Arrays | None, texts: Sequence[Path], steps: int, seed: int, rate: float | None
) -> Arrays:
    """Fine-tune a model on one text, or on several pooled."""
    student = open_student(base, state)
    tokens = np.concatenate([read_arrays(text)[0]["tokens"] for text in texts])
    student.finetune(tokens, steps=steps, seed=seed, rate=rate)
    return student.state()


def evaluate(base: Path, state: Arrays | None, heldout: Path, length: int) -> list[float]:
    """Return the held-out loss at each node."""
    student = open_student(base, state)
    texts, _ = read_arrays(heldout)
    return heldout_losses(student, [texts[str(i)] for i in range(len(texts))], length)
