"""Targets: what a student is distilled to, as dense logits or as a sparse change to its last prediction.

Both forms mean t = base + change for every context of a probe set, where row s*T + t is position t of sequence s:

    dense       base = softmax(logits), no change
    relative    base = pi, the rounded prediction of a *reference* student; the change is a few entries per context

pi is what both ends of the protocol hold as the prior: log-probabilities rounded to eighths of a nat, no lower than
-40 nats, exponentiated and normalized again. It is computed as it is needed, so a relative target of m contexts takes
memory for its changes only. t may be negative somewhere: cross entropy -sum_v t_v log q_v is linear in t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fpld.codecs.prior import EIGHTHS_PER_NAT, FINE_GRID, PriorGrid, in_eighths
from fpld.errors import InputError
from fpld.numerics import log_softmax, softmax, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from fpld.codecs.prior import Eighths, Prior
    from fpld.types import Ints, Reals

_LEAST_PROBABILITY = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """Hold the targets of `contexts` contexts over `vocab` tokens; make one with `dense` or `sparse`.

    `starts` [m+1], `tokens` and `changes` are the changes by context (CSR): those of context i are entries
    starts[i] to starts[i+1]. A token that stands twice in a context is changed by the sum. `grid` is that of the prior.

    >>> target = Target.sparse([0, 2, 2], [1, 3], [0.25, -0.25], vocab=4)
    >>> [part.tolist() for part in target.changed(np.array([1, 0]))]
    [[1, 1], [1, 3], [0.25, -0.25]]
    """

    vocab: int
    logits: NDArray[np.float32] | None
    starts: Ints
    tokens: NDArray[np.int32]
    changes: NDArray[np.float32]
    grid: PriorGrid = FINE_GRID

    @classmethod
    def dense(cls, logits: ArrayLike) -> Self:
        """Return the target softmax(logits), logits [m, V]; log-probabilities will do."""
        values = np.asarray(logits)
        if values.ndim != 2 or values.size == 0 or not np.issubdtype(values.dtype, np.floating):
            raise InputError(
                "target must be floating-point logits of shape (contexts, vocab), "
                f"got {values.dtype} with shape {values.shape}"
            )
        # A sum is finite only if no element is NaN, and needs no mask of the size of the target.
        if not np.isfinite(values.max(axis=1).sum(dtype=np.float64) + values.min(axis=1).sum(dtype=np.float64)):
            raise InputError("target must be finite; floor log-probabilities instead of passing -inf")
        return cls.trusted(values.astype(np.float32, copy=False))

    @classmethod
    def trusted(cls, logits: NDArray[np.float32]) -> Self:
        """Return the target softmax(logits) of logits [m, V] that are known to be finite, without a check."""
        no_changes = np.zeros(len(logits) + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32)
        return cls(logits.shape[1], logits, *no_changes)

    @classmethod
    def sparse(
        cls,
        starts: ArrayLike,
        tokens: ArrayLike,
        changes: ArrayLike,
        *,
        vocab: int,
        grid: PriorGrid = FINE_GRID,
    ) -> Self:
        """Return the target pi + change, relative to the rounded prediction pi of a reference student."""
        places, ids, values = (
            _vector(name, value, kind, dtype)
            for name, value, kind, dtype in (
                ("starts", starts, np.integer, np.int64),
                ("tokens", tokens, np.integer, np.int32),
                ("changes", changes, np.floating, np.float32),
            )
        )
        if len(places) < 2 or places[0] != 0 or (np.diff(places) < 0).any():
            raise InputError("starts must begin with 0 and never fall, with one entry more than there are contexts")
        if not places[-1] == len(ids) == len(values):
            raise InputError(
                f"starts must end at the number of tokens and changes, got {places[-1]} for {len(ids)} tokens "
                f"and {len(values)} changes"
            )
        if ids.size and (ids.min() < 0 or ids.max() >= vocab):
            raise InputError(f"tokens must be ids of 0 to {vocab - 1}, got {ids.min()} to {ids.max()}")
        if not np.isfinite(values).all():
            raise InputError(f"changes must be finite, got {values[~np.isfinite(values)][0]}")
        return cls(vocab, None, places, ids, values, grid)

    @classmethod
    def unchanged(cls, contexts: int, vocab: int) -> Self:
        """Return the target pi: the rounded prediction of a reference student, and nothing else."""
        return cls.sparse(np.zeros(contexts + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), vocab=vocab)

    def scaled(self, factor: float) -> Target:
        """Return a relative target with its changes multiplied by a factor."""
        if factor == 1.0:
            return self
        return replace(self, changes=(self.changes * np.float32(factor)).astype(np.float32))

    def joined(self, others: Sequence[Target]) -> Target:
        """Return this relative target with the contexts of others after its own; all have one grid."""
        parts = [self, *others]
        counts = np.concatenate([np.diff(part.starts) for part in parts])
        starts = np.concatenate([[0], np.cumsum(counts)])
        tokens = np.concatenate([part.tokens for part in parts])
        changes = np.concatenate([part.changes for part in parts])
        return Target.sparse(starts, tokens, changes, vocab=self.vocab, grid=self.grid)

    @property
    def contexts(self) -> int:
        """Return m, the number of contexts."""
        return len(self.starts) - 1

    @property
    def size(self) -> int:
        """Return the number of coordinates, m * V."""
        return self.contexts * self.vocab

    @property
    def relative(self) -> bool:
        """Return whether the target is relative to a reference student's prediction."""
        return self.logits is None

    @property
    def array(self) -> NDArray[np.float32]:
        """Return the logits [m, V] of a dense target."""
        if self.logits is None:
            raise InputError("a target relative to a prediction has no logits: add the prior with `absolute`")
        return self.logits

    def absolute(self, prior: Prior) -> Target:
        """Return the same target as a dense one, given the prior; probabilities are floored at 1e-9."""
        if self.logits is not None:
            return self
        logits = np.empty((self.contexts, self.vocab), np.float32)
        for rows in split(self.contexts, self.vocab):
            t = _probabilities(prior.block(rows))
            places, tokens, changes = self.changed(np.arange(rows.start, rows.stop))
            np.add.at(t, (places, tokens), changes)
            logits[rows.start : rows.stop] = np.log(np.maximum(t, _LEAST_PROBABILITY))
        return Target.dense(logits)

    def changed(self, contexts: Ints) -> tuple[Ints, NDArray[np.int32], NDArray[np.float32]]:
        """Return the changes of some contexts: at which of them (0 is the first), of which token, by how much."""
        counts = self.starts[contexts + 1] - self.starts[contexts]
        places = np.repeat(np.arange(len(contexts)), counts)
        # The k-th entry of the result is entry k + shift of the target, with one shift for each context.
        shift = self.starts[contexts] - (np.cumsum(counts) - counts)
        entries = np.arange(len(places)) + shift[places]
        return places, self.tokens[entries], self.changes[entries]

    def rows(self, contexts: Ints, reference: Reals | None = None) -> tuple[Reals, Reals]:
        """Return t [n, V] of some contexts, and the log-probabilities [n, V] to compare a student's with.

        These are log t of a dense target, and those of the reference student of a relative one, from its logits
        `reference` [n, V] for the same contexts.
        """
        if self.logits is not None:
            log_p = log_softmax(self.logits[contexts])
            return np.exp(log_p), log_p
        if reference is None:
            raise InputError("reference must be the logits of the reference student for a relative target, got None")
        t = rounded_prediction(reference, self.grid)
        places, tokens, changes = self.changed(contexts)
        np.add.at(t, (places, tokens), changes)
        return t, log_softmax(reference)


