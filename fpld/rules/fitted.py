"""The fitted mixture: nodes are weighted so that their mixture predicts the public text well.

Where nodes' models differ in kind and size, an equally weighted mixture is as weak as its weakest models make it. The
aggregator knows which token x follows a public context, so it can fit the weights w of the mixture: those that minimize
the Brier score, the mean over contexts of

    || sum_k w_k p_k - e_x ||^2  =  w' A w - 2 w' g + a constant,      w_k >= 0,  sum_k w_k = 1

with A the nodes' inner products and g their probabilities of the token that follows. Both are means over contexts, so
sampled labels estimate them without bias, although the probability of a single token is mostly noise there. For the
logarithmic score that does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.rules.base import RuleTraits
from fpld.rules.mixture import Mixture

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator, Audit
    from fpld.types import Floats

_LEAST_WEIGHT = 1e-9  # the mixture takes the logarithm of a weight
_STEPS = 2000  # of the descent; a few hundred are enough for a thousand nodes


@dataclass(frozen=True, slots=True)
class Fitted:
    """Average probabilities by weights that fit the public text; without such text by equal weights."""

    def trust(self, audit: Audit, before: Floats | None = None) -> Floats:  # noqa: ARG002  # each round is fitted anew
        """Return the nodes' weights [K], the largest of them 1.

        >>> from fpld.rules.base import Audit
        >>> sure, unsure, wrong = [0.9, 0.1], [0.6, 0.4], [0.2, 0.8]  # the first token follows
        >>> nodes = np.array([sure, unsure, wrong])
        >>> FITTED.trust(Audit(nodes @ nodes.T, np.zeros((3, 3)), nodes[:, 0])).round(3).tolist()
        [1.0, 0.0, 0.0]
        """
        if audit.gains is None:
            return np.ones(len(audit.each))
        weights = fit(audit.each, audit.gains)
        scaled: Floats = np.maximum(weights / weights.max(), _LEAST_WEIGHT)
        return scaled

    def with_trust(self, trust: Floats) -> Mixture:
        """Return the mixture by these weights."""
        return Mixture(weights=tuple(trust.tolist()))

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        return RuleTraits(audits=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Return an accumulator for a block of contexts."""
        return Mixture().start(shape)


def fit(products: Floats, gains: Floats) -> Floats:
    """Return the weights on the simplex that minimize w' A w - 2 w' g, by accelerated projected gradient descent."""
    values, vectors = np.linalg.eigh((products + products.T) / 2)
    # An unbiased estimate of A may have eigenvalues below zero; without them the objective is convex.
    values = np.maximum(values, 0)
    convex = (vectors * values) @ vectors.T
    step = 1 / max(float(values[-1]), 1e-12)
    weights = np.full(len(gains), 1 / len(gains))
    ahead = weights
    momentum = 1.0
    for _ in range(_STEPS):
        projected = _project(ahead - step * (convex @ ahead - gains))
        next_momentum = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = projected + (momentum - 1) / next_momentum * (projected - weights)
        weights = projected
        momentum = next_momentum
    return weights


def _project(point: Floats) -> Floats:
    """Return the nearest point of the simplex."""
    ordered = np.sort(point)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(point) + 1)
    nearest: Floats = np.maximum(point - excess[np.flatnonzero(ordered > excess)[-1]], 0)
    return nearest


FITTED = Fitted()
