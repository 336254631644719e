"""The guarded mixture: nodes are audited on many contexts together, and outliers get little weight, or none.

A single sampled label is too noisy to be compared with others, and within a single dense one an attack hides in the
differences of honest nodes. So the audit compares nodes on all of their labels, in two views:

    each     the distances of their probabilities, context by context
    whole    the distances of their mean probabilities over all contexts: honest nodes agree much more closely there,
             so a bias towards a token shows that is too small to be seen within a context

In each view a node's distance to the nodes' geometric median is compared with the median node's. The excess over
`tolerance` times that multiplies the node's trust by exp(-eta * excess), as ExpGuard does (Roux, Zimmer and Pokutta,
*On the Byzantine-resilience of distillation-based federated learning*, arXiv 2402.12265). Trust is kept over rounds,
never grows, and is a node's weight in the mixture. Losing an honest node costs a student much less than trusting an
attacker, so `tolerance` is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld import validation
from fpld.rules.base import Audit, RuleTraits, probabilities, sum_products
from fpld.rules.mixture import Mixture
from fpld.rules.robust import squared_distances, weiszfeld

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Floats, Reals

_LEAST_DISTANCE = 1e-3  # smaller distances of probabilities do no harm
_LEAST_TRUST = 1e-12


@dataclass(frozen=True, slots=True)
class Guarded:
    """Average probabilities by trust; without an audit of the round each block is audited by itself."""

    eta: float = 4.0
    tolerance: float = 1.5

    def __post_init__(self) -> None:
        validation.real("eta", self.eta, above=0.0)
        validation.real("tolerance", self.tolerance, least=1.0)

    def trust(self, audit: Audit, before: Floats | None = None) -> Floats:
        """Return the nodes' trust [K], from 1 down to almost nothing, from what it was before.

        >>> labels = np.array([[0.5, 0.5], [0.6, 0.4], [0.4, 0.6], [0.0, 1.0]])
        >>> GUARDED.trust(Audit(labels @ labels.T, np.zeros((4, 4)))).round(2).tolist()
        [1.0, 1.0, 1.0, 0.0]
        """
        excess = np.max([self._excess(gram) for gram in (audit.each, audit.whole)], axis=0)
        trust: Floats = np.maximum(np.exp(-self.eta * excess) * (1.0 if before is None else before), _LEAST_TRUST)
        return trust

    def with_trust(self, trust: Floats) -> Mixture:
        """Return the mixture by this trust."""
        return Mixture(weights=tuple(trust.tolist()))

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        return RuleTraits(needs_all=True, audits=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Return an accumulator for a block of contexts."""
        return _Guarded(self, shape)

    def _excess(self, gram: Floats) -> Floats:
        """Return by how much the nodes' distances to the median exceed the tolerance, in the median node's distance."""
        distances = np.sqrt(squared_distances(gram, weiszfeld(gram)))
        return np.maximum(distances / max(float(np.median(distances)), _LEAST_DISTANCE) - self.tolerance, 0)


class _Guarded:
    """Hold all nodes of a block, audit them, and mix."""

    def __init__(self, rule: Guarded, shape: tuple[int, int]) -> None:
        self._rule = rule
        self._shape = shape
        self._nodes: list[Decoded] = []

    def add(self, decoded: Decoded) -> None:
        self._nodes.append(decoded._replace(values=decoded.values.copy()))

    def result(self) -> Reals:
        products, sums = sum_products([probabilities(node) for node in self._nodes])
        sums /= self._shape[0]
        trust = self._rule.trust(Audit(products / self._shape[0], sums @ sums.T))
        accumulator = self._rule.with_trust(trust).start(self._shape)
        for node in self._nodes:
            accumulator.add(node)
        return accumulator.result()


GUARDED = Guarded()
