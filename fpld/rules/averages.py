"""Averages of logits: the plain mean, and the one that weighs by precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.rules.base import Traits

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Reals


@dataclass(frozen=True, slots=True)
class Mean:
    """Average coordinate by coordinate: line 9 of Algorithm 1."""

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        return Traits()

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Begin with a block."""
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
    """Average with weights 1 / variance; where nodes have none, they share the result among themselves.

    A variance follows from what a node says of itself, so it is held to at least the median node's (of an even number,
    the lower): noisy nodes count for less than it, but none counts for more, whatever it claims.

    >>> from fpld.rules import combine
    >>> from fpld.types import Decoded
    >>> none = np.zeros((1, 1))
    >>> pairs = [(0.0, 1.0), (3.0, 2.0)]
    >>> combine(PRECISION, [Decoded(np.array([[x]]), np.array([[v]]), none) for x, v in pairs]).tolist()
    [[1.0]]
    """

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        return Traits(needs_all=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:  # noqa: ARG002  # the form of all rules
        """Begin with a block."""
        return _Precision()


class _Precision:
    """Hold all nodes of a block: the median of their variances is known only at the end."""

    def __init__(self) -> None:
        self._values: list[Reals] = []
        self._variances: list[Reals] = []

    def add(self, decoded: Decoded) -> None:
        self._values.append(decoded.values.copy())
        self._variances.append(np.array(np.broadcast_to(decoded.variance, decoded.values.shape)))

    def result(self) -> Reals:
        values, variances = np.stack(self._values), np.stack(self._variances)
        floored = np.maximum(variances, np.sort(variances, axis=0)[(len(variances) - 1) // 2])
        exact = floored == 0
        weights = np.where(exact.any(axis=0), exact, 1 / np.where(exact, 1, floored))
        result: Reals = ((weights * values).sum(axis=0) / weights.sum(axis=0)).astype(values.dtype)
        return result


MEAN, PRECISION = Mean(), Precision()
