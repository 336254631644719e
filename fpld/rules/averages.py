"""Averages of logits: the mean of Algorithm 1, and the mean weighted by precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.rules.base import RuleTraits

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Reals


@dataclass(frozen=True, slots=True)
class Mean:
    """Average coordinate by coordinate: line 9 of Algorithm 1."""

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        return RuleTraits()

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Return an accumulator for a block of contexts."""
        return _Mean(shape)


class _Mean:
    def __init__(self, shape: tuple[int, int]) -> None:
        self._total: Reals = np.zeros(shape, np.float32)
        self._nodes = 0

    def add(self, decoded: Decoded) -> None:
        if self._nodes == 0:
            self._total = decoded.values.copy()
        else:
            self._total += decoded.values
        self._nodes += 1

    def result(self) -> Reals:
        return self._total / np.float32(self._nodes)


@dataclass(frozen=True, slots=True)
class Precision:
    """Average with weights 1 / variance; where some nodes have no variance, the result is the mean of those.

    A variance follows from what a node reports, so it is floored at the median node's (of an even number, the lower).
    Noisy nodes have less weight than that one, but none has more, whatever it claims.

    >>> from fpld.rules import combine
    >>> from fpld.types import Decoded
    >>> zero = np.zeros((1, 1))
    >>> pairs = [(0.0, 1.0), (3.0, 2.0)]
    >>> combine(PRECISION, [Decoded(np.array([[x]]), np.array([[v]]), zero) for x, v in pairs]).tolist()
    [[1.0]]
    """

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        return RuleTraits(needs_all=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:  # noqa: ARG002  # the signature of all rules
        """Return an accumulator for a block of contexts."""
        return _Precision()


class _Precision:
    """Hold all nodes of a block: the median of their variances follows from all of them."""

    def __init__(self) -> None:
        self._values: list[Reals] = []
        self._variances: list[Reals] = []

    def add(self, decoded: Decoded) -> None:
        self._values.append(decoded.values.copy())
        self._variances.append(np.array(np.broadcast_to(decoded.variance, decoded.values.shape)))

    def result(self) -> Reals:
        values = np.stack(self._values)
        variances = np.stack(self._variances)
        floored = np.maximum(variances, np.sort(variances, axis=0)[(len(variances) - 1) // 2])
        exact = floored == 0
        weights = np.where(exact.any(axis=0), exact, 1 / np.where(exact, 1, floored))
        result: Reals = ((weights * values).sum(axis=0) / weights.sum(axis=0)).astype(values.dtype)
        return result


MEAN = Mean()
PRECISION = Precision()
