"""Who gets how many bits in a round: given weights, a warm-up (Algorithm 2), or everyone their cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fpld.budget.allocators import equal_slopes
from fpld.registry import allocators

if TYPE_CHECKING:
    from fpld.types import Floats

Estimator = Literal["none", "second-moment", "distortion", "curves"]


@dataclass(frozen=True, eq=False, slots=True)
class Budget:
    """What is known about bits before the run: caps, floors and total in bits per probe context.

    Without a total every node sends at its cap. With one, `allocator` shares it out by the nodes' weights; with an
    `estimator` they are estimated, and the first `warmup` rounds are uniform (Algorithm 2). `forget` < 1 lets the
    estimate fade, for nodes that drift. The estimator `curves` has two numbers for each node, level and rate of its
    measured loss, and shares the total out by equal slopes.
    """

    caps: Floats
    floors: Floats
    vocab: int
    total: float | None = None
    allocator: str = "optimal"
    weights: Floats | None = None
    estimator: Estimator = "none"
    warmup: int = 1
    forget: float = 1.0

    def bits(self, round: int, estimate: Floats | None) -> Floats:
        """Return the bits per probe context of each node in a round, from the weights estimated so far."""
        if self.total is None:
            return self.caps
        weights = self.weights if self.weights is not None else np.ones_like(self.caps)
        name = self.allocator
        if self.estimator != "none":
            if round <= self.warmup or estimate is None:
                name = "uniform"
            elif self.estimator == "curves":
                return equal_slopes(estimate[:, 0], estimate[:, 1], self.total, self.caps, self.floors)
            else:
                weights = estimate
        return allocators.get(name)(weights, self.total, self.vocab, self.caps, self.floors)
