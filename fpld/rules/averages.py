"""Averages of logits: the plain mean, and the one that weighs by precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Reals


@dataclass(frozen=True, slots=True)
class Mean:
    """Average coordinate by coordinate: line 9 of Algorithm 1."""

    needs_all: bool = False

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

    >>> from fpld.rules import combine
    >>> from fpld.types import Decoded
    >>> none = np.zeros((1, 1))
    >>> pairs = [(0.0, 1.0), (3.0, 2.0)]
    >>> combine(PRECISION, [Decoded(np.array([[x]]), np.array([[v]]), none) for x, v in pairs]).tolist()
    [[1.0]]
    """

    needs_all: bool = False

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Begin with a block."""
        return _Precision(shape)


class _Precision:
    """Nodes without any variance are added up apart: where there are some, they alone count."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._parts: list[Reals] = [np.zeros(shape, np.float32)] * 4

    def add(self, decoded: Decoded) -> None:
        values, variance = decoded.values, decoded.variance
        exact = np.broadcast_to(variance == 0, values.shape)
        weight = np.where(exact, 0, 1 / np.where(variance == 0, 1, variance)).astype(values.dtype)
        parts: list[Reals] = [weight * values, weight, exact * values, exact.astype(values.dtype)]
        self._parts = [a + b for a, b in zip(self._parts, parts, strict=True)]

    def result(self) -> Reals:
        total, weight, exact, count = self._parts
        result: Reals = np.where(count > 0, exact / np.maximum(count, 1), total / np.where(count > 0, 1, weight))
        return result


MEAN, PRECISION = Mean(), Precision()
