"""An adaptive entropy coder for sparse integers, as kernels: range asymmetric numeral systems, exact, bounds checked.

Symbols come in classes. Of each class only the symbols that are not zero are coded, each with its sign and size as one
token, and the gap to the next one as another: what is zero costs no time. A token stands for a number below four or for
half an octave; the bits below follow raw. Tables of a class's tokens are made anew from counts after 4 of them, after
8 more, and so on, at both ends alike: no table is ever sent. Gaps and sizes have states of their own, so that a
processor works on both at once; a small code has one state for all, which saves a few bytes.

Coordinates lie block by block, in a block class by class. State arrays hold everything between two calls, so that a
decoder goes on where it stopped. docs/wire.md has the format.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fpld.codecs import prior
from fpld.compiled import inlined, kernel

CLASSES = prior.CLASSES + 1  # the last is for numbers of whole contexts
MOST_TAIL = 255
LARGEST = (1 << 24) - 1  # of a symbol
MOST_COORDINATES = 1 << 31
GAPS, SIZES = 64, 96  # tokens: "no more" and numbers below 2^31; sizes below 2^24 with their sign
KINDS = 3  # of tables: gaps, sizes after a symbol above zero, sizes after one below
TOKENS = GAPS + 2 * SIZES

_BITS = 12
_ONE = 1 << _BITS
_LOW = 1 << 16  # the least state; words of 16 bits keep it there
_FIRST, _LONGEST = 4, 1024  # tokens after which a table is made anew
_COUNT = 4  # what a token adds
_MOST = 1 << 14  # counts: beyond it all are halved
_START = 6  # tokens that the guess is worth with which a table begins
_LEARNT = 192  # counts that it begins with where an earlier round has taught it
COST = -np.log2(np.maximum(np.arange(_ONE + 1), 0.5) / _ONE)  # bits, by frequency

Array = np.ndarray[Any, np.dtype[Any]]


class Models(NamedTuple):
    """Tables of tokens, gaps and then sizes. Kernels take the arrays one by one: a tuple of them is slow.

    `tables` [class, 3, token] has counts, frequencies, and the sum of the frequencies before; `pace` [class, 2, 3] how many
    tokens are to come till a table is made anew, how many these were, and how many tokens there are; `slots`
    [class, 2, slot] the token of each slot, for a decoder.
    """

    tables: Array
    pace: Array
    slots: Array


def first_counts(tables: Array | None, classes: int) -> Array:
    """Give the counts to begin with; without tables expect gaps of any size alike, and small symbols."""
    if tables is not None:
        learnt: Array = tables.reshape(CLASSES, TOKENS)[[*range(classes - 1), CLASSES - 1]]
        return (learnt * _LEARNT + (1 << 15)) >> 16
    guess = np.empty(TOKENS)
    guess[:GAPS] = np.where(np.arange(GAPS) < 24, 1.0, 0.25)
    guess[GAPS:] = np.tile(np.repeat(0.6 ** np.arange(SIZES // 2), 2), 2)
    for part in (guess[:GAPS], guess[GAPS : GAPS + SIZES], guess[GAPS + SIZES :]):
        part *= _START / part.sum()
    return np.tile(np.rint(_COUNT * guess), (classes, 1)).astype(np.int32)


def new_models(totals: Array, largest: int, tables: Array | None, decoder: bool) -> Models:
    """Make models for so many coordinates in each class (the last is for numbers of contexts), symbols up to `largest`."""
    classes = totals.size
    models = Models(
        np.zeros((classes, 3, TOKENS), np.int32),
        np.full((classes, KINDS, 3), _FIRST, np.int32),
        np.zeros((classes, KINDS, _ONE if decoder else 0), np.uint8),
    )
    models.tables[:, 0] = first_counts(tables, classes)
    _prepare(totals, largest, *models)
    return models


@kernel
def _prepare(totals: Any, largest: int, tables: Any, pace: Any, slots: Any) -> None:
    last = totals.size - 1
    for c in range(last + 1):
        if totals[c] or c == last:
            pace[c, 0, 2] = bucket(totals[c] if c < last else 2 * MOST_TAIL + 1) + 2
            _make(tables, pace, slots, c, 0)
            if c < last:
                limit_sizes(largest, tables, pace, slots, c)


@kernel
def limit_sizes(largest: int, tables: Any, pace: Any, slots: Any, c: int) -> None:
    """Make a class's tables of sizes for symbols up to `largest`."""
    for kind in range(1, KINDS):
        pace[c, kind, 2] = 2 * (bucket(largest - 1) + 1)
        _make(tables, pace, slots, c, kind)