def as_target(value: Target | ArrayLike) -> Target:
    """Return a target as it is, and an array of logits [m, V] as a dense one."""
    return value if isinstance(value, Target) else Target.dense(value)


def rounded_prediction(logits: Reals, grid: PriorGrid = FINE_GRID) -> NDArray[np.float32]:
    """Return pi [n, V], the probabilities that the prior of these logits stands for.

    >>> print(rounded_prediction(np.log(np.array([[0.5, 0.25, 0.25]]))).round(3))
    [[0.483 0.259 0.259]]
    """
    return _probabilities(in_eighths(logits, grid))


def _probabilities(eighths: Eighths) -> NDArray[np.float32]:
    return softmax(eighths / np.float32(EIGHTHS_PER_NAT), np.float32)


def _vector(name: str, value: ArrayLike, kind: type, dtype: type) -> NDArray[Any]:
    array = np.asarray(value)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, kind) or array.size == 0):
        raise InputError(
            f"{name} must be a sequence of {np.dtype(dtype).name}, got {array.dtype} with shape {array.shape}"
        )
    if kind is np.integer and array.size and (array.min() < np.iinfo(dtype).min or array.max() > np.iinfo(dtype).max):
        raise InputError(f"{name} must fit {np.dtype(dtype).name}, got {array.min()} to {array.max()}")
    return array.astype(dtype, copy=False)
