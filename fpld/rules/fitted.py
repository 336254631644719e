"""The fitted mixture: nodes count by how well their mixture foretells the public text.

Where nodes' models differ in kind and size, a mixture in which all count alike is spoilt by the weakest. The aggregator
knows which token x follows a public context, so it can fit the weights w of the mixture to that: those that minimize
the Brier score, the mean over contexts of

    || sum_k w_k p_k - e_x ||^2  =  w' A w - 2 w' g + a constant,      w_k >= 0,  sum_k w_k = 1

with A the nodes' inner products and g the probabilities that they gave to what followed. Both are means over contexts,
so they are known without bias from sampled labels too, where the probability of a single token is mostly noise: the
logarithmic score is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.rules.base import Traits
from fpld.rules.mixture import Mixture

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator, Audit
    from fpld.types import Floats

_LEAST = 1e-9  # a weight: the mixture takes its logarithm
_STEPS = 2000  # of the descent; a few hundred do for a thousand nodes


@dataclass(frozen=True, slots=True)
class Fitted:
    """Average probabilities of nodes by weights that fit the public text; where that is not known all count alike."""

    def judge(self, audit: Audit, before: Floats | None = None) -> Floats:  # noqa: ARG002  # each round is fitted anew
        """Return how much each node counts [K], the one that counts most 1.

        >>> from fpld.rules.base import Audit
        >>> sure, unsure, wrong = [0.9, 0.1], [0.6, 0.4], [0.2, 0.8]  # and the first token follows
        >>> nodes = np.array([sure, unsure, wrong])
        >>> FITTED.judge(Audit(nodes @ nodes.T, np.zeros((3, 3)), nodes[:, 0])).round(3).tolist()
        [1.0, 0.0, 0.0]
        """
        if audit.gains is None:
            return np.ones(len(audit.each))
        weights = fit(audit.each, audit.gains)
        counting: Floats = np.maximum(weights / weights.max(), _LEAST)
        return counting

    def weighing(self, trust: Floats) -> Mixture:
        """Return the mixture of nodes that count so much."""
        return Mixture(weights=tuple(trust.tolist()))

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        return Traits(audits=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Begin with a block."""
        return Mixture().start(shape)


def fit(products: Floats, gains: Floats) -> Floats:
    """Return the weights on the simplex that minimize w' A w - 2 w' g, by accelerated projected descent."""
    values, vectors = np.linalg.eigh((products + products.T) / 2)
    values = np.maximum(values, 0)  # an estimate without bias may fall below
    curved = (vectors * values) @ vectors.T
    step = 1 / max(float(values[-1]), 1e-12)
    weights = moved = np.full(len(gains), 1 / len(gains))
    speed = 1.0
    for _ in range(_STEPS):
        new = _project(moved - step * (curved @ moved - gains))
        faster = (1 + np.sqrt(1 + 4 * speed**2)) / 2
        moved = new + (speed - 1) / faster * (new - weights)
        weights, speed = new, faster
    return weights


def _project(point: Floats) -> Floats:
    """Return the nearest point of the simplex."""
    ordered = np.sort(point)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(point) + 1)
    nearest: Floats = np.maximum(point - excess[np.flatnonzero(ordered > excess)[-1]], 0)
    return nearest


FITTED = Fitted()
