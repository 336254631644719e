"""The uniform codec's arithmetic on arrays: what a symbol is and what it decodes to. The kernels do the same in loops.

All of it is float32 and integers, operation by operation, so that every machine decodes the same values. With N
levels on the half-range h around c, the step is 2h / (N - 1). The dither y is a 16-bit number; a value is placed on a
grid of 2^16 points a step, i = (x - c) 2^16 / step + (N - 1) 2^15 to the nearest integer, and its symbol is

    k = (i + 65535 - y) >> 16,    so that    z = 2^16 k + y    lies in i .. i + 65535, each equally likely.

The decoder takes z less its mean distance to i. The error is at most half a step, uniform, and its mean is zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from fpld.codecs.dither import Units
    from fpld.types import Floats, Ints

    Floats32 = npt.NDArray[np.float32]

UNITS = 65536.0  # points of a step


def steps(halves: Floats, levels: Ints) -> Floats:
    """Return the step of each coordinate, [rows, V]; one level has none."""
    return np.where(levels == 1, 0.0, 2.0 * halves[:, None] / np.maximum(levels - 1, 1))


def quantize(values: Floats32, centres: Floats, halves: Floats, levels: Ints, units: Units) -> Ints:
    """Return the symbols of values [rows, V]; what lies outside the range is clipped."""
    with np.errstate(divide="ignore"):
        slope = np.where(halves[:, None] == 0, 0.0, UNITS * (levels - 1) / (2.0 * halves[:, None])).astype(np.float32)
    offset, top = ((levels - 1) * 32768.0 + 0.5).astype(np.float32), ((levels - 1) * UNITS).astype(np.float32)
    place = (values - centres[:, None].astype(np.float32)) * slope + offset
    index = np.minimum(np.maximum(place, np.float32(0)), top).astype(np.int64)
    symbols: Ints = index + (65535 - units.astype(np.int64)) >> 16
    return symbols


def dequantize(symbols: Ints, centres: Floats, halves: Floats, levels: Ints, units: Units) -> Floats32:
    """Return the values of symbols [rows, V]."""
    step = steps(halves, levels)
    base = np.where(levels == 1, centres[:, None], centres[:, None] - step * (levels / 2.0 - 2.0**-17))
    z = ((symbols << 16) | units).astype(np.float32)
    values: Floats32 = z * (step / UNITS).astype(np.float32) + base.astype(np.float32)
    return values


def errors(halves: Floats, runs: Sequence[tuple[int, int]]) -> tuple[Floats32, Floats32]:
    """Return the error's variance and its bias, see `fpld.types.Decoded`: each [rows or 1, V or 1].

    `runs` of coordinates have the same number of levels (`fpld.codecs.uniform.radix.runs`). The variance is
    step^2 / 12; that of a value which is not sent is its largest square.
    """
    if (halves == halves[:1]).all():
        halves = halves[:1]  # one clip for all contexts
    kinds, counts = np.array(runs).T
    step = steps(halves, kinds)
    variance = np.where(kinds == 1, halves[:, None] ** 2, step * step / 12.0)
    found = variance.astype(np.float32), bias(variance).astype(np.float32)
    if len(runs) == 1:
        return found
    return np.repeat(found[0], counts, axis=1), np.repeat(found[1], counts, axis=1)


def bias(variance: Floats) -> Floats:
    """Return log E[exp(error)] of an error that is uniform over a step: log(sinh(h) / h) for half a step h.

    >>> bias(np.array([0.0, 3.0])).round(4).tolist()  # sinh(3) / 3 is 3.3393
    [0.0, 1.2058]
    """
    half = np.sqrt(3 * variance)
    safe = np.maximum(half, 1e-3)  # below, there would be 0 / 0
    result: Floats = np.where(half < 1e-3, half**2 / 6, safe + np.log(-np.expm1(-2 * safe) / (2 * safe)))
    return result
