"""Losses in PyTorch: cross entropy through a large read-out, and the targets of distillation.

*Read-out.* Hidden states become a loss and its gradient by blocks. Of the logits [n, V] one block exists, which becomes
the gradient in place: no array of a minibatch's logits is kept for the backward pass, and the block stays in the cache.

*Targets.* A teacher returns, for a minibatch of sequences and on the student's device, what `fpld.target.Target.rows`
does in NumPy: the target t [B, T, V], which may be negative somewhere, and a constant. The reported loss is
-sum t log q / contexts - constant.

A teacher is told the minibatches of the whole training beforehand, and returns their targets in that order, by blocks.
Nothing that it does depends on the student that is trained. So a second thread may compute a block while the student
learns from the one before, and the result is the same (`prefetched`).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from fpld.codecs.prior import EIGHTHS_PER_NAT, FINE_GRID, PriorGrid
from fpld.errors import InputError
from fpld.numerics import split

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from fpld.students.base import Student
    from fpld.students.gradient import GradientStudent
    from fpld.target import Target

BLOCK_CONTEXTS = 128  # contexts in one matrix product: fewer make it slower
_CACHED_CONTEXTS = 4  # contexts whose logits stay in the cache while they become a gradient
_TEACHER_VALUES = 1 << 20  # coordinates that a teacher works on at a time
_MIXTURE_VALUES = 1 << 24  # coordinates of a block of targets from models: each model is loaded once for a block

Item = TypeVar("Item")


def token_loss(features: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean of -log q of the tokens [N] that follow, for hidden states [N, C] and a read-out [V, C]."""

    def finish(logits: Tensor, rows: slice) -> Tensor:
        following = tokens[rows, None]
        chosen = logits.gather(1, following)
        scale = _softmax(logits)
        logits.scatter_add_(1, following, torch.full_like(chosen, -1.0))
        return (scale - chosen).sum()

    return read_out_loss(features, weight, finish)


def target_loss(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -sum_v t_v log q_v for targets [N, V], which need not add up to one."""

    def finish(logits: Tensor, rows: slice) -> Tensor:
        t = targets[rows]
        total = t.sum(1, keepdim=True)
        dot = torch.linalg.vecdot(t, logits)
        scale = _softmax(logits)
        logits.mul_(total).sub_(t)
        loss: Tensor = (total * scale).sum() - dot.sum()
        return loss

    return read_out_loss(features, weight, finish)


def read_out_loss(
    features: Tensor, weight: Tensor, finish: Callable[[Tensor, slice], Tensor], at_once: int = _CACHED_CONTEXTS
) -> Tensor:
    """Return the mean over contexts of a loss of logits, for hidden states [N, C] and a read-out [V, C].

    `finish` takes the logits of `at_once` contexts or fewer, and which they are; it returns the sum of their losses and
    turns the logits into their gradient in place.
    """
    # The read-out keeps the precision of its weights, whatever that of the layers: its gradient is made in place.
    with torch.autocast(features.device.type, enabled=False):
        loss: Tensor = _ReadOut.apply(features.to(weight.dtype), weight, finish, at_once)  # type: ignore[no-untyped-call]
        return loss


def _softmax(logits: Tensor) -> Tensor:
    """Turn logits [n, V] into probabilities in place; return their log-sum-exp [n, 1]."""
    largest = logits.amax(1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(1, keepdim=True)
    logits.div_(total)
    return largest + total.log()


class _ReadOut(torch.autograd.Function):
    """Compute loss and gradient together: `finish` returns a loss, and turns logits into its gradient in place."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, finish: Callable[[Tensor, slice], Tensor], at_once: int
    ) -> Tensor:
        count = len(features)
        gradient = torch.empty_like(features)
        # Of the read-out, if it is trained too.
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=features.device)
        for start in range(0, count, BLOCK_CONTEXTS):
            stop = min(start + BLOCK_CONTEXTS, count)
            logits = torch.mm(features[start:stop], weight.t()).float()
            for first in range(start, stop, at_once):
                rows = slice(first, min(first + at_once, stop))
                total += finish(logits[rows.start - start : rows.stop - start], rows)
            torch.mm(logits.to(weight.dtype), weight, out=gradient[start:stop])
            if weight_gradient is not None:
                weight_gradient.addmm_(logits.t(), features[start:stop])
        ctx.save_for_backward(gradient, weight_gradient)
        return total / count

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor, Tensor | None, None, None]:
        gradient, weight_gradient = ctx.saved_tensors
        scale = (outer[0] / len(gradient)).to(gradient.dtype)
        return gradient * scale, None if weight_gradient is None else weight_gradient * scale, None, None