def learnt(models: Models) -> Array:
    """Give what models have learnt, for the next round to begin with: probabilities in 2^-16, none of them zero."""
    counts = models.tables[:, 0].astype(np.int64)
    parts = np.split(counts, [GAPS, GAPS + SIZES], axis=1)
    shares = [(part << 16) // np.maximum(part.sum(axis=1, keepdims=True), 1) for part in parts]
    return np.clip(np.concatenate(shares, axis=1), 1, 65535).astype(np.int32).ravel()


@kernel
def bucket(number: int) -> int:
    """Give the token of a number."""
    if number < 4:
        return number
    e = 2
    while number >> (e + 1):
        e += 1
    return 2 * e + ((number >> (e - 1)) & 1)


@kernel
def _make(tables: Any, pace: Any, slots: Any, c: int, kind: int) -> None:
    """Make a table from counts: in integers, no frequency below one."""
    first, n = (GAPS + (kind - 1) * SIZES if kind else 0), pace[c, kind, 2]
    total, best = 0, first
    for t in range(first, first + n):
        total += tables[c, 0, t]
        if tables[c, 0, t] > tables[c, 0, best]:
            best = t
    given = 0
    for t in range(first, first + n):
        frequency = 1 + np.int64(tables[c, 0, t]) * (_ONE - n) // max(total, 1)
        tables[c, 1, t] = frequency
        given += frequency
    tables[c, 1, best] += _ONE - given
    at, row = 0, slots[c, kind]
    for t in range(first, first + n):
        tables[c, 2, t] = at
        end = at + tables[c, 1, t]
        if row.size:
            row[at:end] = np.uint8(t - first)
        at = end
    if total > _MOST:
        for t in range(first, first + n):
            tables[c, 0, t] >>= 1


@kernel
def _renew(tables: Any, pace: Any, slots: Any, c: int, kind: int) -> int:
    """Make a table anew; give how many tokens are to come till the next time."""
    pace[c, kind, 1] = min(2 * pace[c, kind, 1], _LONGEST)
    pace[c, kind, 0] = pace[c, kind, 1]
    _make(tables, pace, slots, c, kind)
    return pace[c, kind, 0]


@kernel
def collect(
    y: Any,
    rank: Any,
    dither: Any,
    starts: Any,
    totals: Any,
    inverse: float,
    rounding: float,
    symbols: Any,
    gaps: Any,
    ends: Any,
) -> int:
    """Quantize; list what is not zero: its symbol, and the gap after it. Give how many.

    Class c of block b is y[starts[b, c] : starts[b, c + 1]]; `rank` says where in its class a value lies, others being
    zero; `dither` has y's size, or none. gaps[:classes] are those before the first symbols, -1 says that no more come; `ends`
    [blocks, classes] says how many symbols come up to the end of a class of a block.
    """
    n = 0
    classes = totals.size - 1
    last, reached = np.full(classes, -1, np.int64), np.full(classes, -1, np.int64)
    for b in range(starts.shape[0]):
        for c in range(classes):
            before, at = last[c], reached[c]
            for i in range(starts[b, c], starts[b, c + 1]):
                shift = dither[i] if dither.size else 0.0
                scaled = y[i] * inverse + shift
                size = abs(scaled) + rounding
                if size >= 1.0:
                    gaps[classes + before if before >= 0 else c] = rank[i] - at - 1
                    at, before = np.int64(rank[i]), n
                    whole = min(np.int64(size), LARGEST)
                    symbols[n] = -whole if scaled < 0 else whole
                    n += 1
            last[c], reached[c] = before, at
            ends[b, c] = n
    for c in range(classes):
        gaps[classes + last[c] if last[c] >= 0 else c] = -1
    return n


@inlined
def _note(tables: Any, pace: Any, slots: Any, at: int, c: int, kind: int) -> None:
    """Count a token, `at` in its class's table."""
    tables[c, 0, at] += _COUNT
    pace[c, kind, 0] -= 1
    if pace[c, kind, 0] == 0:
        _renew(tables, pace, slots, c, kind)


@kernel
def _record(tables: Any, pace: Any, slots: Any, records: Any, n: int, c: int, number: int) -> int:
    """Record a number of class c, apart from the others; learn it, give the index of its bits' cost."""
    e, token = 0, number + 1
    if number >= 4:
        token = bucket(number) + 1
        e = ((token - 1) >> 1) - 1
    frequency = np.int64(tables[c, 1, token])
    if records.size:
        records[n] = (number & ((1 << e) - 1)) << 32 | e << 26 | frequency << 12 | np.int64(tables[c, 2, token])
    _note(tables, pace, slots, token, c, 0)
    return e << 13 | frequency


@kernel
def model(
    symbols: Any,
    gaps: Any,
    ends: Any,
    totals: Any,
    tails: Any,
    rows: Any,
    tables: Any,
    pace: Any,
    slots: Any,
    records: Any,
    most: float,
    cost: Any,
) -> tuple[float, int]:
    """Turn symbols into records of tokens, learning on the way; give their bits and how many they are.

    `records` may be empty: then this tells the length alone. It stops beyond `most` bits. `tails` has a number for each
    context, negative if it is not to be coded, or is empty; `rows` [blocks + 1] says which contexts a block holds.
    """
    bits, raw, n, i, before = 0.0, 0, 0, 0, 0
    writes = records.size > 0
    classes = totals.size - 1
    left, signs = totals.copy(), np.zeros(classes, np.int64)
    for c in range(classes):
        if left[c]:
            found = _record(tables, pace, slots, records, n, c, gaps[c])
            bits += cost[found & 8191]
            raw += found >> 13
            n += 1
            left[c] -= gaps[c]
    for b in range(ends.shape[0]):
        for c in range(classes):
            end, rest = ends[b, c], left[c]
            if i == end:
                continue
            counts, frequencies, below = tables[c, 0], tables[c, 1], tables[c, 2]
            due_gap, sign = pace[c, 0, 0], signs[c]
            while i < end:
                symbol = np.int64(symbols[i])
                number, e = abs(symbol) - 1, 0
                token = number
                if number >= 4:
                    token = bucket(number)
                    e = (token >> 1) - 1
                after, sign = sign, 1 if symbol < 0 else 0
                token = GAPS + after * SIZES + 2 * token + sign
                bits += cost[frequencies[token]]
                raw += e
                if writes:
                    value = (number & ((1 << e) - 1)) << 32 | e << 26
                    records[n] = value | 1 << 25 | np.int64(frequencies[token]) << 12 | np.int64(below[token])
                n += 1
                counts[token] += _COUNT
                pace[c, 1 + after, 0] -= 1
                if pace[c, 1 + after, 0] == 0:
                    _renew(tables, pace, slots, c, 1 + after)
                rest -= 1
                if rest:
                    number, e = gaps[classes + i], 0
                    rest -= number
                    token = number + 1
                    if number >= 4:
                        token = bucket(number) + 1
                        e = ((token - 1) >> 1) - 1
                    bits += cost[frequencies[token]]
                    raw += e
                    if writes:
                        value = (number & ((1 << e) - 1)) << 32 | e << 26
                        records[n] = value | np.int64(frequencies[token]) << 12 | np.int64(below[token])
                    n += 1
                    counts[token] += _COUNT
                    due_gap -= 1
                    if due_gap == 0:
                        due_gap = _renew(tables, pace, slots, c, 0)
                i += 1
            left[c], signs[c] = rest, sign
            pace[c, 0, 0] = due_gap
            if bits + raw > most:
                return bits + raw, n
        if tails.size:
            for row in range(rows[b], rows[b + 1]):
                if tails[row] >= 0:
                    change = np.int64(tails[row]) - before
                    number = 2 * change if change >= 0 else -2 * change - 1
                    found = _record(tables, pace, slots, records, n, classes, number)
                    bits += cost[found & 8191]
                    raw += found >> 13
                    n += 1
                    before = np.int64(tails[row])
    return bits + raw, n


@kernel
def write(records: Any, out: Any) -> tuple[int, int]:
    """Write records: words to the front of `out`, raw bits to its back. Give how many bytes each, -1 if it is too short."""
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
    gaps, sizes = np.int64(_LOW), np.int64(_LOW)
    place = size - raw  # words grow down from here, and move to the front in the end
    for k in range(records.size - 1, -1, -1):
        record = records[k]
        kind, frequency = (record >> 25) & 1, (record >> 12) & 8191
        state = sizes if kind else gaps
        if state >= frequency << (32 - _BITS):
            place -= 2
            if place < 0:
                return -1, -1
            out[place], out[place + 1] = state & 255, (state >> 8) & 255
            state >>= 16
        state = _back(state, frequency, record & (_ONE - 1))
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


@inlined
def _back(state: int, frequency: int, below: int) -> int:
    """Give the state before a token."""
    quotient = state // frequency
    return (quotient << _BITS) + state - quotient * frequency + below


@kernel
def write_small(records: Any, out: Any) -> int:
    """Write records to the back of `out`, with one state from 1 on, by bytes; give how many, -1 if it is too short."""
    place, state = out.size, np.int64(1)
    for k in range(records.size - 1, -1, -1):
        record = records[k]
        e, value, done = (record >> 26) & 63, record >> 32, 0
        while True:  # the raw bits, eight at a time, and the token last: a decoder goes the other way
            bits = min(e - done, 8)
            frequency, below = (record >> 12) & 8191, record & (_ONE - 1)
            if bits > 0:
                frequency = _ONE >> bits
                below = ((value >> done) & ((1 << bits) - 1)) * frequency
                done += bits
            while state >= frequency << (24 - _BITS):
                place -= 1
                if place < 0:
                    return -1
                out[place] = state & 255
                state >>= 8
            state = _back(state, frequency, below)
            if bits <= 0:
                break
    while state:
        place -= 1
        if place < 0:
            return -1
        out[place] = state & 255
        state >>= 8
    return out.size - place


# A decoder's state: the two states, bytes read from the front and from the back, raw bits in hand and how many.
_STATES, _FRONT, _BACK, _HELD, _INHAND, _BEFORE, _BEGUN = 0, 2, 3, 4, 5, 6, 7
_NEXT = 8  # then each class has its next place that is not zero, how many have been seen, and the last sign


def new_decoder(classes: int) -> Array:
    """Make the state of a decoder that has read nothing."""
    return np.zeros(_NEXT + 3 * classes, np.int64)


@inlined
def _step(x: int, frequency: int, below: int) -> int:
    """Give the state after a token."""
    return frequency * (x >> _BITS) + (x & (_ONE - 1)) - below


@inlined
def _refill(x: int, data: Any, at: int, small: bool) -> tuple[int, int]:
    """Bring a state back to the least one; give it and the place of the next byte.

    Past the end come zeros, which `left` finds out; in a small code states end small.
    """
    if small:
        while x < _LOW and at < data.size:
            x = x << 8 | np.int64(data[at])
            at += 1
    elif x < _LOW:
        x = x << 16 | (np.int64(data[at + 1]) << 8 | np.int64(data[at]) if at + 1 < data.size else np.int64(0))
        at += 2
    return x, at


@kernel
def _raw(data: Any, state: Any, e: int, small: bool) -> int:
    """Read raw bits."""
    if small:
        value, x, at = np.int64(0), state[_STATES], state[_FRONT]
        first = e & 7
        for bits in range(e >> 3 if first == 0 else (e >> 3) + 1):
            n = first if bits == 0 and first else 8
            slot = (x & (_ONE - 1)) >> (_BITS - n)
            value = value << n | slot
            x, at = _refill(_step(x, _ONE >> n, slot << (_BITS - n)), data, at, True)
        state[_STATES], state[_FRONT] = x, at
        return value
    while state[_INHAND] < e:
        state[_BACK] += 1
        byte = np.int64(data[data.size - state[_BACK]]) if state[_BACK] <= data.size else np.int64(0)
        state[_HELD] |= byte << state[_INHAND]
        state[_INHAND] += 8
    value = state[_HELD] & ((1 << e) - 1)
    state[_HELD] >>= e
    state[_INHAND] -= e
    return value


@kernel
def _gap(data: Any, small: bool, state: Any, tables: Any, pace: Any, slots: Any, c: int) -> int:
    """Read a number of class c, apart from the others: the gap before its first symbol, or of a context; -1: no more."""
    x = state[_STATES]
    token = np.int64(slots[c, 0, x & (_ONE - 1)])
    x = _step(x, tables[c, 1, token], tables[c, 2, token])
    state[_STATES], state[_FRONT] = _refill(x, data, state[_FRONT], small)
    _note(tables, pace, slots, token, c, 0)
    number = token - 1
    if number < 4:
        return number
    e = (number >> 1) - 1
    return ((2 + (number & 1)) << e) | _raw(data, state, e, small)


@kernel
def begin(data: Any, small: bool, totals: Any, state: Any, tables: Any, pace: Any, slots: Any) -> bool:
    """Read the states and the gap before the first symbol of each class; say whether they are sound."""
    if small:
        state[_STATES], state[_FRONT] = _refill(np.int64(0), data, 0, True)
    elif data.size < 8:
        return False
    else:
        for byte in range(8):
            state[_STATES + (byte >> 2)] |= np.int64(data[byte]) << (8 * (byte & 3))
        state[_FRONT] = 8
        if state[_STATES] < _LOW or state[_STATES + 1] < _LOW:
            return False
    for c in range(totals.size - 1):
        if totals[c]:
            gap = _gap(data, small, state, tables, pace, slots, c)
            if gap >= totals[c]:
                return False
            state[_NEXT + c] = gap if gap >= 0 else totals[c]
    return True


@kernel
def decode(
    data: Any,
    small: bool,
    state: Any,
    totals: Any,
    starts: Any,
    tables: Any,
    pace: Any,
    slots: Any,
    places: Any,
    symbols: Any,
) -> int:
    """Decode the next block: where its symbols that are not zero lie, and what they are; give how many, -1 if unsound.

    `starts` [classes + 1] is the block's; `places` count in its class order.
    """
    n, classes = 0, totals.size - 1
    first, second = state[_STATES], state[_STATES + 1]
    front = state[_FRONT]
    for c in range(classes):
        seen = state[_NEXT + classes + c]
        following, end, total = state[_NEXT + c], seen + starts[c + 1] - starts[c], totals[c]
        shift = starts[c] - seen
        state[_NEXT + classes + c] = end
        if following >= end:
            continue
        counts, frequencies, below = tables[c, 0], tables[c, 1], tables[c, 2]
        gap_slots, size_slots = slots[c, 0], slots[c, 1:]
        due, sign = pace[c, 0, 0], state[_NEXT + 2 * classes + c]
        while following < end:
            if small:
                second = first
            token = np.int64(size_slots[sign, second & (_ONE - 1)])
            at = GAPS + sign * SIZES + token
            second, front = _refill(_step(second, frequencies[at], below[at]), data, front, small)
            counts[at] += _COUNT
            pace[c, 1 + sign, 0] -= 1
            if pace[c, 1 + sign, 0] == 0:
                _renew(tables, pace, slots, c, 1 + sign)
            if small:
                first = second
            sign, size = token & 1, token >> 1
            if size >= 4:
                state[_STATES], state[_FRONT] = first, front
                e = (size >> 1) - 1
                size = ((2 + (size & 1)) << e) | _raw(data, state, e, small)
                if small:
                    first, front = state[_STATES], state[_FRONT]
            places[n] = following + shift
            symbols[n] = -size - 1 if sign else size + 1
            n += 1
            following += 1
            if following < total:  # the gap to the next
                token = np.int64(gap_slots[first & (_ONE - 1)])
                first, front = _refill(_step(first, frequencies[token], below[token]), data, front, small)
                counts[token] += _COUNT
                due -= 1
                if due == 0:
                    due = _renew(tables, pace, slots, c, 0)
                gap = token - 1
                if gap >= 4:
                    state[_STATES], state[_FRONT] = first, front
                    e = (gap >> 1) - 1
                    gap = ((2 + (gap & 1)) << e) | _raw(data, state, e, small)
                    if small:
                        first, front = state[_STATES], state[_FRONT]
                following += gap
                if following >= total:
                    return -1
                if gap < 0:
                    following = total
        pace[c, 0, 0], state[_NEXT + c], state[_NEXT + 2 * classes + c] = due, following, sign
    state[_STATES], state[_STATES + 1], state[_FRONT] = first, second, front
    return n


@kernel
def decode_tails(data: Any, small: bool, state: Any, tables: Any, pace: Any, slots: Any, wanted: Any, tails: Any) -> bool:
    """Decode a number for each wanted context, the others stay; say whether the data were sound."""
    for row in range(wanted.size):
        if wanted[row]:
            number = _gap(data, small, state, tables, pace, slots, tables.shape[0] - 1)
            if number < 0:
                return False
            state[_BEFORE] += (number >> 1) if number & 1 == 0 else -((number + 1) >> 1)
            tails[row] = state[_BEFORE]
            if not 0 <= state[_BEFORE] <= MOST_TAIL:
                return False
    return True


def ended(data: Array, small: bool, state: Array) -> bool:
    """Say whether a decoder has read all of a code, and nothing else, and is where its encoder began."""
    if small:
        return int(state[_FRONT]) == data.size and int(state[_STATES]) == 1
    whole = int(state[_FRONT]) + int(state[_BACK]) == data.size
    return whole and int(state[_STATES]) == _LOW and int(state[_STATES + 1]) == _LOW and int(state[_HELD]) == 0
