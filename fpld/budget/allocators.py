"""Allocators share a total of bits out to the nodes: water-filling for each model of how loss falls with bits.

An allocator is a function `(weights, total, vocab, caps, floors) -> bits`: one weight, cap and floor for each node,
bits per probe context, and the bits add up to `total`. All solve one problem, "raise a common level x until
sum_i clip(slope_i * x + offset_i, floor_i, cap_i) = total", and differ in slope and offset only:

    optimal      bits_i = x + (V/2) log2 w_i     minimizes sum_i w_i 2^(-2 B_i / V): Theorem 5, for dense labels
    square-root  bits_i = x sqrt(w_i)            minimizes sum_i w_i / B_i: sampled labels, whose noise falls as 1/bits
    uniform      bits_i = x
    inverse      bits_i = x / w_i                the paper's bad example: more bits to the less noisy

The sum is piecewise linear and increasing in x, so sorting its 2K corners solves it exactly, in O(K log K).

`equal_slopes` solves the same Lagrangian for measured curves log loss_i = level_i - rate_i sqrt(B_i). They are convex,
and describe the predictive codec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from fpld import validation
from fpld.errors import BudgetError, InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Floats, Ints


class Allocator(Protocol):
    """Share `total` bits out to nodes."""

    def __call__(
        self,
        weights: ArrayLike,
        total: float,
        vocab: int,
        caps: ArrayLike | None = None,
        floors: ArrayLike | None = None,
    ) -> Floats:
        """Return the bits per probe context of each node."""
        ...


def optimal(
    weights: ArrayLike, total: float, vocab: int, caps: ArrayLike | None = None, floors: ArrayLike | None = None
) -> Floats:
    """Allocate by Theorem 5: B_i = B_tot/K + (V/2) log2(w_i / w_g), within caps and floors.

    A node that would leave [floor, cap] is held there and the rest is shared out anew, until none does.

    >>> optimal([1, 1, 16, 16], total=2048, vocab=256).tolist()
    [256.0, 256.0, 768.0, 768.0]
    >>> optimal([1, 1, 16, 16], total=2048, vocab=256, caps=[2048, 2048, 600, 2048]).tolist()
    [312.0, 312.0, 600.0, 824.0]
    """
    weights = _weights(weights)
    return _fill(np.ones_like(weights), _vocab(vocab) / 2 * np.log2(weights), total, caps, floors)


def uniform(
    weights: ArrayLike, total: float, vocab: int, caps: ArrayLike | None = None, floors: ArrayLike | None = None
) -> Floats:
    """Allocate the same bits to every node that its cap and floor allow; only the number of weights counts."""
    weights = _weights(weights)
    _vocab(vocab)
    return _fill(np.ones_like(weights), np.zeros_like(weights), total, caps, floors)


def inverse(
    weights: ArrayLike, total: float, vocab: int, caps: ArrayLike | None = None, floors: ArrayLike | None = None
) -> Floats:
    """Allocate bits in proportion to 1 / w_i: the baseline of Figure 2, there with floors of V bits.

    >>> inverse([1, 1, 16, 16], total=2048, vocab=256, floors=[256] * 4).tolist()
    [768.0, 768.0, 256.0, 256.0]
    """
    weights = _weights(weights)
    _vocab(vocab)
    return _fill(weights.min() / weights, np.zeros_like(weights), total, caps, floors)


def equal_slopes(
    levels: ArrayLike,
    rates: ArrayLike,
    total: float,
    caps: ArrayLike | None = None,
    floors: ArrayLike | None = None,
) -> Floats:
    """Allocate so that one more bit gains the same at every node, for losses exp(level_i - rate_i sqrt(B_i)).

    A loss is convex in B, so each slope belongs to one B: the one where rate sqrt(B) exp(rate sqrt(B)) is
    rate^2 exp(level) / (2 slope). Bisection finds the slope at which the bits add up to the total.

    >>> equal_slopes([0.0, 0.0], [0.1, 0.1], total=200).tolist()
    [100.0, 100.0]
    """
    levels = validation.vector("levels", levels)
    rates = validation.vector("rates", rates, size=levels.size)
    if not (np.isfinite(levels).all() and np.isfinite(rates).all() and (rates > 0).all()):
        raise InputError("levels must be finite, and rates finite and greater than 0")
    total = validation.real("total", total, above=0.0)
    low, high = _limits(levels.size, total, caps, floors)
    high = np.minimum(high, total)

    def steepness(bits: Floats) -> Floats:
        root = np.sqrt(np.maximum(bits, 1e-12))
        logarithm: Floats = levels - rates * root + np.log(rates / (2 * root))
        return logarithm

    def bits_at(slope: float) -> Floats:
        return np.clip(np.square(_lambert(levels - slope + np.log(rates**2 / 2)) / rates), low, high)

    flat = float(steepness(high).min()) - 1
    steep = float(steepness(low).max()) + 1
    for _ in range(100):
        slope = (flat + steep) / 2
        if bits_at(slope).sum() > total:
            flat = slope
        else:
            steep = slope
    bits = bits_at(steep)
    # The remainder of the bisection goes where there is room, so that the sum is exact.
    room = high - bits
    spare = total - bits.sum()
    filled: Floats = np.clip(bits + spare * room / max(room.sum(), 1e-300), low, high)
    return filled


def round_bits(bits: ArrayLike, caps: ArrayLike | None = None) -> Ints:
    """Round bits to integers that keep the total (to the bit below), largest fractions first.

    A node at a fractional cap is rounded down, never over it.

    >>> round_bits([256.4, 255.7, 511.9]).tolist()
    [256, 256, 512]
    """
    bits = validation.vector("bits", bits)
    limits = np.full(bits.size, np.inf) if caps is None else validation.vector("caps", caps, size=bits.size)
    whole = np.floor(bits).astype(np.int64)
    # Not plain floor(sum): the sum of fractions that should add up to a whole bit may fall short by rounding.
    spare = int(np.floor(bits.sum() + 1e-6)) - int(whole.sum())
    order = np.argsort(-(bits - whole), kind="stable")
    order = order[(whole[order] + 1) <= limits[order]][:spare]
    whole[order] += 1
    return whole


def _fill(slope: Floats, offset: Floats, total: float, caps: ArrayLike | None, floors: ArrayLike | None) -> Floats:
    """Solve sum_i clip(slope_i x + offset_i, floor_i, cap_i) = total for the level x, and return the summands."""
    total = validation.real("total", total, above=0.0)
    low, high = _limits(slope.size, total, caps, floors)
    # The sum's slope grows by slope_i at the level where node i leaves its floor and drops where it meets its cap.
    enter = (low - offset) / slope
    leave = (high - offset) / slope
    bounded = np.isfinite(leave)
    corners = np.concatenate([enter, leave[bounded]])
    change = np.concatenate([slope, -slope[bounded]])
    order = np.argsort(corners, kind="stable")
    corners = corners[order]
    rates = np.cumsum(change[order])
    sums = low.sum() + np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(corners))])
    left = int(np.searchsorted(sums, total, side="right")) - 1
    # Refine on the active set of this segment: exact where cumulative sums have rounded.
    level = corners[max(left, 0)]
    for _ in range(2):
        wanted = slope * level + offset
        free = (wanted > low) & (wanted < high) | (enter == level)
        fixed = np.where(wanted >= high, high, low)[~free].sum()
        rate = slope[free].sum()
        if rate <= 0:
            break
        level = (total - fixed - offset[free].sum()) / rate
    bits: Floats = np.clip(slope * level + offset, low, high)
    return bits


def _limits(size: int, total: float, caps: ArrayLike | None, floors: ArrayLike | None) -> tuple[Floats, Floats]:
    low = np.zeros(size) if floors is None else validation.vector("floors", floors, size=size)
    high = np.full(size, np.inf) if caps is None else validation.vector("caps", caps, size=size)
    if (low < 0).any() or not np.isfinite(low).all():
        worst = int(((low < 0) | ~np.isfinite(low)).argmax())
        raise InputError(f"floors[{worst}] must be finite and at least 0, got {low[worst]:g}")
    if (low > high).any():
        worst = int((low > high).argmax())
        raise BudgetError(f"caps[{worst}] must be at least floors[{worst}] = {low[worst]:g}, got {high[worst]:g}")
    if total < low.sum():
        raise BudgetError(f"total must be at least {low.sum():g}, the sum of the floors, got {total:g}")
    if total > high.sum():
        raise BudgetError(f"total must be at most {high.sum():g}, the sum of the caps, got {total:g}")
    return low, high


def _lambert(logarithm: Floats) -> Floats:
    """Return y > 0 with y exp(y) = exp(logarithm), Lambert's function: Newton's method on y + log y, from below."""
    z = np.maximum(logarithm, -700.0)  # below it exp underflows
    y: Floats = np.where(z > 1, z - np.log(np.maximum(z, 1.0)), np.exp(np.minimum(z, 1.0) - 1))
    for _ in range(8):  # each step doubles the digits
        y = y * (1 + z - np.log(y)) / (1 + y)
    return y


def _weights(weights: ArrayLike) -> Floats:
    weights = validation.vector("weights", weights)
    good = np.isfinite(weights) & (weights > 0)
    if not good.all():
        worst = int((~good).argmax())
        raise InputError(f"weights[{worst}] must be finite and greater than 0, got {weights[worst]:g}")
    return weights


def _vocab(vocab: int) -> int:
    return validation.integer("vocab", vocab, least=1)


def square_root(
    weights: ArrayLike, total: float, vocab: int, caps: ArrayLike | None = None, floors: ArrayLike | None = None
) -> Floats:
    """Allocate bits in proportion to sqrt(w_i), within caps and floors: the allocator of sampled labels.

    >>> square_root([1, 1, 16, 16], total=100, vocab=256).tolist()
    [10.0, 10.0, 40.0, 40.0]
    >>> square_root([1, 1, 16, 16], total=100, vocab=256, caps=[100, 100, 25, 100]).tolist()
    [12.5, 12.5, 25.0, 50.0]
    """
    _vocab(vocab)
    return optimal_samples(weights, total, caps=caps, floors=floors)


def optimal_samples(
    weights: ArrayLike,
    total: float,
    costs: ArrayLike | None = None,
    caps: ArrayLike | None = None,
    floors: ArrayLike | None = None,
) -> Floats:
    """Return the n_i >= 0 that minimize sum_i w_i / n_i under sum_i c_i n_i = total; caps and floors are of n_i.

    With n_i samples at a cost of c_i each, node i's label has variance w_i / n_i. Where no limit holds, c_i n_i
    is proportional to sqrt(w_i c_i).

    >>> optimal_samples([1, 1], total=12, costs=[1, 4]).tolist()  # costs of 4 and 8
    [4.0, 2.0]
    """
    w = _weights(weights)
    c = np.ones_like(w) if costs is None else validation.vector("costs", costs, size=w.size)
    good = np.isfinite(c) & (c > 0)
    if not good.all():
        worst = int((~good).argmax())
        raise InputError(f"costs[{worst}] must be finite and greater than 0, got {c[worst]:g}")
    low, high = (
        None if limit is None else c * validation.vector(name, limit, size=w.size)
        for name, limit in (("floors", floors), ("caps", caps))
    )
    return _fill(np.sqrt(w * c), np.zeros_like(w), total, high, low) / c