class TeacherTarget(NamedTuple):
    """The target [B, T, V] of a minibatch, and the constant of its loss: a mean over contexts."""

    t: Tensor
    constant: float


class Teacher(Protocol):
    """What a student learns from."""

    def blocks(self, minibatches: Iterable[np.ndarray]) -> Iterator[Iterable[TeacherTarget]]:
        """Yield the targets of minibatches in order, some at a time; a minibatch is numbers of sequences [B]."""
        ...


class DenseTeacher:
    """Target logits as probabilities; the log-sum-exp and the entropy of a context are computed once.

    The constant is the entropy of the target, so that the loss is KL.
    """

    def __init__(self, logits: np.ndarray, shape: tuple[int, int], device: torch.device) -> None:
        self._logits = logits.reshape(*shape, -1)
        self._device = device
        self._scale = np.full(shape, np.nan, np.float32)  # log of the sum of exponentials
        self._entropy = np.empty(shape, np.float32)

    def blocks(self, minibatches: Iterable[np.ndarray]) -> Iterator[Iterable[TeacherTarget]]:
        """Yield the targets of minibatches one by one."""
        return ([self.take(rows)] for rows in minibatches)

    @torch.no_grad()
    def take(self, rows: np.ndarray) -> TeacherTarget:
        """Return the probabilities of some sequences, and their mean entropy over contexts."""
        logits = torch.from_numpy(self._logits[rows]).to(self._device)
        new = np.isnan(self._scale[rows]).any()
        if new:
            self._scale[rows] = logits.logsumexp(dim=-1).cpu().numpy()
        log_p = logits - torch.from_numpy(self._scale[rows]).to(self._device)[..., None]
        p = log_p.exp()
        if new:
            self._entropy[rows] = -(p * log_p).sum(dim=-1).cpu().numpy()
        return TeacherTarget(p, float(self._entropy[rows].mean()))


