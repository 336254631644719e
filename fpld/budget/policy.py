"""Who gets how many bits in a round: given weights, a warm-up (Algorithm 2), or everyone their cap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.errors import BudgetError, InputError
from fpld.registry import allocators, codecs, estimators

if TYPE_CHECKING:
    from fpld.budget.estimators import State
    from fpld.types import Floats

_LEAST_WEIGHT = 1e-12  # of the largest
ROOM = 1.25
"""Of the bits that a node used: what it may have in the next round if it left some unused."""
_CLOSE = 1e-6  # of the total: how far rounding may take an allocator from it


def usual_allocator(codec: str) -> str:
    """Return the allocator for a codec if none is named: it goes by how the codec's noise falls with bits.

    A sampled label's falls as 1/bits, that of dense ones as 4^-bits.
    """
    return "square-root" if codecs.get(codec).traits.sparse else "optimal"


def _bounded(weights: Floats) -> Floats:
    """Hold estimated weights to a range that any allocator can work with: they follow from what nodes claim."""
    top = float(np.nanmax(weights, initial=0.0, where=np.isfinite(weights)))
    return np.clip(np.nan_to_num(weights, nan=top, posinf=top), max(top * _LEAST_WEIGHT, _LEAST_WEIGHT), max(top, 1.0))


def check_choice(allocator: str | None, estimator: str, forget: float) -> None:
    """Refuse what the estimator would ignore."""
    wants = estimators.get(estimator).wants
    if allocator is not None and not wants.allocator:
        raise InputError(
            f"allocator must be left out with the estimator {estimator!r}, which shares the total out itself, "
            f"got {allocator!r}"
        )
    if forget < 1 and not wants.forget:
        raise InputError(f"forget must be 1 with the estimator {estimator!r}, which has no memory, got {forget:g}")


@dataclass(frozen=True, eq=False, slots=True)
class Budget:
    """What is known about bits before the run: caps, floors and total in bits per probe context.

    Without a total every node sends at its cap. With one, `allocator` shares it out by the nodes' weights; with an
    `estimator` they are estimated, and the first `warmup` rounds are uniform (Algorithm 2). `forget` < 1 lets the
    estimate fade, for nodes that drift. Without an allocator it is the `usual` one, or the estimator's own. By what is
    estimated of it, no node gets more than `share` times what it would have if the total were shared out evenly: a
    node may claim what it likes, and the others keep theirs.
    """

    caps: Floats
    floors: Floats
    vocab: int
    total: float | None = None
    allocator: str | None = None
    weights: Floats | None = None
    estimator: str = "none"
    warmup: int = 1
    forget: float = 1.0
    usual: str = "optimal"
    share: float = 2.0

    def __post_init__(self) -> None:
        check_choice(self.allocator, self.estimator, self.forget)
        _check.real("share", self.share, least=1.0)

    def bits(self, round: int, estimate: State | None = None, useful: Floats | None = None) -> Floats:
        """Return the bits per probe context of each node in a round, from what the estimator knows so far.

        Beyond `useful` bits a node gains nothing: what it could not use goes to others, or to no one.
        """
        if useful is not None:
            return self._within_useful(useful).bits(round, estimate)
        if self.total is None:
            return self.caps
        estimator = estimators.get(self.estimator)
        known = None if estimate is None else estimator.weights(estimate)
        even = self._allocate("uniform", np.ones_like(self.caps), self.caps)
        if estimator.wants.warmup and (round <= self.warmup or known is None):
            return even
        caps = np.minimum(self.caps, self.share * even)
        if estimate is not None and not estimator.wants.allocator:
            bits = estimator.share(estimate, self.total, caps, self.floors)
            return self._within(bits, f"estimator {self.estimator!r}")
        if known is not None:
            return self._allocate(self.allocator or self.usual, _bounded(known), caps)
        given = np.ones_like(self.caps) if self.weights is None else self.weights
        return self._allocate(self.allocator or self.usual, given, self.caps)

    @property
    def sharing(self) -> str:
        """Describe how bits are shared out, for people."""
        wants = estimators.get(self.estimator).wants
        if self.total is None:
            return "every node sends at its limit"
        allocator = f"the allocator {self.allocator or self.usual!r}"
        if not wants.warmup:
            return f"the total is shared out by {allocator}"
        named = f"the estimator {self.estimator!r}"
        later = f"{allocator} with weights of {named}" if wants.allocator else f"{named} itself"
        return f"the total is shared out evenly until round {self.warmup}, then by {later}"

    def _within_useful(self, useful: Floats) -> Budget:
        caps = np.minimum(self.caps, np.maximum(useful, self.floors))
        return replace(self, caps=caps, total=None if self.total is None else min(self.total, float(caps.sum())))

    def _allocate(self, name: str, weights: Floats, caps: Floats) -> Floats:
        bits = allocators.get(name)(weights, self.total or 0.0, self.vocab, caps, self.floors)
        return self._within(bits, f"allocator {name!r}")

    def _within(self, bits: Floats, whose: str) -> Floats:
        """Check what came from outside: the total, shared out within caps and floors."""
        total, room = self.total or 0.0, _CLOSE * (self.total or 0.0)
        found = np.asarray(bits, np.float64)
        if found.shape != self.caps.shape or not np.isfinite(found).all():
            raise BudgetError(f"{whose} must return a number of bits for each of {self.caps.size} nodes, got {bits!r}")
        outside = (found < self.floors - room) | (found > self.caps + room)
        if outside.any():
            worst = int(outside.argmax())
            raise BudgetError(
                f"{whose} must keep node {worst} between its floor {self.floors[worst]:g} and its cap "
                f"{self.caps[worst]:g} bits per probe context, got {found[worst]:g}"
            )
        if abs(found.sum() - total) > room:
            raise BudgetError(f"{whose} must share out the total of {total:g} bits, got a sum of {found.sum():g}")
        return np.clip(found, self.floors, self.caps)
