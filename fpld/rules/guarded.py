"""The guarded mixture: nodes are audited on many contexts together, and outliers get little weight, or none.

A single sampled label is too noisy to be compared with others, and within a single dense one an attack hides in the
differences of honest nodes. So the audit compares nodes on all of their labels, in several views:

    each     the distances of their probabilities, context by context
    whole    the distances of their mean probabilities over all contexts: honest nodes agree much more closely there,
             so a bias towards a token shows that is too small to be seen within a context

Dense labels are probabilities by construction. Sampled ones are unbiased numbers, and nothing in their code makes them
add up to one, so they are looked at in three more ways:

    relative each and whole once more, of changes to the prior that are divided by sqrt(pi + 1/V). A plain distance has
             mass M, spread over V tokens, as M / sqrt(V); this one as about M, and about so much it costs a student
    mass     the mean square of what the labels of a context are away from one in all. Of honest nodes it is zero but
             for its error, whatever their text is; `_MASS` beyond that counts as the median node's distance does

Where the aggregator knows the public text, there is a view for what is in few contexts, such as a backdoor:

    groups   the distances of means over the contexts that end with the same token, each group by itself. The farthest
             group counts. Honest nodes that differ are as far off as `group_tolerance` in some group of many

In each view a node's distance to the nodes' geometric median is compared with the median node's. The excess over
`tolerance` times that, or `context_tolerance` times context by context, multiplies the node's trust by
exp(-eta * excess), as ExpGuard does
(Roux, Zimmer and Pokutta, *On the Byzantine-resilience of distillation-based federated learning*, arXiv 2402.12265).
Trust is kept over rounds, never grows, and is a node's weight in the mixture. Losing an honest node costs a student
much less than trusting an attacker, so both are small. Context by context honest nodes are nearly equally far from the
median, whatever their texts, and an attacker does harm in proportion to its distance: less is allowed there.
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
    from fpld.rules.base import Accumulator, GroupProducts
    from fpld.types import Decoded, Floats, Reals

_LEAST_DISTANCE = 1e-3  # smaller distances of probabilities do no harm
_LEAST_TRUST = 1e-12
_MASS = 0.1  # root mean square of the mass that a node's labels have too much or too little
_SURE_ERRORS = 2.0  # a square counts less so many of its standard errors; a mass less twice as many


@dataclass(frozen=True, slots=True)
class Guarded:
    """Average probabilities by trust; without an audit of the round each block is audited by itself."""

    eta: float = 4.0
    tolerance: float = 1.5
    context_tolerance: float = 1.25
    group_tolerance: float = 5.0

    def __post_init__(self) -> None:
        validation.real("eta", self.eta, above=0.0)
        validation.real("tolerance", self.tolerance, least=1.0)
        validation.real("context_tolerance", self.context_tolerance, least=1.0)
        validation.real("group_tolerance", self.group_tolerance, least=1.0)

    def trust(self, audit: Audit, before: Floats | None = None) -> Floats:
        """Return the nodes' trust [K], from 1 down to almost nothing, from what it was before.

        >>> labels = np.array([[0.5, 0.5], [0.6, 0.4], [0.4, 0.6], [0.0, 1.0]])
        >>> GUARDED.trust(Audit(labels @ labels.T, np.zeros((4, 4)))).round(2).tolist()
        [1.0, 0.64, 1.0, 0.0]
        """
        views = [self._excess(audit.each, self.context_tolerance), self._excess(audit.whole, self.tolerance)]
        if audit.relative is not None:
            views.append(self._excess(audit.relative.each, self.context_tolerance, audit.relative.each_errors))
            views.append(self._excess(audit.relative.whole, self.tolerance, audit.relative.whole_errors))
        if audit.masses is not None:
            beyond = audit.masses.squares - 2 * _SURE_ERRORS * audit.masses.errors
            views.append(np.sqrt(np.maximum(beyond, 0)) / _MASS)
        if audit.groups is not None:
            views.append(self._group_excess(audit.groups))
        excess = np.max(views, axis=0)
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

    @staticmethod
    def _excess(gram: Floats, tolerance: float, errors: Floats | None = None) -> Floats:
        """Return by how much the nodes' distances to the median exceed a tolerance, in the median node's distance.

        With standard `errors` of the squares, a distance is what it is at least, and one within the errors is none.
        """
        squares = squared_distances(gram, weiszfeld(gram))
        doubt = np.zeros(len(gram)) if errors is None else _SURE_ERRORS * errors
        usual = max(float(np.median(np.sqrt(squares))), float(np.sqrt(np.median(doubt))), _LEAST_DISTANCE)
        return np.maximum(np.sqrt(np.maximum(squares - doubt, 0)) / usual - tolerance, 0)

    def _group_excess(self, groups: GroupProducts) -> Floats:
        """Return by how much the nodes' distances in their farthest group exceed the tolerance for groups.

        They are in the median node's distance there, or over all groups, if that is larger: in a group of contexts that
        all nodes know alike, a small difference is no sign of anything.
        """
        squares = squared_distances(groups.means, weiszfeld(groups.means))
        usual = np.median(np.sqrt(squares), axis=1)
        floor = max(float(np.sqrt(np.square(usual).mean())), _LEAST_DISTANCE)
        sure = np.sqrt(np.maximum(squares - _SURE_ERRORS * groups.errors, 0))
        farthest: Floats = (sure / np.maximum(usual, floor)[:, None]).max(axis=0)
        return np.maximum(farthest - self.group_tolerance, 0)


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
