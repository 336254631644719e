"""What arrives of the mean target: the mean of the nodes' probabilities, which a student is distilled to.

With p the exact mean, pi what both ends know before (the prior's probabilities, or equal ones where there is no prior)
and t the mean of what is decoded:

    noise   mean over contexts of sum_v (t_v - p_v)^2: for an unbiased label the variance of the mean target
    slope   sum <t - pi, p - pi> / sum |p - pi|^2, over all contexts: how much of the way from pi to p arrives

An unbiased label has slope 1 but for chance, whatever its noise; `slope_se` is the standard error. A codec that leaves
out what is small, or sends it rounded towards the prior, is below 1: more contexts do not average that out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.numerics import softmax, split
from fpld.rules.target import rounded_prediction

if TYPE_CHECKING:
    from fpld.bench.scenes import Floats32, Scene
    from fpld.types import Decoded, Reals


def chances_of(decoded: Decoded) -> Reals:
    """Return decoded probabilities: the codec's own, or the softmax of its logits with their bias taken out."""
    return softmax(decoded.values - decoded.bias, np.float32) if decoded.chances is None else decoded.chances


class Mixture:
    """Hold a scene's exact mean of probabilities, and where they start from."""

    def __init__(self, scene: Scene) -> None:
        self._mean = np.zeros(scene.shape, np.float32)
        for logits in scene.logits:
            self._mean += softmax(logits, np.float32) / np.float32(scene.nodes)
        self._known: Floats32 = (
            np.full((scene.shape[0], 1), 1 / scene.shape[1], np.float32)
            if scene.prior is None
            else rounded_prediction(scene.prior)
        )

    def errors(self, chances: Reals) -> tuple[float, float, float]:
        """Return noise, slope and the slope's standard error of a mean target [m, V]."""
        noise, along, length = (np.empty(len(chances)) for _ in range(3))
        for rows in split(*self._mean.shape):
            part = slice(rows.start, rows.stop)
            error = (chances[part] - self._mean[part]).astype(np.float64)
            way = (self._mean[part] - self._known[part]).astype(np.float64)
            noise[part] = np.square(error).sum(axis=1)
            along[part], length[part] = (error * way).sum(axis=1), np.square(way).sum(axis=1)
        total = max(float(length.sum()), 1e-300)
        off = float(along.sum()) / total
        # A ratio of sums over contexts whose errors are independent.
        scatter = float(np.sqrt(np.square(along - off * length).sum())) / total
        return float(noise.mean()), 1 + off, scatter
