"""Tokens to bytes and back, fast: range asymmetric numeral systems, exact, bounds checked.

Gaps and sizes have states of their own, so that a processor works on both at once, and what depends on the data is
looked up rather than branched on. Words of 16 bits stand at the front of a code, raw bits at its back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.predictive.tokens import (
    BITS,
    COUNT,
    EXTRA,
    GAPS,
    LOW,
    MOST_TAIL,
    NUMBER,
    ONE,
    SIZES,
    new_models,
    note,
    renew,
)
from fpld.compiled import inlined, kernel

if TYPE_CHECKING:
    from fpld.codecs.predictive.tokens import Array

# A decoder's state: those of gaps and sizes, words and raw words read, raw bits in hand and how many, the last tail.
_STATES, _WORDS, _RAWS, _HELD, _INHAND, _TAIL = 0, 2, 3, 4, 5, 6
_u = np.uint64  # as an index it is not asked whether it counts from the end
_NEXT = 8  # then each class has its next place that is not zero, how many have been seen, and the last sign


@inlined
def after(x: Any, frequency: Any, below: Any) -> Any:
    """Return the state after a token was read."""
    return frequency * (x >> BITS) + (x & (ONE - 1)) - below


@inlined
def before(state: Any, frequency: Any, below: Any) -> Any:
    """Return the state before a token is read, from the one after it."""
    quotient = state // frequency
    return (quotient << BITS) + state - quotient * frequency + below


@kernel
def write(records: Any, out: Any) -> Any:
    """Write records, words to the front of `out`, raw bits to its back; return the bytes of each, -1: out is short."""
    held, count, raw = np.int64(0), 0, 0  # raw bits, the first to be read lowest
    size = out.size
    for k in range(records.size):
        e = (records[k] >> 26) & 63
        if e:
            held |= (records[k] >> 32) << count
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
    gaps, sizes = np.int64(LOW), np.int64(LOW)
    place = size - raw  # words grow down from here, and move to the front in the end
    for k in range(records.size - 1, -1, -1):
        record = records[k]
        kind, frequency = (record >> 25) & 1, (record >> 12) & 8191
        state = sizes if kind else gaps
        if state >= frequency << (32 - BITS):
            place -= 2
            if place < 0:
                return -1, -1
            out[place], out[place + 1] = state & 255, (state >> 8) & 255
            state >>= 16
        state = before(state, frequency, record & (ONE - 1))
        if kind:
            sizes = state
        else:
            gaps = state
    place -= 8
    if place < 0:
        return -1, -1
    for byte in range(4):
        out[place + byte], out[place + 4 + byte] = (gaps >> (8 * byte)) & 255, (sizes >> (8 * byte)) & 255
    front = size - raw - place
    for k in range(front):
        out[k] = out[place + k]
    return front, raw


class Decoder:
    """Read a code block by block, for so many coordinates in each class and symbols up to `largest`."""

    def __init__(self, data: Array, totals: Array, largest: int, learnt: Array | None) -> None:
        self.data, self.totals = data, totals
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
    x = after(x, tables[c, 1, token], tables[c, 2, token])
    if x < LOW:
        x = x << 16 | _word(words, state[_WORDS])
        state[_WORDS] += 1
    state[_STATES] = x
    note(tables, pace, slots, token, c, 0)
    state[_RAWS], state[_HELD], state[_INHAND] = _fill(raws, state[_RAWS], state[_HELD], state[_INHAND])
    e = EXTRA[token]
    number = NUMBER[token] + (state[_HELD] & ((1 << e) - 1))
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
    n, classes = 0, totals.size - 1
    gaps, sizes, at = state[_STATES], state[_STATES + 1], state[_WORDS]
    raw, held, inhand = state[_RAWS], state[_HELD], state[_INHAND]
    for c in range(classes):
        seen = state[_NEXT + classes + c]
        following, end, total = state[_NEXT + c], seen + starts[c + 1] - starts[c], totals[c]
        shift = starts[c] - seen
        state[_NEXT + classes + c] = end
        if following >= end:
            continue
        counts, frequencies, below = tables[c, 0], tables[c, 1], tables[c, 2]
        gap_slots, size_slots, due_sizes = slots[c, 0], slots[c, 1:], pace[c, 1:, 0]
        due, sign = pace[c, 0, 0], state[_NEXT + 2 * classes + c]
        while following < end:
            token = np.int64(size_slots[_u(sign), _u(sizes & (ONE - 1))])
            place = _u(GAPS + sign * SIZES + token)
            sizes = after(sizes, frequencies[place], below[place])
            wide = sizes << 16 | _word(words, at)
            low = sizes < LOW
            sizes, at = wide if low else sizes, at + low
            counts[place] += COUNT
            due_sizes[_u(sign)] -= 1
            if due_sizes[_u(sign)] == 0:
                renew(tables, pace, slots, c, 1 + sign)
            sign = token & 1
            raw, held, inhand = _fill(raws, raw, held, inhand)
            e = EXTRA[_u((token >> 1) + 1)]
            size = NUMBER[_u((token >> 1) + 1)] + (held & ((1 << e) - 1)) + 1
            held >>= e
            inhand -= e
            places[_u(n)] = following + shift
            symbols[_u(n)] = -size if sign else size
            n += 1
            following += 1
            if following < total:  # the gap to the next
                token = np.int64(gap_slots[_u(gaps & (ONE - 1))])
                gaps = after(gaps, frequencies[_u(token)], below[_u(token)])
                wide = gaps << 16 | _word(words, at)
                low = gaps < LOW
                gaps, at = wide if low else gaps, at + low
                counts[_u(token)] += COUNT
                due -= 1
                if due == 0:
                    due = renew(tables, pace, slots, c, 0)
                raw, held, inhand = _fill(raws, raw, held, inhand)
                e = EXTRA[_u(token)]
                gap = NUMBER[_u(token)] + (held & ((1 << e) - 1))
                held >>= e
                inhand -= e
                following += gap
                if following >= total:
                    return -1
                if gap < 0:
                    following = total
        pace[c, 0, 0], state[_NEXT + c], state[_NEXT + 2 * classes + c] = due, following, sign
    state[_STATES], state[_STATES + 1], state[_WORDS] = gaps, sizes, at
    state[_RAWS], state[_HELD], state[_INHAND] = raw, held, inhand
    return n


@kernel
def _tails(words: Any, raws: Any, state: Any, tables: Any, pace: Any, slots: Any, wanted: Any, tails: Any) -> Any:
    """Decode the tails of a block."""
    for row in range(wanted.size):
        if wanted[row]:
            number = _number(words, raws, state, tables, pace, slots, tables.shape[0] - 1)
            state[_TAIL] += (number >> 1) if number & 1 == 0 else -((number + 1) >> 1)
            tails[row] = state[_TAIL]
            if number < 0 or not 0 <= state[_TAIL] <= MOST_TAIL:
                return False
    return True
