"""Targets in PyTorch, a minibatch of sequences at a time, on the student's device.

A teacher gives what `fpld.students.targets.Target.rows` gives: the target t [B, T, V], which may be negative
somewhere, and the constant of the loss, so that -sum t log q / contexts - constant is the figure to report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from fpld.codecs.prior import EIGHTHS, LEAST_PRIOR
from fpld.errors import InputError
from fpld.numerics import split

if TYPE_CHECKING:
    from fpld.rules.target import Target
    from fpld.students.base import Student


_BLOCK = 1 << 20  # coordinates that are worked on together


class Teacher(Protocol):
    """What a student learns from."""

    def take(self, rows: np.ndarray) -> tuple[Tensor, float]:
        """Return the target [B, T, V] of some sequences, and the constant of the loss: a mean over contexts."""
        ...


class Dense:
    """Target logits as probabilities; what a softmax sums over a context is summed once and kept.

    The constant is the entropy of the target, so that the loss is KL.
    """

    def __init__(self, logits: np.ndarray, shape: tuple[int, int], device: torch.device) -> None:
        self._logits, self._device = logits.reshape(*shape, -1), device
        self._scale = np.full(shape, np.nan, np.float32)  # log of the sum of exponentials
        self._entropy = np.empty(shape, np.float32)

    @torch.no_grad()
    def take(self, rows: np.ndarray) -> tuple[Tensor, float]:
        """Return the probabilities of some sequences, and their mean entropy over contexts."""
        logits = torch.from_numpy(self._logits[rows]).to(self._device)
        new = np.isnan(self._scale[rows]).any()
        if new:
            self._scale[rows] = logits.logsumexp(dim=-1).cpu().numpy()
        log_p = logits - torch.from_numpy(self._scale[rows]).to(self._device)[..., None]
        p = log_p.exp()
        if new:
            self._entropy[rows] = -(p * log_p).sum(dim=-1).cpu().numpy()
        return p, float(self._entropy[rows].mean())


class Relative:
    """The rounded prediction of a reference student, which does not move, plus the target's sparse change.

    The constant is the cross entropy of the reference to the target, so that the loss starts at 0.
    """

    def __init__(self, target: Target, sequences: np.ndarray, reference: Student, device: torch.device) -> None:
        self._target, self._length, self._device = target, sequences.shape[1], device
        self._predictor: Any = reference.predictor(sequences)

    @torch.no_grad()
    def take(self, rows: np.ndarray) -> tuple[Tensor, float]:
        """Return t = pi + change of some sequences, and the mean cross entropy of the reference to it."""
        contexts = (rows[:, None] * self._length + np.arange(self._length)).ravel()
        t = self._logits(rows).view(len(contexts), -1)
        places, tokens, changes = self._target.changed(contexts)
        total = 0.0
        for part in split(len(contexts), t.shape[1], _BLOCK):
            log_q = F.log_softmax(t[part.start : part.stop], dim=-1)
            some = round_prediction(log_q)
            first, last = np.searchsorted(places, [part.start, part.stop])
            where = [self._here(index[first:last].astype(np.int64)) for index in (places - part.start, tokens)]
            # Not scatter_add_: on a GPU that adds in any order, and this in one.
            some.index_put_((where[0], where[1]), self._here(changes[first:last]), accumulate=True)
            t[part.start : part.stop] = some
            total -= float((some * log_q).sum())
        return t.view(len(rows), self._length, -1), total / len(contexts)

    def _logits(self, rows: np.ndarray) -> Tensor:
        """Return the reference's logits, an array that nobody else holds."""
        if hasattr(self._predictor, "tensor"):
            found: Tensor = self._predictor.tensor(rows)
            return found
        return self._here(self._predictor.logits(rows))

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def round_prediction(log_q: Tensor) -> Tensor:
    """Return the probabilities pi that the prior of these log-probabilities stands for (the last axis).

    As `fpld.students.targets.rounded_prediction`, in float32: a log-probability within some 1e-6 of the middle
    between two eighths may go to the other one.
    """
    eighths = (log_q * EIGHTHS).round_().clamp_(LEAST_PRIOR, 0)
    return F.softmax(eighths.div_(EIGHTHS), dim=-1)


def make_teacher(target: Target, sequences: np.ndarray, reference: Student | None, device: torch.device) -> Teacher:
    """Return the teacher for a target of these sequences [S, T]; a relative target needs its reference student."""
    if target.logits is not None:
        count, length = sequences.shape
        return Dense(target.logits, (count, length), device)
    if reference is None:
        raise InputError("reference must be a student for a relative target, got None")
    return Relative(target, sequences, reference, device)
