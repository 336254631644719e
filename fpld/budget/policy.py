"""The budget of a run: each node's bits in each round, by configured weights, by an estimator, or at its cap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fpld import validation
from fpld.errors import BudgetError, InputError
from fpld.registry import allocators, codecs, estimators

if TYPE_CHECKING:
    from fpld.budget.estimators import EstimatorState
    from fpld.types import Floats

ROOM = 1.25
"""A node that left bits unused is allotted this multiple of what it used in the next round."""
_LEAST_WEIGHT = 1e-12  # relative to the largest weight
_TOLERANCE = 1e-6  # relative to the total: rounding errors of an allocator


def usual_allocator(codec: str) -> str:
    """Return a codec's default allocator: noise falls as 1/bits for sampled labels, as 4^-bits for dense ones."""
    return "square-root" if codecs.get(codec).traits.sparse else "optimal"


def _bounded(weights: Floats) -> Floats:
    """Clip estimated weights to a range that any allocator can work with: they follow from what nodes claim."""
    top = float(np.nanmax(weights, initial=0.0, where=np.isfinite(weights)))
    return np.clip(np.nan_to_num(weights, nan=top, posinf=top), max(top * _LEAST_WEIGHT, _LEAST_WEIGHT), max(top, 1.0))


def check_choice(allocator: str | None, estimator: str, forget: float) -> None:
    """Raise InputError for an allocator or a `forget` that the estimator would ignore."""
    traits = estimators.get(estimator).traits
    if allocator is not None and not traits.allocator:
        raise InputError(
            f"allocator must be left out with the estimator {estimator!r}, which shares the total out itself, "
            f"got {allocator!r}"
        )
    if forget < 1 and not traits.forget:
        raise InputError(f"forget must be 1 with the estimator {estimator!r}, which has no memory, got {forget:g}")


@dataclass(frozen=True, eq=False, slots=True)
class Budget:
    """Share bits out to the nodes of a run.

    Parameters
    ----------
    caps, floors
        Most and least bits per probe context of each node [K].
    total
        Bits per probe context of all nodes; None lets every node send at its cap.
    allocator
        Shares the total out by the nodes' weights; None takes the `usual` one, or the estimator's own.
    weights
        Weights of the configuration [K]; None for equal ones.
    estimator, warmup, forget
        The estimator of the weights; the first `warmup` rounds are uniform (Algorithm 2), and `forget` < 1 lets the
        estimate fade for nodes that drift.
    share
        By estimated weights no node gets more than this multiple of an even share: a node that exaggerates its noise
        cannot take the others' bits.
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
        validation.real("share", self.share, least=1.0)

    def bits(self, round: int, estimate: EstimatorState | None = None, useful: Floats | None = None) -> Floats:
        """Return the bits per probe context of each node in a round, by the estimator's state.

        Beyond `useful` bits a node gains nothing: what it could not use goes to others, or to no one.
        """
        if useful is not None:
            return self._within_useful(useful).bits(round, estimate)
        if self.total is None:
            return self.caps
        estimator = estimators.get(self.estimator)
        estimated = None if estimate is None else estimator.weights(estimate)
        even = self._allocate("uniform", np.ones_like(self.caps), self.caps)
        if estimator.traits.warmup and (round <= self.warmup or estimated is None):
            return even
        caps = np.minimum(self.caps, self.share * even)
        if estimate is not None and not estimator.traits.allocator:
            bits = estimator.share(estimate, self.total, caps, self.floors)
            return self._within(bits, f"estimator {self.estimator!r}")
        if estimated is not None:
            return self._allocate(self.allocator or self.usual, _bounded(estimated), caps)
        weights = np.ones_like(self.caps) if self.weights is None else self.weights
        return self._allocate(self.allocator or self.usual, weights, self.caps)

    @property
    def sharing(self) -> str:
        """Describe how bits are shared out, for people."""
        traits = estimators.get(self.estimator).traits
        if self.total is None:
            return "every node sends at its limit"
        allocator = f"the allocator {self.allocator or self.usual!r}"
        if not traits.warmup:
            return f"the total is shared out by {allocator}"
        named = f"the estimator {self.estimator!r}"
        later = f"{allocator} with weights of {named}" if traits.allocator else f"{named} itself"
        return f"the total is shared out evenly until round {self.warmup}, then by {later}"

    def _within_useful(self, useful: Floats) -> Budget:
        caps = np.minimum(self.caps, np.maximum(useful, self.floors))
        return replace(self, caps=caps, total=None if self.total is None else min(self.total, float(caps.sum())))

    def _allocate(self, name: str, weights: Floats, caps: Floats) -> Floats:
        bits = allocators.get(name)(weights, self.total or 0.0, self.vocab, caps, self.floors)
        return self._within(bits, f"allocator {name!r}")

    def _within(self, bits: Floats, whose: str) -> Floats:
        """Check bits that an extension may have computed: they add up to the total, within caps and floors."""
        total = self.total or 0.0
        room = _TOLERANCE * (self.total or 0.0)
        checked = np.asarray(bits, np.float64)
        if checked.shape != self.caps.shape or not np.isfinite(checked).all():
            raise BudgetError(f"{whose} must return a number of bits for each of {self.caps.size} nodes, got {bits!r}")
        outside = (checked < self.floors - room) | (checked > self.caps + room)
        if outside.any():
            worst = int(outside.argmax())
            raise BudgetError(
                f"{whose} must keep node {worst} between its floor {self.floors[worst]:g} and its cap "
                f"{self.caps[worst]:g} bits per probe context, got {checked[worst]:g}"
            )
        if abs(checked.sum() - total) > room:
            raise BudgetError(f"{whose} must share out the total of {total:g} bits, got a sum of {checked.sum():g}")
        return np.clip(checked, self.floors, self.caps)
