"""Robust rules: they bound the influence of a few bad nodes, and need all nodes of a block at once.

Trimmed mean and median work coordinate by coordinate. The geometric median of the nodes' probabilities is the point
with the least sum of distances to all nodes: fewer than half of them cannot move it far, however far they go. It is a
mean of the nodes by weights from Weiszfeld's iteration, which depend only on the nodes' inner products. So the same
function serves a single context, and all contexts of a round together (`fpld.rules.guarded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld import validation
from fpld.errors import InputError
from fpld.rules.base import RuleTraits, probabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Floats, Reals


_LEAST_PROBABILITY = 1e-30
_WEISZFELD_STEPS = 32
_LEAST_DISTANCE = 1e-6  # relative to the nodes' norm


class _Stack:
    """Hold all nodes of a block, and apply a function to their values [K, n, V]."""

    def __init__(self, function: Callable[[Reals], Reals]) -> None:
        self._function = function
        self._values: list[Reals] = []

    def add(self, decoded: Decoded) -> None:
        self._values.append(decoded.values.copy())

    def result(self) -> Reals:
        return self._function(np.stack(self._values))


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Average after leaving out the `trim` largest and the `trim` smallest values of each coordinate."""

    trim: int = 1

    def __post_init__(self) -> None:
        validation.integer("trim", self.trim)

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        return RuleTraits(needs_all=True, least_nodes=2 * self.trim + 1, trims=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:  # noqa: ARG002  # the signature of all rules
        """Return an accumulator for a block of contexts."""
        return _Stack(self._trimmed)

    def _trimmed(self, values: Reals) -> Reals:
        nodes = len(values)
        if 2 * self.trim >= nodes:
            raise InputError(f"trim must be less than half of the {nodes} nodes, got {self.trim}")
        result: Reals = np.sort(values, axis=0)[self.trim : nodes - self.trim].mean(axis=0)
        return result


@dataclass(frozen=True, slots=True)
class Median:
    """Take the median of each coordinate."""

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        return RuleTraits(needs_all=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:  # noqa: ARG002  # the signature of all rules
        """Return an accumulator for a block of contexts."""
        return _Stack(_median)


def _median(values: Reals) -> Reals:
    result: Reals = np.median(values, axis=0)
    return result


def weiszfeld(gram: Floats) -> Floats:
    """Return weights [..., K] with sum 1, by which the nodes' mean is their geometric median.

    `gram` [..., K, K] holds the nodes' inner products.

    >>> points = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [9.0, 9.0]])
    >>> (weiszfeld(points @ points.T) @ points).round(2).tolist()
    [0.5, 0.5]
    """
    size = np.sqrt(np.maximum(np.einsum("...kk->...k", gram), 0).mean(axis=-1, keepdims=True))
    weights = np.full(gram.shape[:-1], 1 / gram.shape[-1])
    for _ in range(_WEISZFELD_STEPS):
        pull = 1 / np.maximum(
            np.sqrt(squared_distances(gram, weights)), np.maximum(_LEAST_DISTANCE * size, _LEAST_PROBABILITY)
        )
        weights = pull / pull.sum(axis=-1, keepdims=True)
    return weights


def squared_distances(gram: Floats, weights: Floats) -> Floats:
    """Return the nodes' squared distances [..., K] to their mean with these weights, from their inner products."""
    along = (gram @ weights[..., None])[..., 0]
    whole = (weights * along).sum(axis=-1, keepdims=True)
    squared: Floats = np.maximum(np.einsum("...kk->...k", gram) - 2 * along + whole, 0)
    return squared


@dataclass(frozen=True, slots=True)
class Geometric:
    """Take the geometric median of the nodes' probabilities in each context."""

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        return RuleTraits(needs_all=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:  # noqa: ARG002  # the signature of all rules
        """Return an accumulator for a block of contexts."""
        return _Geometric()


class _Geometric:
    def __init__(self) -> None:
        self._nodes: list[Reals] = []

    def add(self, decoded: Decoded) -> None:
        self._nodes.append(probabilities(decoded).copy())

    def result(self) -> Reals:
        nodes = np.stack(self._nodes, axis=1)  # [n, K, V]: a context's result does not depend on its neighbours
        exact = nodes.astype(np.float64)
        median = (weiszfeld(exact @ exact.swapaxes(1, 2))[:, None] @ exact)[:, 0]
        return np.log(np.maximum(median, _LEAST_PROBABILITY)).astype(nodes.dtype)


TRIMMED = Trimmed()
MEDIAN = Median()
GEOMETRIC = Geometric()
