"""The limit of a scene: reverse water-filling over its coordinates, for nodes that code without each other.

Of a coordinate the limit knows what a codec may know: its class by the prior, the class's residual variance, and the
weight that KL gives it. A code of Gaussian residuals with these variances cannot lose less at the same bits; errors
of K nodes are taken to be independent. Real residuals have longer tails than Gaussian ones, and nodes that agree and
share a grid of the dither do not err independently: so a codec can come out below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs.prior import CLASS_OF, CLASSES, in_eighths
from fpld.numerics import softmax
from fpld.paper.theory import rate_for, reverse_water_filling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.bench.scenes import Scene
    from fpld.types import Floats

_SAMPLE = 1 << 20  # coordinates are enough


class Limit:
    """Hold a scene's products of weight and residual variance."""

    def __init__(self, scene: Scene) -> None:
        every = max(scene.shape[0] * scene.shape[1] // _SAMPLE, 1)
        logits = scene.logits[:, ::every].astype(np.float64)
        weights = softmax(logits.mean(axis=0))
        if scene.prior is None:
            residuals, classes = logits, np.zeros(weights.shape, np.int64)
        else:
            prior = scene.prior[::every].astype(np.float64)
            residuals, classes = logits - prior, CLASS_OF[-in_eighths(prior)].astype(np.int64)
        # Softmax does not see a constant in a context, and the mean of a class is side information that costs nothing.
        residuals = residuals - residuals.mean(axis=-1, keepdims=True)
        count = np.maximum(np.bincount(classes.ravel(), minlength=CLASSES), 1)
        mean, square = (
            np.bincount(classes.ravel(), weights=part.ravel(), minlength=CLASSES) / count
            for part in (residuals.mean(axis=0), np.square(residuals).mean(axis=0))
        )
        variance = np.maximum(square - mean**2, 0)
        self.products: Floats = (weights * variance[classes]).ravel()
        self.scale = scene.shape[1] / (2 * scene.nodes)  # from the mean over coordinates to KL per context

    def kl(self, bits: float) -> float:
        """Return the least KL at so many bits per coordinate."""
        return self.scale * reverse_water_filling(self.products, bits)

    def bits(self, kl: float) -> float:
        """Return the least bits per coordinate for a KL."""
        return rate_for(self.products, kl / self.scale)

    def curve(self, budgets: Sequence[float]) -> tuple[Floats, Floats]:
        """Return points of the limit between the least and the largest budget."""
        bits = np.geomspace(min(budgets), max(budgets), 40)
        return bits, np.array([self.kl(each) for each in bits])
