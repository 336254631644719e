"""How many contexts to label, and with how many bits each: a model of a student's loss, fitted to measured points.

A student that is distilled for a fixed number of steps on m contexts, with labels of b bits per node and context, has

    loss(m, b) = floor + breadth / m + (steps + labels / m) / (b - overhead)

* breadth / m: contexts that it did not see; the error of estimating from m of them.
* 1 / (b - overhead) is a label's noise: it falls as 1/bits, once the `overhead` that any label costs is paid.
* labels / m: noise of m labels, averaged as far as there are labels.
* steps: noise of the gradient of each minibatch, whatever m; it stays when labels are fresh in every step.

With m b = total for each node the loss is, but for a constant, A b + C / (b - overhead), where A = breadth / total and
C = steps + labels overhead / total. That is convex, so its best b is overhead + sqrt(C / A), or the limit next to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld import _check
from fpld.errors import BudgetError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.types import Floats

OVERHEAD = 2.5  # bits of a label that say no more than that there is nothing to say


class Point(NamedTuple):
    """A measured student: contexts, bits per node and context (inf: exact labels), and its loss."""

    contexts: float
    bits: float
    loss: float


DEMONSTRATION = (
    Point(18_432, math.inf, 3.537),
    Point(46_080, math.inf, 3.510),
    Point(92_160, math.inf, 3.498),
    Point(92_160, 28.5, 3.530),
    Point(92_160, 57, 3.517),
    Point(92_160, 30, 3.528),
    Point(92_160, 59, 3.510),
    Point(256_000, 14, 3.543),
    Point(256_000, 14, 3.554),
)
"""Held-out loss on `sotu`, V = 1024, 1.08 M parameters, five nodes, 600 local steps, 1000 of distillation, one seed;
bits are entropies of the samples."""
NODES = 5  # of the demonstration


@dataclass(frozen=True, slots=True)
class LossModel:
    """The constants of the model above; `rms` is how far the points lie from it."""

    floor: float
    breadth: float
    steps: float
    labels: float
    overhead: float
    rms: float

    def loss(self, contexts: float, bits: float) -> float:
        """Return the loss for m contexts and b bits each."""
        return self.floor + self.breadth / contexts + (self.steps + self.labels / contexts) / (bits - self.overhead)

    def with_nodes(self, nodes: int, fitted: int = NODES) -> LossModel:
        """Return the model for another number of nodes than it was fitted with: noise falls as 1 / K in the mean."""
        return replace(self, steps=self.steps * fitted / nodes, labels=self.labels * fitted / nodes)


@dataclass(frozen=True, slots=True)
class Split:
    """The best contexts and bits per context for a total, the loss there, and how much they matter.

    With `least_bits` to `most_bits` per context (and contexts accordingly) the loss is at most `tolerance` higher.
    """

    contexts: int
    bits: float
    loss: float
    least_bits: float
    most_bits: float
    tolerance: float


def fit_loss(points: Sequence[Point | tuple[float, float, float]], *, overhead: float = OVERHEAD) -> LossModel:
    """Fit the model to measured points by least squares, with no constant below 0 but the floor.

    >>> truth = LossModel(3.0, 900.0, 0.5, 20_000.0, OVERHEAD, 0.0)
    >>> found = fit_loss([(m, b, truth.loss(m, b)) for m in (1e4, 1e5) for b in (10, 50, math.inf)])
    >>> round(found.breadth), round(found.steps, 6), round(found.labels)
    (900, 0.5, 20000)
    """
    overhead = _check.real("overhead", overhead, least=0.0)
    table = np.array(points, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != 3:
        raise InputError(f"points must be triples (contexts, bits, loss), got shape {table.shape}")
    m, b, loss = table.T
    if not (np.isfinite(m).all() and (m > 0).all() and (b > overhead).all() and np.isfinite(loss).all()):
        raise InputError(f"points must have contexts above 0, bits above the overhead {overhead:g} and finite losses")
    noise = 1 / (b - overhead)
    columns = np.stack([np.ones_like(m), 1 / m, noise, noise / m], axis=1)
    scale = np.abs(columns).max(axis=0)
    if (scale == 0).any() or np.linalg.matrix_rank(columns / scale) < 4:
        raise InputError("points must differ in contexts, in bits and in both: at least four of them, two by two")
    found = _least_squares(columns / scale, loss) / scale
    floor, breadth, steps, labels = found.tolist()
    rms = float(np.sqrt(np.square(columns @ found - loss).mean()))
    return LossModel(floor, breadth, steps, labels, overhead, rms)


def best_contexts(
    model: LossModel, total: float, *, most_contexts: float = math.inf, least_bits: float = 3.0, tolerance: float = 0.0
) -> Split:
    """Split the `total` bits that a node may send in a round into contexts and bits for each.

    There are at most `most_contexts`, and no label can have fewer than `least_bits`. The range of bits in the result is
    that where the loss is within `tolerance` of the best, or of the model's own error `rms` if that is larger.

    >>> split = best_contexts(fit_loss(DEMONSTRATION), total=3.3e6 * 8 / 5)  # 3.3 MB from five nodes
    >>> round(split.contexts, -4), round(split.bits, -1)
    (90000, 60.0)
    """
    least = max(_check.real("least_bits", least_bits, above=model.overhead), total / most_contexts)
    if total < least:
        raise BudgetError(f"total must be at least {least:g} bits, one label, got {total:g}")
    slope, inverse = model.breadth / total, model.steps + model.labels * model.overhead / total
    low, high = least - model.overhead, total - model.overhead
    best = min(max(math.sqrt(inverse / slope) if slope > 0 else math.inf, low), high)
    tolerance = max(tolerance, model.rms)
    # Where slope x + inverse / x stays below its value at the best x plus the tolerance.
    first, last = _roots(slope, slope * best + inverse / best + tolerance, inverse)
    bits = best + model.overhead
    return Split(
        contexts=int(total / bits),
        bits=bits,
        loss=model.loss(total / bits, bits),
        least_bits=max(first, low) + model.overhead,
        most_bits=min(last, high) + model.overhead,
        tolerance=tolerance,
    )


def _roots(slope: float, value: float, inverse: float) -> tuple[float, float]:
    """Solve slope x + inverse / x = value for x > 0; a solution that there is not is 0 or infinity."""
    root = math.sqrt(max(value * value - 4 * slope * inverse, 0.0))
    # Both from the larger sum: the difference of nearly equal numbers would lose its digits.
    return 2 * inverse / (value + root), (value + root) / (2 * slope) if slope > 0 else math.inf


def _least_squares(columns: Floats, values: Floats) -> Floats:
    """Solve for constants of which all but the first must be at least 0: the best of all sets that are left free."""
    best, error = np.zeros(columns.shape[1]), math.inf
    rest = range(1, columns.shape[1])
    for chosen in (free for count in range(len(rest) + 1) for free in combinations(rest, count)):
        free = [0, *chosen]
        found = np.linalg.lstsq(columns[:, free], values, rcond=None)[0]
        missed = float(np.square(columns[:, free] @ found - values).sum())
        if missed < error and (found[1:] >= 0).all():
            best, error = np.zeros(columns.shape[1]), missed
            best[free] = found
    return best
