"""The geometric median of the nodes' probabilities: the point whose distances to all nodes add up to the least.

Less than half of the nodes cannot carry it away, however far they go. It is a mean of the nodes with weights that
Weiszfeld's iteration finds, and these depend only on the nodes' inner products: so the same function serves a single
context, and all contexts of a round together (`fpld.rules.guarded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.rules.base import Traits, probabilities

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Floats, Reals

TINY = 1e-30  # a probability
_STEPS = 32
_NEAR = 1e-6  # of the nodes' typical length: closer than that is no distance


def weiszfeld(gram: Floats) -> Floats:
    """Return weights [..., K], 1 in all, with which the nodes' mean is their geometric median.

    `gram` [..., K, K] holds the nodes' inner products.

    >>> points = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [9.0, 9.0]])
    >>> (weiszfeld(points @ points.T) @ points).round(2).tolist()
    [0.5, 0.5]
    """
    size = np.sqrt(np.maximum(np.einsum("...kk->...k", gram), 0).mean(axis=-1, keepdims=True))
    weights = np.full(gram.shape[:-1], 1 / gram.shape[-1])
    for _ in range(_STEPS):
        pull = 1 / np.maximum(np.sqrt(squared_distances(gram, weights)), np.maximum(_NEAR * size, TINY))
        weights = pull / pull.sum(axis=-1, keepdims=True)
    return weights


def squared_distances(gram: Floats, weights: Floats) -> Floats:
    """Return the nodes' squared distances [..., K] to their mean with these weights, from their inner products."""
    along = (gram @ weights[..., None])[..., 0]
    whole = (weights * along).sum(axis=-1, keepdims=True)
    found: Floats = np.maximum(np.einsum("...kk->...k", gram) - 2 * along + whole, 0)
    return found


@dataclass(frozen=True, slots=True)
class Geometric:
    """Take the geometric median of the nodes' probabilities in each context."""

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        return Traits(needs_all=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:  # noqa: ARG002  # the form of all rules
        """Begin with a block."""
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
        return np.log(np.maximum(median, TINY)).astype(nodes.dtype)


GEOMETRIC = Geometric()
