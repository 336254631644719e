"""Choose how many contexts to label and the bits for each, by a model of the student's loss.

A student that is distilled for a fixed number of steps on m contexts, with labels of b bits per node and context, has

    loss(m, b) = floor + breadth / m + (steps + labels / m) / (b - overhead)

* breadth / m is the error of estimating from m contexts.
* 1 / (b - overhead) is the noise of a label: it falls as 1/bits, beyond the `overhead` bits that any label costs.
* labels / m weighs the noise that averages out over m labels.
* steps weighs the noise of each minibatch's gradient, which does not depend on m.

With m b = total for each node the loss is, but for a constant, A b + C / (b - overhead), where A = breadth / total and
C = steps + labels overhead / total. That is convex, so its best b is overhead + sqrt(C / A), or the limit next to it.

`label_rows` compares a plan with the best split of its bytes. It uses the model fitted to the demonstration's students
and scaled to the plan's number of nodes. Only differences of losses carry over: the floor depends on the corpus and
the student.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import validation
from fpld.errors import BudgetError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.planner.forecast import Forecast
    from fpld.types import Floats

Row = dict[str, Any]
LABEL_OVERHEAD_BITS = 2.5  # bits of a label that changes no token


class LossPoint(NamedTuple):
    """A measured student: contexts, bits per node and context (inf: exact labels), and its loss."""

    contexts: float
    bits: float
    loss: float


DEMONSTRATION = (
    LossPoint(18_432, math.inf, 3.537),
    LossPoint(46_080, math.inf, 3.510),
    LossPoint(92_160, math.inf, 3.498),
    LossPoint(92_160, 28.5, 3.530),
    LossPoint(92_160, 57, 3.517),
    LossPoint(92_160, 30, 3.528),
    LossPoint(92_160, 59, 3.510),
    LossPoint(256_000, 14, 3.543),
    LossPoint(256_000, 14, 3.554),
)
"""Held-out loss on `sotu`, V = 1024, 1.08 M parameters, five nodes, 600 local steps, 1000 of distillation, one seed;
bits are entropies of the samples."""
DEMONSTRATION_NODES = 5


@dataclass(frozen=True, slots=True)
class LossModel:
    """The constants of the model; `rms` is the root mean square of the points' distance from it."""

    floor: float
    breadth: float
    steps: float
    labels: float
    overhead: float
    rms: float

    def loss(self, contexts: float, bits: float) -> float:
        """Return the loss for m contexts and b bits each."""
        return self.floor + self.breadth / contexts + (self.steps + self.labels / contexts) / (bits - self.overhead)

    def with_nodes(self, nodes: int, fitted: int = DEMONSTRATION_NODES) -> LossModel:
        """Return the model for another number of nodes than it was fitted with: the mean's noise falls as 1 / K."""
        return replace(self, steps=self.steps * fitted / nodes, labels=self.labels * fitted / nodes)


@dataclass(frozen=True, slots=True)
class BudgetSplit:
    """The best contexts and bits per context for a total, and the loss there.

    With `least_bits` to `most_bits` per context (and contexts accordingly) the loss is at most `tolerance` higher.
    """

    contexts: int
    bits: float
    loss: float
    least_bits: float
    most_bits: float
    tolerance: float


def fit_loss(
    points: Sequence[LossPoint | tuple[float, float, float]], *, overhead: float = LABEL_OVERHEAD_BITS
) -> LossModel:
    """Fit the model to measured points by least squares; only the floor may be negative.

    >>> truth = LossModel(3.0, 900.0, 0.5, 20_000.0, LABEL_OVERHEAD_BITS, 0.0)
    >>> model = fit_loss([(m, b, truth.loss(m, b)) for m in (1e4, 1e5) for b in (10, 50, math.inf)])
    >>> round(model.breadth), round(model.steps, 6), round(model.labels)
    (900, 0.5, 20000)
    """
    overhead = validation.real("overhead", overhead, least=0.0)
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
    constants = _least_squares(columns / scale, loss) / scale
    floor, breadth, steps, labels = constants.tolist()
    rms = float(np.sqrt(np.square(columns @ constants - loss).mean()))
    return LossModel(floor, breadth, steps, labels, overhead, rms)


