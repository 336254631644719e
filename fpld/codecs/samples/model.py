"""What is learnt while symbols are coded: one function codes a candidate's symbol, one an escape, in either direction.

Whether a candidate's symbol is zero goes by the bins of its two ratios and by how lively its context has been so far:
whether more of its symbols were not zero than was to be expected. An *escape* is a symbol that is not zero where there
is no candidate; the gaps between escapes run through all contexts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fpld.codecs.samples.grid import HALF, LOWEST, MINUS, OCTAVE, PLUS
from fpld.codecs.samples.rangecoder import BITS, MET, bit, number, raw
from fpld.compiled import bare, inlined

_PAIRS = (PLUS + 1) * (MINUS + 1)
_MOODS = 3  # a context is calm, as expected, or lively
GROUPS = 12  # of sizes: octaves of pi / tau
_SIZE_OCTAVES, _GAP_OCTAVES = 26, 58  # sizes are below 2^25, gaps below 2^57

# Where each kind of decision is learnt.
_ZERO = 0
_EXPECTED = _ZERO + _PAIRS * _MOODS  # the same whatever the mood
_SIGN = _EXPECTED + _PAIRS
_SIZE = _SIGN + _PAIRS
_ESCAPED = _SIZE + 2 * GROUPS * 2 * _SIZE_OCTAVES  # sign and size of an escape, then gaps
_GAP = _ESCAPED + 1 + 2 * _SIZE_OCTAVES
PLACES = _GAP + 2 * _GAP_OCTAVES

# What to expect before anything is learnt, in 2^-16: of symbols above and below zero, by bin.
_ABOVE = (21000, 20000, 18000, 16000, 14500, 12500, 10000, 8000, 5500, 4000, 2500, 1650, 1000, 600, 350, 220, 130)
_BELOW = (42000, 39000, 38000, 36000, 32000, 27000, 20000, 8000, 300, 30)
_TRUST = 16  # how often what was learnt in an earlier round counts as seen
_GUESS = 2  # and the guess above

_MARK, _MARK_BITS = 0xF1D5, 16  # ends a code: what was cut or changed hardly has it

Array = np.ndarray[Any, np.dtype[Any]]


def start_learning(learnt: Array | None) -> Array:
    """Return what decisions begin with, [PLACES]: what was learnt in an earlier round, or a guess."""
    if learnt is not None:
        trusted: Array = learnt.astype(np.int32) << (BITS - 16 + MET) | _TRUST
        return trusted
    chances, met = np.full(PLACES, 1 << 15), np.zeros(PLACES, np.int64)
    above, below = np.array(_ABOVE)[:, None], np.array(_BELOW)[None]
    either = (above + below - (above * below >> 16)).ravel()
    chances[_ZERO:_EXPECTED] = np.repeat(either, _MOODS)
    chances[_EXPECTED:_SIGN] = either
    chances[_SIGN:_SIZE] = ((below << 16) // (above + below)).ravel()
    chances[_SIZE:_ESCAPED] = 1 << 14
    met[_ZERO:_SIZE] = _GUESS
    guess: Array = (chances << (BITS - 16 + MET) | met).astype(np.int32)
    return guess


def learnt_from(learning: Array) -> Array:
    """Return what was learnt, in 2^-16, none of it zero."""
    learnt: Array = np.clip(learning >> (BITS - 16 + MET), 1, (1 << 16) - 1).astype(np.uint16)
    return learnt


@inlined
def bins(ratio: Any, upper: Any, lower: Any) -> Any:
    """Return the bins of a coordinate's two ratios, from log2(tau / pi), log2(1 - u) and log2(u)."""
    plus = ((ratio + upper) >> HALF) + LOWEST
    minus = ((ratio + lower) >> HALF) + LOWEST
    return min(max(plus, 0), PLUS), min(max(minus, 0), MINUS)


@inlined
def _mood(mood: Any) -> Any:
    """Return 0, 1 or 2: a context had fewer symbols than expected so far, about as many, or more."""
    found, expected = (mood[0] + 1) << (BITS + 2), mood[1] + (1 << BITS)
    if found < 3 * expected:
        return 0
    return 1 if found <= 6 * expected else 2


@inlined
def symbol(state: Any, data: Any, learning: Any, mood: Any, plus: Any, minus: Any, ratio: Any, value: Any) -> Any:
    """Code a candidate's symbol; return it. `mood` has the context's symbols so far, and how many were expected."""
    pair = plus * (MINUS + 1) + minus
    some = bit(state, data, learning, _ZERO + _MOODS * pair + _mood(mood), 1 if value else 0)
    at = _EXPECTED + pair
    expected = np.int64(learning[at]) >> MET
    mood[0] += some
    mood[1] += expected
    learning[at] = (expected + (((some << BITS) - expected) >> 7)) << MET
    if not some:
        return 0
    below = bit(state, data, learning, _SIGN + pair, 1 if value < 0 else 0)
    group = min(max((2 * OCTAVE - ratio) >> 8, 0), GROUPS - 1)
    at = _SIZE + (2 * group + below) * 2 * _SIZE_OCTAVES
    size = 1 + number(state, data, learning, at, _SIZE_OCTAVES, abs(value) - 1)
    return -size if below else size


@bare
def escape(state: Any, data: Any, learning: Any, value: Any) -> Any:
    """Code the symbol of an escape; return it."""
    below = bit(state, data, learning, _ESCAPED, 1 if value < 0 else 0)
    size = 1 + number(state, data, learning, _ESCAPED + 1, _SIZE_OCTAVES, abs(value) - 1)
    return -size if below else size


@bare
def gap(state: Any, data: Any, learning: Any, value: Any) -> Any:
    """Code how many coordinates lie before the next escape, or before the end; return it."""
    return number(state, data, learning, _GAP, _GAP_OCTAVES, value)


@bare
def mark(state: Any, data: Any) -> Any:
    """Code the end; return whether it is one."""
    return raw(state, data, _MARK_BITS, _MARK) == _MARK
