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
_SHARES = 1 / 4, 1 / 24, 1 / 160  # of draws that make a candidate of a node: tokens above the first are all looked at

Array = np.ndarray[Any, np.dtype[Any]]


class Sieve(NamedTuple):
    """Hold bounds that let all candidates of `slots` nodes through, and few others, for integers of 16 bits.

    The nodes' draws lie evenly spaced on a circle, so `slots` times them is nearly the same for all. A coordinate with
    the prior's integer p and the upper half w of the first node's draw is looked at if p > always, or if
    slots (w + reach[k]) mod 2^16 <= width[k] for a k with p > above[k]. A single node has closer bounds by level: its
    own w must have (w + reaches[level]) mod 2^16 < widths[level].
    """

    slots: int
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


def make_sieve(ratios: Array, slots: int = 1, below: int = 0) -> Sieve:
    """Return the bounds for a step, from `log_ratios`: floats will do, as what they let through is looked at again.

    With `below`, coordinates whose ratio for symbols below zero is so much larger than a candidate's go through too.
    """
    upper, lower = (
        np.exp2(np.minimum(((bins - LOWEST << HALF) + _SLACK + more - ratios) / OCTAVE, 0.0))
        for bins, more in ((PLUS, 0), (MINUS, below))
    )
    share = np.maximum(upper, lower)
    whole = share >= _SHARES[0]
    reaches, lowers = (
        np.minimum(np.ceil(_CELLS * part) + 1, _CELLS // 2 - 1).astype(np.int64) for part in (upper, lower)
    )
    firsts = [int((share >= bound / slots).sum()) for bound in _SHARES]  # levels come from likely to unlikely
    starts = np.minimum(firsts, LEVELS - 1)
    above = -np.array([*firsts[1:], LEVELS], np.int16)
    reach = (slots * reaches[starts] % _CELLS).astype(np.uint16)
    width = (np.minimum(slots * (reaches + lowers)[starts], _CELLS) - 1).astype(np.uint16)
    return Sieve(slots, -firsts[0], above, reach, width, reaches, np.where(whole, _CELLS, reaches + lowers))