def best_contexts(
    model: LossModel, total: float, *, most_contexts: float = math.inf, least_bits: float = 3.0, tolerance: float = 0.0
) -> BudgetSplit:
    """Split the `total` bits that a node may send in a round into contexts and bits for each.

    Parameters
    ----------
    most_contexts
        The contexts that there are.
    least_bits
        The least bits that a label can have.
    tolerance
        How far the loss may be above the best in the range of bits that is returned; at least the model's `rms`.

    >>> split = best_contexts(fit_loss(DEMONSTRATION), total=3.3e6 * 8 / 5)  # 3.3 MB from five nodes
    >>> round(split.contexts, -4), round(split.bits, -1)
    (90000, 60.0)
    """
    least = max(validation.real("least_bits", least_bits, above=model.overhead), total / most_contexts)
    if total < least:
        raise BudgetError(f"total must be at least {least:g} bits, one label, got {total:g}")
    slope = model.breadth / total
    inverse = model.steps + model.labels * model.overhead / total
    low = least - model.overhead
    high = total - model.overhead
    best = min(max(math.sqrt(inverse / slope) if slope > 0 else math.inf, low), high)
    tolerance = max(tolerance, model.rms)
    # The range in which slope x + inverse / x stays below its value at the best x plus the tolerance.
    first, last = _roots(slope, slope * best + inverse / best + tolerance, inverse)
    bits = best + model.overhead
    return BudgetSplit(
        contexts=int(total / bits),
        bits=bits,
        loss=model.loss(total / bits, bits),
        least_bits=max(first, low) + model.overhead,
        most_bits=min(last, high) + model.overhead,
        tolerance=tolerance,
    )


def _roots(slope: float, value: float, inverse: float) -> tuple[float, float]:
    """Return both solutions x > 0 of slope x + inverse / x = value; one that does not exist is 0 or infinity."""
    root = math.sqrt(max(value * value - 4 * slope * inverse, 0.0))
    # Both come from the sum: the difference of nearly equal numbers would lose its digits.
    return 2 * inverse / (value + root), (value + root) / (2 * slope) if slope > 0 else math.inf


def _least_squares(columns: Floats, values: Floats) -> Floats:
    """Return the least-squares constants of which all but the first are at least 0.

    There are few of them, so every set of constants that may differ from 0 is tried.
    """
    best = np.zeros(columns.shape[1])
    least_error = math.inf
    rest = range(1, columns.shape[1])
    for chosen in (free for count in range(len(rest) + 1) for free in combinations(rest, count)):
        free = [0, *chosen]
        solution = np.linalg.lstsq(columns[:, free], values, rcond=None)[0]
        error = float(np.square(columns[:, free] @ solution - values).sum())
        if error < least_error and (solution[1:] >= 0).all():
            least_error = error
            best = np.zeros(columns.shape[1])
            best[free] = solution
    return best


def label_rows(plan: Forecast) -> list[Row]:
    """Return a row for the plan and one for the best split of the same bytes.

    There are none if labels are not sampled, or if sites write text: the model of the loss is about public text.
    `extra_loss` is the model's loss beyond that of the best split, in nats. Between `least_bits` and `most_bits` per
    context it is within the model's error.
    """
    inputs = plan.inputs
    if not inputs.sparse or inputs.written:  # the model was measured on public text
        return []
    model = demonstration_model().with_nodes(len(inputs.sites))
    bits = float(plan.bits.mean())
    best = best_contexts(model, inputs.contexts * bits, least_bits=float(inputs.floors().max()))
    extra = model.loss(inputs.contexts, bits) - best.loss
    planned = {"split": "planned", "contexts": inputs.contexts, "context_bits": bits, "extra_loss": extra}
    ideal = {"split": "best", "contexts": best.contexts, "context_bits": best.bits, "extra_loss": 0.0}
    return [
        {**planned, "least_bits": None, "most_bits": None},
        {**ideal, "least_bits": best.least_bits, "most_bits": best.most_bits},
    ]


@cache
def demonstration_model() -> LossModel:
    """Return the model of the demonstration's students."""
    return fit_loss(DEMONSTRATION)
