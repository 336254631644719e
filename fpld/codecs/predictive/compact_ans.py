"""Tokens to bytes and back, in few bytes: range asymmetric numeral systems with one state for all tokens.

The state begins at 1 and moves by bytes, and raw bits go through it too, as tokens of equal frequency. So a code has no
more bytes than its bits ask for, plus one, where `ans` spends eight on its states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.predictive.ans import state_after, state_before
from fpld.codecs.predictive.tokens import (
    BELOW,
    BITS,
    FREQUENCIES,
    FREQUENCY_MASK,
    FREQUENCY_SHIFT,
    GAPS,
    LOW,
    MAX_TAIL,
    NUMBERS,
    ONE,
    RAW_BITS,
    RAW_BITS_MASK,
    RAW_BITS_SHIFT,
    RAW_SHIFT,
    SIZES,
    count_token,
    new_models,
)
from fpld.kernels import kernel

if TYPE_CHECKING:
    from fpld.types import Array

# A decoder's state: the coder's, bytes read, the last tail. Then, of each class, the next place that is not zero, how
# many coordinates have been passed, and the last sign.
_AT = 1
_TAIL = 2
_NEXT = 3


@kernel
def write_compact_ans(records: Any, out: Any) -> Any:
    """Write records to the back of `out`, with one state from 1 on, by bytes; return how many, -1: too short."""
    place = out.size
    state = np.int64(1)
    for k in range(records.size - 1, -1, -1):
        record = records[k]
        e = (record >> RAW_BITS_SHIFT) & RAW_BITS_MASK
        value = record >> RAW_SHIFT
        done = 0
        # The raw bits, eight at a time, and the token last: a decoder goes the other way.
        while True:
            bits = min(e - done, 8)
            frequency = (record >> FREQUENCY_SHIFT) & FREQUENCY_MASK
            below = record & (ONE - 1)
            if bits > 0:
                frequency = ONE >> bits
                below = ((value >> done) & ((1 << bits) - 1)) * frequency
                done += bits
            while state >= frequency << (24 - BITS):
                place -= 1
                if place < 0:
                    return -1
                out[place] = state & 255
                state >>= 8
            state = state_before(state, frequency, below)
            if bits <= 0:
                break
    while state:
        place -= 1
        if place < 0:
            return -1
        out[place] = state & 255
        state >>= 8
    return out.size - place


class CompactAnsDecoder:
    """Read a compact code block by block, as `ans.AnsDecoder` does."""

    def __init__(self, data: Array, totals: Array, largest: int, learnt: Array | None) -> None:
        self.data = data
        self.totals = totals
        self.models = new_models(totals, largest, learnt, decoder=True)
        self._state = np.zeros(_NEXT + 3 * totals.size, np.int64)
        self.sound = bool(_begin(data, totals, self._state, *self.models))

    def block(self, starts: Array, places: Array, symbols: Array) -> int:
        """Decode the next block, as `ans.AnsDecoder` does."""
        count: int = _decode(self.data, self._state, self.totals, starts, *self.models, places, symbols)
        return count

    def tails(self, wanted: Array, tails: Array) -> bool:
        """Decode a number for each wanted context, the others stay; say whether the data were sound."""
        return bool(_tails(self.data, self._state, *self.models, wanted, tails))

    def ended(self) -> bool:
        """Return whether all of the code was read, and the state is where the encoder began."""
        return int(self._state[_AT]) == self.data.size and int(self._state[0]) == 1


@kernel
def _step(data: Any, state: Any, frequency: Any, below: Any) -> None:
    """Remove a token from the state; append bytes while it is low and there are any."""
    x = state_after(state[0], frequency, below)
    at = state[_AT]
    while x < LOW and at < data.size:
        x = x << 8 | np.int64(data[at])
        at += 1
    state[0] = x
    state[_AT] = at


@kernel
def _number(data: Any, state: Any, token: Any) -> Any:
    """Return what a token stands for, with its raw bits: those above whole bytes first."""
    e = RAW_BITS[token]
    value = np.int64(0)
    while e > 0:
        bits = e & 7 if e & 7 else 8
        slot = (state[0] & (ONE - 1)) >> (BITS - bits)
        _step(data, state, ONE >> bits, slot << (BITS - bits))
        value = value << bits | slot
        e -= bits
    return NUMBERS[token] + value


@kernel
def _token(data: Any, state: Any, tables: Any, pace: Any, slots: Any, c: Any, kind: Any) -> Any:
    token = np.int64(slots[c, kind, state[0] & (ONE - 1)])
    place = token if kind == 0 else GAPS + (kind - 1) * SIZES + token
    _step(data, state, tables[c, FREQUENCIES, place], tables[c, BELOW, place])
    count_token(tables, pace, slots, place, c, kind)
    return token


@kernel
def _begin(data: Any, totals: Any, state: Any, tables: Any, pace: Any, slots: Any) -> Any:
    """Read the state and the gap before the first symbol of each class; say whether they are sound."""
    _step(data, state, 0, 0)
    for c in range(totals.size - 1):
        if totals[c]:
            gap = _number(data, state, _token(data, state, tables, pace, slots, c, 0))
            if gap >= totals[c]:
                return False
            state[_NEXT + c] = gap if gap >= 0 else totals[c]
    return True


@kernel
def _decode(
    data: Any, state: Any, totals: Any, starts: Any, tables: Any, pace: Any, slots: Any, places: Any, symbols: Any
) -> Any:
    """Decode the next block."""
    n = 0
    classes = totals.size - 1
    for c in range(classes):
        seen = state[_NEXT + classes + c]
        following = state[_NEXT + c]
        end = seen + starts[c + 1] - starts[c]
        total = totals[c]
        sign = state[_NEXT + 2 * classes + c]
        while following < end:
            token = _token(data, state, tables, pace, slots, c, 1 + sign)
            size = _number(data, state, (token >> 1) + 1) + 1
            sign = token & 1
            places[n] = starts[c] + following - seen
            symbols[n] = -size if sign else size
            n += 1
            following += 1
            if following < total:
                gap = _number(data, state, _token(data, state, tables, pace, slots, c, 0))
                following = following + gap if gap >= 0 else total
                if gap >= 0 and following >= total:
                    return -1
        state[_NEXT + c] = following
        state[_NEXT + classes + c] = end
        state[_NEXT + 2 * classes + c] = sign
    return n


@kernel
def _tails(data: Any, state: Any, tables: Any, pace: Any, slots: Any, wanted: Any, tails: Any) -> Any:
    """Decode the tails of a block."""
    for row in range(wanted.size):
        if wanted[row]:
            number = _number(data, state, _token(data, state, tables, pace, slots, tables.shape[0] - 1, 0))
            state[_TAIL] += (number >> 1) if number & 1 == 0 else -((number + 1) >> 1)
            tails[row] = state[_TAIL]
            if number < 0 or not 0 <= state[_TAIL] <= MAX_TAIL:
                return False
    return True
