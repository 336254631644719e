"""The mixture: probabilities are averaged instead of logits.

A codec says by which factor its error multiplies a decoded probability on average (`Decoded.bias`); it is taken out, so
that each node's weights are unbiased before they are normalized. Where a codec has unbiased probabilities of its own
(`Decoded.chances`), those are averaged as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fpld import compiled
from fpld.numerics import log_softmax
from fpld.rules.base import Traits

if TYPE_CHECKING:
    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Reals

_CHUNK = 1 << 16  # coordinates at a time: all that a node's pass touches stays in the cache
_SMALL = 1e-30


@dataclass(frozen=True, slots=True)
class Mixture:
    """Average probabilities, and return their logarithm; `reference` leaves the kernel out: the same, slowly.

    `weights` say how much each node counts, in their order; without them all count alike. They do not make it another
    rule.

    >>> from fpld.rules import combine
    >>> from fpld.types import Decoded
    >>> none = np.zeros((1, 1))
    >>> nodes = [Decoded(np.log([chances]), none, none) for chances in ([0.9, 0.1], [0.5, 0.5])]
    >>> np.exp(combine(MIXTURE, nodes)).round(6).tolist()
    [[0.7, 0.3]]
    """

    reference: bool = False
    weights: tuple[float, ...] = field(default=(), compare=False)

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        return Traits(weights=self.weights)

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Begin with a block."""
        return _Mixture(shape, compiled.available() and not self.reference, self.weights)


class _Mixture:
    """Add up probabilities; where they are too small for float32 at every node, the largest logarithm stands for them.

    Unbiased probabilities of a codec's own may add up to less than nothing: there the same is done.
    """

    def __init__(self, shape: tuple[int, int], fast: bool, weights: tuple[float, ...]) -> None:
        self._fast, self._shape, self._weights = fast, shape, weights
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
        if decoded.chances is not None:
            self._total += np.asarray(weight, values.dtype) * decoded.chances
            np.maximum(self._top, log_softmax(values - bias) + np.asarray(np.log(weight), values.dtype), out=self._top)
        elif self._fast and values.dtype == np.float32:
            from fpld.rules import mixing  # brings numba along

            arrays = np.ascontiguousarray(values), np.ascontiguousarray(bias)
            mixing.add(*arrays, weight, float(np.log(_SMALL)), self._total, self._top)  # type: ignore[no-untyped-call]
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
        logarithm = np.log(np.maximum(self._total, _SMALL))
        whole = np.float32(np.log(sum(self._weights[: self._nodes]) if self._weights else self._nodes))
        result: Reals = np.where(self._total > _SMALL, logarithm, self._top) - whole
        return result


MIXTURE = Mixture()
