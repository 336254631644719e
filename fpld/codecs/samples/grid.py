"""Steps of sampled labels, and what both ends derive from a step: in integers, logarithms in 1/256 of an octave.

For a coordinate with the prior's probability pi, the draw u and the step tau, the symbol floor(d / tau + u) is above
zero from p / pi = 1 + tau (1 - u) / pi on, and below zero up to p / pi = 1 - tau u / pi. So the two ratios
tau (1 - u) / pi and tau u / pi, in half octaves, say how likely either is, whatever pi and tau are. A *candidate* is a
coordinate for which one of them is small.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fpld.codecs.prior import LEAST_PRIOR

OCTAVE = 256
STEPS, OFFSET = 30 * OCTAVE + 1, 24 * OCTAVE  # tau = 2^((n - offset) / 256): from 2^-24 to 2^6
LEVELS = -LEAST_PRIOR + 1  # a level is minus the prior's integer
# -log2(pi) by level: 256 log2(e) / 8 = 47274 / 1024, rounded.
AWAY = (np.arange(LEVELS) * 47274 + 512) >> 10
# log2 of a distance 1..2^32 over 2^32, by its exponent and three bits below it: in the middle of such a cell.
_MANTISSA = np.array([22, 63, 100, 134, 165, 193, 220, 244])
LOGS = (OCTAVE * (np.arange(33) - 32)[:, None] + _MANTISSA).ravel()

HALF, LOWEST = 7, 8  # a bin is half an octave; the first holds ratios up to 2^-3.5
PLUS, MINUS = 16, 9  # bins of candidates, ratios below 2^4 and below 2^0.5; the one after is for all beyond

_CELLS = 1 << 16
_SLACK = 32  # a logarithm of the middle of a cell is at most that far from the truth
_SHARES = 1 / 4, 1 / 24, 1 / 160  # of draws that make a candidate: tokens above the first are all looked at

Array = np.ndarray[Any, np.dtype[Any]]


class Sieve(NamedTuple):
    """Hold bounds that let all candidates through, and few others, for integers of 16 bits.

    A coordinate with the prior's integer p and the upper half w of its draw is looked at if p > always, or if
    (w + reach[k]) mod 2^16 < width[k] for a k with p > above[k]. `reaches` and `widths` have closer bounds, by level.
    """

    always: int
    above: Array
    reach: Array
    width: Array
    reaches: Array
    widths: Array


def step_size(number: int) -> float:
    """Return the step tau of a number."""
    return float(2.0 ** ((number - OFFSET) / OCTAVE))


def step_number(tau: float) -> int:
    """Return the number of the step nearest to tau."""
    return min(max(round(OCTAVE * math.log2(tau)) + OFFSET, 0), STEPS - 1)


def most_symbol(number: int) -> int:
    """Return a bound of |s| with a step, in integers, since both ends must agree: |p - pi| is at most 1."""
    return (1 << max(-((number - OFFSET) // OCTAVE), 0)) + 1


def log_ratios(number: int) -> Array:
    """Return log2(tau / pi) by level, in 1/256 of an octave."""
    return AWAY + (number - OFFSET)


def make_sieve(ratios: Array) -> Sieve:
    """Return the bounds for a step, from `log_ratios`: floats will do, as what they let through is looked at again."""
    top = PLUS - LOWEST << HALF
    share = np.exp2(np.minimum((top + _SLACK - ratios) / OCTAVE, 0.0))
    lower = np.exp2(np.minimum(((MINUS - LOWEST << HALF) + _SLACK - ratios) / OCTAVE, 0.0))
    firsts = [int((share >= bound).sum()) for bound in _SHARES]  # levels come from likely to unlikely
    reaches, lowers = (
        np.minimum(np.ceil(_CELLS * part) + 1, _CELLS // 2 - 1).astype(np.int64) for part in (share, lower)
    )
    widths = np.where(np.arange(LEVELS) < firsts[0], _CELLS, reaches + lowers)
    starts = np.minimum(firsts, LEVELS - 1)
    above = -np.array([*firsts[1:], LEVELS], np.int16)
    reach, width = (part[starts].astype(np.uint16) for part in (reaches, reaches + lowers))
    return Sieve(-firsts[0], above, reach, width, reaches, widths)
