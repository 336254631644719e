"""The guarded mixture: nodes are audited on many contexts together, and far ones count for little, or for nothing.

A single sampled label is far too noisy to be compared with others, and a single dense one lets a node hide in what
honest nodes differ by. So the audit compares nodes on all that they said, in two views:

    each     the distances of their probabilities, context by context
    whole    the distances of their mean probabilities over all contexts: honest nodes agree much more closely there,
             so a bias towards a token that hides within a context shows

In each view a node's distance goes from the nodes' geometric median, and is compared with the median node's. What
exceeds `tolerance` times that multiplies the node's trust by exp(-eta * excess), as ExpGuard does (Roux, Zimmer and
Pokutta, *On the Byzantine-resilience of distillation-based federated learning*, arXiv 2402.12265). Trust is kept over
rounds, and never grows: the mixture weighs nodes by it. An honest node that is doubted costs a student much less than
an attacker that is believed, so `tolerance` is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.rules.base import Audit, Traits, probabilities
from fpld.rules.geometric import squared_distances, weiszfeld
from fpld.rules.mixture import Mixture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Floats, Reals

_NEAR = 1e-3  # a distance of probabilities that does no harm
_LEAST = 1e-12  # a trust


@dataclass(frozen=True, slots=True)
class Guarded:
    """Average probabilities of nodes by their trust; without a round's audit a block is audited by itself."""

    eta: float = 4.0
    tolerance: float = 1.5

    def __post_init__(self) -> None:
        _check.real("eta", self.eta, above=0.0)
        _check.real("tolerance", self.tolerance, least=1.0)

    def judge(self, audit: Audit, before: Floats | None = None) -> Floats:
        """Return the nodes' trust [K], from 1 down to almost nothing, given what it was before.

        >>> labels = np.array([[0.5, 0.5], [0.6, 0.4], [0.4, 0.6], [0.0, 1.0]])
        >>> GUARDED.judge(Audit(labels @ labels.T, np.zeros((4, 4)))).round(2).tolist()
        [1.0, 1.0, 1.0, 0.0]
        """
        excess = np.max([self._excess(gram) for gram in (audit.each, audit.whole)], axis=0)
        trust: Floats = np.maximum(np.exp(-self.eta * excess) * (1.0 if before is None else before), _LEAST)
        return trust

    def weighing(self, trust: Floats) -> Mixture:
        """Return the mixture of nodes that are trusted so far."""
        return Mixture(weights=tuple(trust.tolist()))

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        return Traits(needs_all=True, audits=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Begin with a block."""
        return _Guarded(self, shape)

    def _excess(self, gram: Floats) -> Floats:
        """Return how much farther than tolerated the nodes are from the middle, in distances of the median node."""
        away = np.sqrt(squared_distances(gram, weiszfeld(gram)))
        return np.maximum(away / max(float(np.median(away)), _NEAR) - self.tolerance, 0)


def add_up(nodes: Sequence[Reals]) -> tuple[Floats, Floats]:
    """Return sums over a block of contexts: of the nodes' inner products [K, K], and of their probabilities [K, V]."""
    stack = np.stack(nodes).astype(np.float64)
    flat = stack.reshape(len(stack), -1)
    return flat @ flat.T, stack.sum(axis=1)


class _Guarded:
    """Hold all nodes of a block, audit them, and mix."""

    def __init__(self, rule: Guarded, shape: tuple[int, int]) -> None:
        self._rule, self._shape = rule, shape
        self._nodes: list[Decoded] = []

    def add(self, decoded: Decoded) -> None:
        self._nodes.append(decoded._replace(values=decoded.values.copy()))

    def result(self) -> Reals:
        products, sums = add_up([probabilities(node) for node in self._nodes])
        sums /= self._shape[0]
        work = self._rule.weighing(self._rule.judge(Audit(products / self._shape[0], sums @ sums.T))).start(self._shape)
        for node in self._nodes:
            work.add(node)
        return work.result()


GUARDED = Guarded()
