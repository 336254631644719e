"""The mixture: probabilities are averaged instead of logits.

A codec's error multiplies a decoded probability by some factor on average, whose logarithm is `Decoded.bias`. It is
divided out before a node's probabilities are normalized. Where a codec has unbiased probabilities itself
(`Decoded.probabilities`), those are averaged as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fpld import kernels
from fpld.numerics import log_softmax
from fpld.rules.base import RuleTraits

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Reals

_CHUNK = 1 << 16  # coordinates at a time, so that what is worked on stays in the cache
_LEAST_PROBABILITY = 1e-30


@dataclass(frozen=True, slots=True)
class Mixture:
    """Average probabilities, and return their logarithm.

    `reference` leaves the compiled kernel out. `weights` are the nodes' weights in their order, all equal by default;
    rules that differ only in them compare equal.

    >>> from fpld.rules import combine
    >>> from fpld.types import Decoded
    >>> zero = np.zeros((1, 1))
    >>> nodes = [Decoded(np.log([p]), zero, zero) for p in ([0.9, 0.1], [0.5, 0.5])]
    >>> np.exp(combine(MIXTURE, nodes)).round(6).tolist()
    [[0.7, 0.3]]
    """

    reference: bool = False
    weights: tuple[float, ...] = field(default=(), compare=False)

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        return RuleTraits(weights=self.weights)

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Return an accumulator for a block of contexts."""
        return _Mixture(shape, kernels.numba_available() and not self.reference, self.weights)


class _Mixture:
    """Sum probabilities; where the sum is too small for float32, or negative, use the largest log-probability.

    Sums are negative where a codec's unbiased estimates are.
    """

    def __init__(self, shape: tuple[int, int], fast: bool, weights: tuple[float, ...]) -> None:
        self._fast = fast
        self._shape = shape
        self._weights = weights
        self._top: Reals = np.empty(0)
        self._total: Reals = np.empty(0)
        self._nodes = 0

    def add(self, decoded: Decoded) -> None:
        values = decoded.values
        if self._nodes == 0:
            self._top = np.full(self._shape, -np.inf, values.dtype)
            self._total = np.zeros(self._shape, values.dtype)
        weight = self._weights[self._nodes] if self._weights else 1.0
        self._nodes += 1
        bias = np.atleast_2d(np.asarray(decoded.bias, values.dtype))
        if decoded.probabilities is not None:
            self._total += np.asarray(weight, values.dtype) * decoded.probabilities
            np.maximum(self._top, log_softmax(values - bias) + np.asarray(np.log(weight), values.dtype), out=self._top)
        elif self._fast and values.dtype == np.float32:
            from fpld.rules import mixture_kernels  # brings numba along

            arrays = np.ascontiguousarray(values), np.ascontiguousarray(bias)
            mixture_kernels.add_probabilities(
                *arrays, weight, float(np.log(_LEAST_PROBABILITY)), self._total, self._top
            )  # type: ignore[no-untyped-call]
        else:
            self._add(values, bias, weight)

    def _add(self, values: Reals, bias: Reals, weight: float) -> None:
        bias = np.broadcast_to(bias, (len(values), bias.shape[1]))
        stride = max(_CHUNK // values.shape[-1], 1)
        for start in range(0, len(values), stride):
            rows = slice(start, start + stride)
            logits = log_softmax(values[rows] - bias[rows]) + np.asarray(np.log(weight), values.dtype)
            np.maximum(self._top[rows], logits, out=self._top[rows])
            self._total[rows] += np.exp(logits)

    def result(self) -> Reals:
        logarithm = np.log(np.maximum(self._total, _LEAST_PROBABILITY))
        whole = np.float32(np.log(sum(self._weights[: self._nodes]) if self._weights else self._nodes))
        result: Reals = np.where(self._total > _LEAST_PROBABILITY, logarithm, self._top) - whole
        return result


MIXTURE = Mixture()
