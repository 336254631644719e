"""Second moments of decoded logits: the paper's weights (Algorithm 2 and Corollary 6), and over time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

    from fpld.types import Floats


@dataclass(frozen=True, eq=False, slots=True)
class Moments:
    """Sums of squared decoded logits, and how many there were, for each of K nodes.

    With `forget = 1` this is the paper's warm-up estimator: w_i is the mean of the squared decoded logits over T_0
    rounds, m contexts and V tokens. With `forget < 1` the past fades by that factor each round, for nodes whose logits
    drift: a memory of 1 / (1 - forget) rounds. A node that did not answer keeps its weight.

    >>> warmup = Moments.start(nodes=2).update({0: np.full((5, 3), 2.0), 1: np.full((5, 3), 1.0)})
    >>> warmup.weights().tolist()
    [4.0, 1.0]
    >>> drifting = Moments.start(nodes=1, forget=0.5).update({0: np.ones((1, 4))}).update({0: np.full((1, 4), 3.0)})
    >>> round(float(drifting.weights()[0]), 3)  # (1 * 0.5 + 9) / (0.5 + 1)
    6.333
    """

    total: Floats
    count: Floats
    forget: float = 1.0

    @classmethod
    def start(cls, nodes: int, *, forget: float = 1.0) -> Moments:
        """Start with nothing seen."""
        _check.integer("nodes", nodes, least=1)
        forget = _check.real("forget", forget, above=0.0)
        if forget > 1:
            raise InputError(f"forget must be at most 1 (1: nothing is forgotten), got {forget:g}")
        return cls(np.zeros(nodes), np.zeros(nodes), forget)

    def update(self, decoded: Mapping[int, ArrayLike]) -> Moments:
        """Take in one round: for each node that answered, its decoded logits (any block shape)."""
        sums = {
            node: (float(np.square(values, dtype=np.float64).sum()), np.size(values))
            for node, values in decoded.items()
        }
        return self.add(sums)

    def add(self, sums: Mapping[int, tuple[float, int]]) -> Moments:
        """Take in one round as sums of squares and their counts, when decoding block by block."""
        total, count = self.total.copy(), self.count.copy()
        for node, (square, size) in sums.items():
            _check.integer("node", node, most=total.size - 1)
            total[node] = self.forget * total[node] + square
            count[node] = self.forget * count[node] + size
        return replace(self, total=total, count=count)

    @property
    def complete(self) -> bool:
        """Return whether every node has been heard."""
        return bool((self.count > 0).all())

    def weights(self) -> Floats:
        """Return w_i for every node; refuse while a node has not been heard at all."""
        if not self.complete:
            raise InputError(f"node {int((self.count == 0).argmax())} has sent nothing yet: it has no weight")
        weights: Floats = self.total / self.count
        return weights