class RelativeTeacher:
    """The rounded prediction of a fixed reference student, plus the target's sparse change.

    The constant is the cross entropy of the reference to the target, so that the loss starts at 0.
    """

    def __init__(self, target: Target, sequences: np.ndarray, reference: Student, device: torch.device) -> None:
        self._target = target
        self._length = sequences.shape[1]
        self._device = device
        self._predictor: Any = reference.predictor(sequences)

    def blocks(self, minibatches: Iterable[np.ndarray]) -> Iterator[Iterable[TeacherTarget]]:
        """Yield the targets of minibatches one by one."""
        return ([self.take(rows)] for rows in minibatches)

    @torch.no_grad()
    def take(self, rows: np.ndarray) -> TeacherTarget:
        """Return t = pi + change of some sequences, and the mean cross entropy of the reference to it."""
        contexts = (rows[:, None] * self._length + np.arange(self._length)).ravel()
        t = self._logits(rows).view(len(contexts), -1)
        places, tokens, changes = self._target.changed(contexts)
        total = 0.0
        for part in split(len(contexts), t.shape[1], _TEACHER_VALUES):
            log_q = F.log_softmax(t[part.start : part.stop], dim=-1)
            some = round_prediction(log_q, self._target.grid)
            first, last = np.searchsorted(places, [part.start, part.stop])
            where = [self._here(index[first:last].astype(np.int64)) for index in (places - part.start, tokens)]
            # scatter_add_ would add in any order on a GPU; index_put_ adds in one.
            some.index_put_((where[0], where[1]), self._here(changes[first:last]), accumulate=True)
            t[part.start : part.stop] = some
            total -= float((some * log_q).sum())
        return TeacherTarget(t.view(len(rows), self._length, -1), total / len(contexts))

    def _logits(self, rows: np.ndarray) -> Tensor:
        """Return the reference's logits, a tensor that may be changed in place."""
        if hasattr(self._predictor, "tensor"):
            logits: Tensor = self._predictor.tensor(rows)
            return logits
        return self._here(self._predictor.logits(rows))

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class ModelTeacher:
    """A mixture of models: t = sum_k shares[s, k] softmax(logits of model k) for sequence s.

    `model` is a copy of the student, which takes the weights `states` of one model after the other. The constant is the
    entropy of the target, so that the loss is KL.
    """

    def __init__(
        self,
        model: GradientStudent,
        states: Sequence[Mapping[str, np.ndarray]],
        shares: np.ndarray,
        sequences: np.ndarray,
    ) -> None:
        self._model = model
        self._states = states
        self._shares = shares
        self._sequences = sequences
        self._width = sequences.shape[1] * model.vocab  # coordinates of one sequence

    def blocks(self, minibatches: Iterable[np.ndarray]) -> Iterator[Iterable[TeacherTarget]]:
        """Yield the targets of minibatches, as many at a time as their sequences have some 2^24 coordinates."""
        size = max(1, _MIXTURE_VALUES // self._width)
        some: list[np.ndarray] = []
        distinct: set[int] = set()
        for rows in minibatches:
            more = distinct.union(rows.tolist())
            if some and len(more) > size:
                yield self._block(some, np.array(sorted(distinct)))
                some = []
                more = set(rows.tolist())
            some.append(rows)
            distinct = more
        if some:
            yield self._block(some, np.array(sorted(distinct)))

    def _block(self, minibatches: list[np.ndarray], distinct: np.ndarray) -> Iterator[TeacherTarget]:
        """Return the lessons of minibatches that have these distinct sequences, in rising order."""
        t, entropy = self._mixture(distinct)
        places = (np.searchsorted(distinct, rows) for rows in minibatches)
        return (TeacherTarget(t[torch.from_numpy(some)], float(entropy[some].mean())) for some in places)

    @torch.no_grad()
    def _mixture(self, rows: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the targets [n, T, V] of some sequences, and the entropy [n, T] of each context."""
        device = self._model.device
        at_once = max(1, _TEACHER_VALUES // self._width)
        t = torch.zeros((len(rows), self._sequences.shape[1], self._model.vocab), device=device)
        for state, share in zip(self._states, self._shares[rows].T, strict=True):
            places = np.flatnonzero(share > 0)
            if places.size == 0:
                continue
            self._model._set_state(state)
            for start in range(0, len(places), at_once):
                some = places[start : start + at_once]
                p = F.softmax(self._model.predict(self._sequences[rows[some]]), dim=-1)
                weight = torch.from_numpy(share[some].astype(np.float32)).to(device)
                t.index_add_(0, torch.from_numpy(some).to(device), p.mul_(weight[:, None, None]))
        entropy = [torch.special.entr(t[i : i + at_once]).sum(dim=-1) for i in range(0, len(t), at_once)]
        return t, torch.cat(entropy).cpu().numpy()


def prefetched(items: Iterator[Item], threads: int) -> Generator[Item]:
    """Yield items in order, each computed in a second thread while the caller works on the one before.

    An exception of the thread is raised here. The thread ends with the last item, or when the generator is closed.
    `threads` is the number of PyTorch's threads, on which the bits of a result depend.
    """
    end = object()
    with ThreadPoolExecutor(1, "prefetch", torch.set_num_threads, (threads,)) as pool:
        upcoming = pool.submit(next, items, end)
        while (item := upcoming.result()) is not end:
            upcoming = pool.submit(next, items, end)
            yield item  # type: ignore[misc]  # the end is no item


def has_spare_core() -> bool:
    """Return whether this process may use more than one core."""
    allowed = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1 if allowed is None else len(allowed(0))) > 1


def round_prediction(log_q: Tensor, grid: PriorGrid = FINE_GRID) -> Tensor:
    """Return the probabilities pi that the prior of these log-probabilities stands for (the last axis).

    As `fpld.codecs.prior` rounds, in float32: a log-probability within some 1e-6 of the middle between two integers
    may go to the other one.
    """
    exact = log_q * EIGHTHS_PER_NAT
    if grid == FINE_GRID:
        rounded = exact.round_()
    else:
        nats = (exact / EIGHTHS_PER_NAT).round_() * EIGHTHS_PER_NAT
        rounded = torch.where(exact > grid.likely, exact.round(), nats)
    return F.softmax(rounded.clamp_(grid.least, 0).div_(EIGHTHS_PER_NAT), dim=-1)


def make_teacher(target: Target, sequences: np.ndarray, reference: Student | None, device: torch.device) -> Teacher:
    """Return the teacher for a target of these sequences [S, T]; a relative target needs its reference student."""
    if target.logits is not None:
        count, length = sequences.shape
        return DenseTeacher(target.logits, (count, length), device)
    if reference is None:
        raise InputError("reference must be a student for a relative target, got None")
    return RelativeTeacher(target, sequences, reference, device)
