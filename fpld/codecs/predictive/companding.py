"""The predictive codec in reals: from logits to y, and from symbols back to log-probabilities and their variances.

Only the encoder computes y, and only integers decide what is decoded: nothing here must agree to the last bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.predictive.header import DITHER, GROUPS, PER_GROUP, PRIOR, Cells, PredictiveHeader
from fpld.codecs.predictive.tokens import MAX_TAIL
from fpld.codecs.prior import CLASS_OF, LOG_PRIOR
from fpld.kernels import kernel
from fpld.types import Floats32

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.codecs.prior import Eighths
    from fpld.types import Reals

TAILS_PER_OCTAVE = 4  # the mass of a tail is sent in quarters of an octave
UNSENT_VARIANCE = 1.0  # the variance that is reported where nothing was sent, in nats^2
MIN_RATIO = 1 / 64  # of (p / pi)^(1/4): nothing decodes to a probability of zero
_LOG_PRIOR = LOG_PRIOR.astype(np.float32)
SQRT_PRIOR = np.exp(LOG_PRIOR / 2).astype(np.float32)  # sqrt(pi) of each integer of the prior
_QUARTER = np.exp(LOG_PRIOR / 4).astype(np.float32)
_GROUP_OF = (CLASS_OF // PER_GROUP).astype(np.uint8)
_MEASURED_VALUES = 1 << 13  # values of a class in a block that cells are measured on, about
# exp(x / 4) = 2^(x log2(e) / 4), with the fraction by Taylor's series: within 5e-7.
_LOG2_E_QUARTER = np.float32(np.log2(np.e) / 4)
_LEAST_POWER = np.float32(-126)
_HALF = np.float32(0.5)
_FOUR = np.float32(4)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(np.log(2) ** k / math.factorial(k)) for k in range(7))

NO_BIAS: Floats32 = np.zeros((1, 1), np.float32)
Pair = tuple[Floats32, Floats32]  # log-probabilities and their variances


def compand(logits: Reals, prior: Eighths | None) -> Floats32:
    """Return y of a block of contexts: see `fpld.codecs.predictive.codec`."""
    top = logits.max(axis=1)
    quarter: Floats32 = np.empty(logits.shape, np.float32)
    square: Floats32 = np.empty(logits.shape, np.float32)
    _quarters(logits, top, quarter, square)
    mass = np.einsum("ij,ij->i", square, square)  # a peak has 1, so float32 does
    if prior is None:
        square *= (2 / np.sqrt(mass))[:, None]
        return square
    _to_prior(quarter, np.sqrt(np.sqrt(1 / mass)), prior, _QUARTER)
    return quarter


@kernel
def _quarters(logits: Any, top: Any, quarter: Any, square: Any) -> None:
    """Compute exp((x - top) / 4), and its square.

    Plain arithmetic, which compilers turn into vector instructions: 2^n by its bits, and a polynomial.
    """
    for row in range(logits.shape[0]):
        for v in range(logits.shape[1]):
            power = max(np.float32(logits[row, v] - top[row]) * _LOG2_E_QUARTER, _LEAST_POWER)
            whole = np.floor(power + _HALF)
            x = power - whole
            result = ((((((_C6 * x + _C5) * x) + _C4) * x + _C3) * x + _C2) * x + _C1) * x + _C0
            result *= np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
            quarter[row, v] = result
            square[row, v] = result * result


@kernel
def _to_prior(quarter: Any, scale: Any, prior: Any, roots: Any) -> None:
    """Turn p^(1/4), but for a factor, into y."""
    for row in range(quarter.shape[0]):
        for v in range(quarter.shape[1]):
            root = roots[-prior[row, v]]
            quarter[row, v] = (quarter[row, v] * scale[row] - root) * (_FOUR * root)


@kernel
def tail_masses(y: Any, rank: Any, vocab: int, scale: Any, rest: Any, out: Any) -> None:
    """Compute the number of each context's mass below the step; -1 where nothing else is sent, or all is.

    `y` at `rank` of its coordinates is what may be above it; `rest` is the mass of the others. `scale` is that of
    `tokens.collect_symbols`.
    """
    inverse, rounding, cut, coarse, lower = scale
    i = 0
    for row in range(rest.size):
        mass = rest[row]
        above = 0
        end = (row + 1) * vocab
        while i < y.size and rank[i] < end:
            if y[i] * (inverse if i < cut else coarse) + (rounding if i < cut else lower) < 1.0:
                mass += y[i] * y[i]
            else:
                above += 1
            i += 1
        if above == 0 or above == vocab:
            out[row] = -1
        else:
            out[row] = min(max(int(np.rint(-TAILS_PER_OCTAVE * np.log2(max(mass / 4, 1e-30)))), 0), MAX_TAIL)


@kernel
def _measure(
    y: Any, first: int, last: int, every: int, inverse: float, rounding: float, scale: float, out: Any
) -> None:
    """Add count, sum and sum of squares of the values in a cell to out [3, 3]: at zeros, at ones, and beyond.

    At zeros the value is log(p / pi), or without a prior log p, weighed by p; elsewhere it is |y| / step - |q|.
    """
    for i in range(first, last, every):
        scaled = abs(y[i]) * inverse
        size = int(scaled + rounding)
        if size == 0:
            b = 0
            weight = 1.0
            value = 0.0
            if scale > 0.0:
                value = 4.0 * np.log(max(1.0 + y[i] * scale, MIN_RATIO))
            else:
                weight = max(float(y[i]) * y[i], 1e-30)
                value = np.log(weight)
        else:
            b = min(size, 2)
            weight = 1.0
            value = scaled - size
        out[b, 0] += weight
        out[b, 1] += weight * value
        out[b, 2] += weight * value * value


def measure_cells(y: Floats32, starts: npt.NDArray[np.int64], mode: int, size: float, rounding: float) -> Cells:
    """Measure what lies in the cells, group by group; -1 as a variance marks a group that is not in use."""
    cells = PredictiveHeader(mode, 0).cells
    for group in range(GROUPS):
        sums = np.zeros((3, 3))
        for c in range(PER_GROUP * group, PER_GROUP * (group + 1)):
            # The class's middle stands for the prior: a quarter of a nat.
            scale = float(np.exp((c + 0.5) / 4) / 4) if mode & PRIOR else 0.0
            for block in range(len(starts)):
                part = np.zeros((3, 3))
                first, last = starts[block, c : c + 2]
                _measure(y, first, last, max((last - first) // _MEASURED_VALUES, 1), 1 / size, rounding, scale, part)
                if mode & PRIOR:
                    part[0] *= np.exp(-(c + 0.5) / 2)  # zeros count as KL weighs them
                sums += part
        _fill_cells(cells[group], sums, bool(mode & PRIOR))
    return cells


def _fill_cells(row: Any, sums: npt.NDArray[np.float64], prior: bool) -> None:
    """Write means and variances into the cells of a group."""
    if sums[:, 0].sum() == 0:
        row["v1"] = -1
        return
    count = np.maximum(sums[:, 0], 1e-30)
    mean = sums[:, 1] / count
    spread = np.maximum(sums[:, 2] - count * mean**2, 0)
    if sums[0, 0] > 0:
        row["zero"] = np.clip(np.rint(32 * mean[0]), -127, 127) if prior else 0
        row["v0"] = min(spread[0] / count[0], 6e4)
    for b, name in ((1, "one"), (2, "more")):
        if sums[b, 0] > 0:
            row[name] = np.clip(np.rint(256 * mean[b]), -127, 127)
    if sums[1:, 0].sum() > 0:
        row["v1"] = min(spread[1:].sum() / count[1:].sum(), 6e4)


def unsent_values(prior: Eighths | None, shape: tuple[int, int]) -> Pair:
    """Return the prior, or equal probabilities: what an empty payload stands for."""
    values: Floats32 = np.zeros(shape, np.float32) if prior is None else _LOG_PRIOR[-prior]
    return values, np.full(shape, UNSENT_VARIANCE, np.float32)


def expand_symbols(
    places: npt.NDArray[np.int32],
    symbols: npt.NDArray[np.int32],
    tails: npt.NDArray[np.int32],
    prior: Eighths | None,
    header: PredictiveHeader,
    shape: tuple[int, int],
) -> Pair:
    """Return log-probabilities and variances of a block from the places where symbols are not zero."""
    if prior is None:
        level = tail_level(tails, np.bincount(places // shape[1], minlength=shape[0]), shape[1])
        values = np.repeat(level[:, None], shape[1], axis=1)
        variance = np.full(shape, header.cells["v0"][0], np.float32)
        values.flat[places], variance.flat[places] = _expand_without_prior(cell_means(symbols, 0, header), header)
    else:
        zero, left = zero_values(header)
        values = zero[-prior]
        variance = left[-prior]
        values.flat[places], variance.flat[places] = expand_prior(symbols, prior.ravel()[places], header)
    return values, variance


def zero_values(header: PredictiveHeader) -> Pair:
    """Return what a zero decodes to against each integer of the prior, and its variance."""
    values = LOG_PRIOR + (header.cells["zero"] / 32.0)[_GROUP_OF]
    return values.astype(np.float32), header.cells["v0"][_GROUP_OF].astype(np.float32)


def cell_means(
    symbols: npt.NDArray[np.int32], groups: npt.NDArray[np.uint8] | int, header: PredictiveHeader
) -> Floats32:
    """Return y of symbols that are not zero: the mean of their cells."""
    size = np.abs(symbols)
    offset = np.where(size == 1, header.cells["one"][groups], header.cells["more"][groups]) / np.float32(256)
    result: Floats32 = (np.sign(symbols) * (size + offset) * header.size).astype(np.float32)
    return result


def expand_prior(symbols: npt.NDArray[np.int32], prior: Eighths, header: PredictiveHeader) -> Pair:
    """Return log-probabilities and variances of symbols that are not zero, coded against the prior."""
    groups = _GROUP_OF[-prior]
    variance = header.cells["v1"][groups].astype(np.float32) * header.size**2
    return _expand_against_prior(cell_means(symbols, groups, header), prior, variance)


def large_symbol_terms(header: PredictiveHeader) -> Pair:
    """Return the offset of symbols above one for each integer of the prior, in steps, and the variance of their y."""
    more = header.cells["more"][_GROUP_OF] / np.float32(256)
    return more.astype(np.float32), header.cells["v1"][_GROUP_OF].astype(np.float32) * np.float32(header.size**2)


def _expand_against_prior(y: Floats32, prior: Eighths, variance: Floats32 | float) -> Pair:
    root = SQRT_PRIOR[-prior]
    ratio = np.maximum(1 + y / (4 * root), np.float32(MIN_RATIO))  # (p / pi)^(1/4)
    values: Floats32 = _LOG_PRIOR[-prior] + 4 * np.log(ratio)
    left: Floats32 = variance / np.square(root * ratio)
    return values, left


def _expand_without_prior(y: Floats32, header: PredictiveHeader, variance: float | None = None) -> Pair:
    y = np.maximum(y, np.float32(0.1 * header.size))
    spread = float(header.cells["v1"][0]) if variance is None else variance
    values: Floats32 = 2 * np.log(y / 2)
    left: Floats32 = (4 * spread * header.size**2 / np.square(y)).astype(np.float32)
    return values, left


def expand_dithered(
    symbols: npt.NDArray[np.int32], dither: Floats32, prior: Eighths | None, header: PredictiveHeader
) -> Pair:
    """Return log-probabilities and variances of all coordinates of a block, coded with dither."""
    y: Floats32 = ((symbols - dither) * header.size).astype(np.float32)
    if prior is None:
        return _expand_without_prior(y, header, 1 / 12)
    return _expand_against_prior(y, prior, header.size**2 / 12)


def dither_bias(variance: Floats32, header: PredictiveHeader) -> Floats32:
    """Return the bias of what a payload decodes to, see `fpld.types.Decoded`, from its variance.

    With dither y has a uniform error, and p is its fourth power against a prior, or its square: the factor is exact.
    Where it would turn a small probability negative it is held at a tenth. Without dither values are means of what may
    have been meant: they hold no noise to take out, and students do better without what they lack of a mean
    probability (docs/rules.md).
    """
    if not header.mode & DITHER:
        return NO_BIAS
    factor = 1 - variance * (0.375 - variance * (21 / 1280)) if header.mode & PRIOR else 1 - variance / 4
    result: Floats32 = -np.log(np.maximum(factor, np.float32(0.1)))
    return result


def tail_level(tails: npt.NDArray[np.int32], counts: npt.NDArray[np.int64], vocab: int) -> Floats32:
    """Return the log-probability of each context's tokens that were not sent: an equal share of the tail's mass."""
    mass = np.where(tails >= 0, np.exp2(-tails / TAILS_PER_OCTAVE), 1.0)
    result: Floats32 = np.log(mass / np.maximum(vocab - counts, 1)).astype(np.float32)
    return result
