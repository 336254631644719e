"""Tokens to bytes and back, fast: range asymmetric numeral systems, exact, bounds checked.

Gaps and sizes have states of their own, so that a processor works on both at once, and what depends on the data is
looked up rather than branched on. Words of 16 bits stand at the front of a code, raw bits at its back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.predictive.tokens import (
    BELOW,
    BITS,
    COUNT,
    COUNTS,
    DUE,
    FREQUENCIES,
    FREQUENCY_MASK,
    FREQUENCY_SHIFT,
    GAPS,
    KIND_SHIFT,
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
    renew_table,
)
from fpld.kernels import inlined, kernel

if TYPE_CHECKING:
    from fpld.types import Array

# A decoder's state: those of gaps and sizes, words and raw words read, raw bits in hand and how many, the last tail.
# Then, of each class, the next place that is not zero, how many coordinates have been passed, and the last sign.
_STATES = 0
_WORDS = 2
_RAWS = 3
_HELD = 4
_INHAND = 5
_TAIL = 6
_NEXT = 8
_u = np.uint64  # an unsigned index is not tested for counting from the end


@inlined
def state_after(x: Any, frequency: Any, below: Any) -> Any:
    """Return the state after a token was read."""
    return frequency * (x >> BITS) + (x & (ONE - 1)) - below


@inlined
def state_before(state: Any, frequency: Any, below: Any) -> Any:
    """Return the state before a token is read, from the one after it: what an encoder does."""
    quotient = state // frequency
    return (quotient << BITS) + state - quotient * frequency + below


@kernel
def write_ans(records: Any, out: Any) -> Any:
    """Write records, words to the front of `out`, raw bits to its back; return the bytes of each, -1: out is short."""
    # Raw bits go from the back to the front, the first to be read lowest.
    held = np.int64(0)
    count = 0
    raw = 0
    size = out.size
    for k in range(records.size):
        e = (records[k] >> RAW_BITS_SHIFT) & RAW_BITS_MASK
        if e:
            held |= (records[k] >> RAW_SHIFT) << count
            count += e
            while count >= 8:
                raw += 1
                if raw > size:
                    return -1, -1
                out[size - raw] = held & 255
                held >>= 8
                count -= 8
    if count > 0:
        raw += 1
        if raw > size:
            return -1, -1
        out[size - raw] = held & 255
    gaps = np.int64(LOW)
    sizes = np.int64(LOW)
    # Tokens are written last to first, since a decoder goes the other way; words move to the front in the end.
    place = size - raw
    for k in range(records.size - 1, -1, -1):
        record = records[k]
        kind = (record >> KIND_SHIFT) & 1
        frequency = (record >> FREQUENCY_SHIFT) & FREQUENCY_MASK
        state = sizes if kind else gaps
        if state >= frequency << (32 - BITS):
            place -= 2
            if place < 0:
                return -1, -1
            out[place] = state & 255
            out[place + 1] = (state >> 8) & 255
            state >>= 16
        state = state_before(state, frequency, record & (ONE - 1))
        if kind:
            sizes = state
        else:
            gaps = state
    place -= 8
    if place < 0:
        return -1, -1
    for byte in range(4):
        out[place + byte] = (gaps >> (8 * byte)) & 255
        out[place + 4 + byte] = (sizes >> (8 * byte)) & 255
    front = size - raw - place
    for k in range(front):
        out[k] = out[place + k]
    return front, raw


class AnsDecoder:
    """Read a code block by block, for so many coordinates in each class and symbols up to `largest`."""

    def __init__(self, data: Array, totals: Array, largest: int, learnt: Array | None) -> None:
        self.data = data
        self.totals = totals
        self.models = new_models(totals, largest, learnt, decoder=True)
        # Zeros at both ends: a place that is read without a question is there.
        self._words = np.frombuffer(data.tobytes() + bytes(4 + data.size % 2), "<u2")
        self._raws = np.frombuffer(data[::-1].tobytes() + bytes(8 + -data.size % 4), "<u4")
        self._state = np.zeros(_NEXT + 3 * totals.size, np.int64)
        self.sound = bool(_begin(self._words, self._raws, data.size, totals, self._state, *self.models))

    def block(self, starts: Array, places: Array, symbols: Array) -> int:
        """Decode the next block: places and values of symbols that are not zero; return how many, -1 if unsound.

        `starts` [classes + 1] is the block's; `places` count in its class order.
        """
        source = self._words, self._raws, self._state, self.totals, starts
        count: int = _decode(*source, *self.models, places, symbols)
        return count

    def tails(self, wanted: Array, tails: Array) -> bool:
        """Decode a number for each wanted context, the others stay; say whether the data were sound."""
        return bool(_tails(self._words, self._raws, self._state, *self.models, wanted, tails))

    def ended(self) -> bool:
        """Return whether all of the code was read, and nothing else, and the states are where the encoder began."""
        state = [int(x) for x in self._state[:_NEXT]]
        raw = 32 * state[_RAWS] - state[_INHAND]
        return state[0] == LOW and state[1] == LOW and 2 * state[_WORDS] - (-raw // 8) == self.data.size


@inlined
def _word(words: Any, at: Any) -> Any:
    """Return a word; past the end come zeros, which `ended` finds out."""
    return np.int64(words[_u(min(at, words.size - 1))])


@inlined
def _fill(raws: Any, at: Any, held: Any, inhand: Any) -> Any:
    """Refill the buffer to at least thirty raw bits."""
    if inhand < 31:
        held |= np.int64(raws[_u(min(at, raws.size - 1))]) << inhand
        inhand += 32
        at += 1
    return at, held, inhand


@kernel
def _number(words: Any, raws: Any, state: Any, tables: Any, pace: Any, slots: Any, c: Any) -> Any:
    """Read a number of class c, apart from the others: the gap before its first symbol, or a tail; -1: no more."""
    x = state[_STATES]
    token = np.int64(slots[c, 0, x & (ONE - 1)])
    x = state_after(x, tables[c, FREQUENCIES, token], tables[c, BELOW, token])
    if x < LOW:
        x = x << 16 | _word(words, state[_WORDS])
        state[_WORDS] += 1
    state[_STATES] = x
    count_token(tables, pace, slots, token, c, 0)
    state[_RAWS], state[_HELD], state[_INHAND] = _fill(raws, state[_RAWS], state[_HELD], state[_INHAND])
    e = RAW_BITS[token]
    number = NUMBERS[token] + (state[_HELD] & ((1 << e) - 1))
    state[_HELD] >>= e
    state[_INHAND] -= e
    return number


@kernel
def _begin(words: Any, raws: Any, size: Any, totals: Any, state: Any, tables: Any, pace: Any, slots: Any) -> Any:
    """Read the states and the gap before the first symbol of each class; say whether they are sound."""
    if size < 8:
        return False
    for k in range(2):
        state[_STATES + k] = np.int64(words[2 * k]) | np.int64(words[2 * k + 1]) << 16
        if state[_STATES + k] < LOW:
            return False
    state[_WORDS] = 4
    for c in range(totals.size - 1):
        if totals[c]:
            gap = _number(words, raws, state, tables, pace, slots, c)
            if gap >= totals[c]:
                return False
            state[_NEXT + c] = gap if gap >= 0 else totals[c]
    return True


@kernel
def _decode(
    words: Any,
    raws: Any,
    state: Any,
    totals: Any,
    starts: Any,
    tables: Any,
    pace: Any,
    slots: Any,
    places: Any,
    symbols: Any,
) -> Any:
    """Decode the next block."""
    n = 0
    classes = totals.size - 1
    gaps = state[_STATES]
    sizes = state[_STATES + 1]
    at = state[_WORDS]
    raw = state[_RAWS]
    held = state[_HELD]
    inhand = state[_INHAND]
    for c in range(classes):
        seen = state[_NEXT + classes + c]
        following = state[_NEXT + c]
        end = seen + starts[c + 1] - starts[c]
        total = totals[c]
        shift = starts[c] - seen
        state[_NEXT + classes + c] = end
        if following >= end:
            continue
        counts = tables[c, COUNTS]
        frequencies = tables[c, FREQUENCIES]
        below = tables[c, BELOW]
        gap_slots = slots[c, 0]
        size_slots = slots[c, 1:]
        due_sizes = pace[c, 1:, DUE]
        due = pace[c, 0, DUE]
        sign = state[_NEXT + 2 * classes + c]
        while following < end:
            token = np.int64(size_slots[_u(sign), _u(sizes & (ONE - 1))])
            place = _u(GAPS + sign * SIZES + token)
            sizes = state_after(sizes, frequencies[place], below[place])
            wide = sizes << 16 | _word(words, at)
            low = sizes < LOW
            sizes = wide if low else sizes
            at = at + low
            counts[place] += COUNT
            due_sizes[_u(sign)] -= 1
            if due_sizes[_u(sign)] == 0:
                renew_table(tables, pace, slots, c, 1 + sign)
            sign = token & 1
            raw, held, inhand = _fill(raws, raw, held, inhand)
            e = RAW_BITS[_u((token >> 1) + 1)]
            size = NUMBERS[_u((token >> 1) + 1)] + (held & ((1 << e) - 1)) + 1
            held >>= e
            inhand -= e
            places[_u(n)] = following + shift
            symbols[_u(n)] = -size if sign else size
            n += 1
            following += 1
            if following < total:  # the gap to the next
                token = np.int64(gap_slots[_u(gaps & (ONE - 1))])
                gaps = state_after(gaps, frequencies[_u(token)], below[_u(token)])
                wide = gaps << 16 | _word(words, at)
                low = gaps < LOW
                gaps = wide if low else gaps
                at = at + low
                counts[_u(token)] += COUNT
                due -= 1
                if due == 0:
                    due = renew_table(tables, pace, slots, c, 0)
                raw, held, inhand = _fill(raws, raw, held, inhand)
                e = RAW_BITS[_u(token)]
                gap = NUMBERS[_u(token)] + (held & ((1 << e) - 1))
                held >>= e
                inhand -= e
                following += gap
                if following >= total:
                    return -1
                if gap < 0:
                    following = total
        pace[c, 0, DUE] = due
        state[_NEXT + c] = following
        state[_NEXT + 2 * classes + c] = sign
    state[_STATES] = gaps
    state[_STATES + 1] = sizes
    state[_WORDS] = at
    state[_RAWS] = raw
    state[_HELD] = held
    state[_INHAND] = inhand
    return n


@kernel
def _tails(words: Any, raws: Any, state: Any, tables: Any, pace: Any, slots: Any, wanted: Any, tails: Any) -> Any:
    """Decode the tails of a block."""
    for row in range(wanted.size):
        if wanted[row]:
            number = _number(words, raws, state, tables, pace, slots, tables.shape[0] - 1)
            state[_TAIL] += (number >> 1) if number & 1 == 0 else -((number + 1) >> 1)
            tails[row] = state[_TAIL]
            if number < 0 or not 0 <= state[_TAIL] <= MAX_TAIL:
                return False
    return True
