"""What the predictive codec's coders code: tokens, their tables, and how these learn.

Symbols come in classes. Of each class only the symbols that are not zero are coded, each with its sign and size as one
token, and the gap to the next one as another: what is zero costs no time. A token stands for a number below four or for
half an octave; the bits below follow raw. Tables of a class's tokens are made anew from counts after 4 of them, after
8 more, and so on, at both ends alike: no table is ever sent. All in integers; docs/wire.md has the format.

`ans` writes and reads tokens fast, `small` in few bytes.
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

BITS = 12
ONE = 1 << BITS  # what the frequencies of a table add up to
LOW = 1 << 16  # the least state of a coder
_FIRST, _LONGEST = 4, 2048  # tokens after which a table is made anew
COUNT = 4  # what a token adds
_MOST = 1 << 14  # counts: beyond it all are halved
_NEAR_GAPS, _SMALL_SIZES = 24, (5, 5, 3, 3, 2, 2, 1, 1, 1, 1)  # what a table begins with: a guess
_LEARNT = 192  # counts that it begins with where an earlier round has taught it
COST = -np.log2(np.maximum(np.arange(ONE + 1), 0.5) / ONE)  # bits, by frequency

_GAP_OF = np.arange(GAPS) - 1  # what tokens stand for, and how many raw bits follow; the first: no more
EXTRA = np.where(_GAP_OF < 4, 0, (_GAP_OF >> 1) - 1)
NUMBER = np.where(_GAP_OF < 4, _GAP_OF, (2 + (_GAP_OF & 1)) << EXTRA)

Array = np.ndarray[Any, np.dtype[Any]]


class Models(NamedTuple):
    """Tables of tokens, gaps and then sizes. Kernels take the arrays one by one: a tuple of them is slow.

    `tables` [class, 3, token] has counts, frequencies, and the sum of the frequencies before; `pace` [class, KINDS, 3]
    how many tokens are to come till a table is made anew, how many these were, and how many tokens there are; `slots`
    [class, KINDS, slot] the token of each slot, for a decoder.
    """

    tables: Array
    pace: Array
    slots: Array


def first_counts(learnt: Array | None, classes: int) -> Array:
    """Return the counts to begin with; if nothing was learnt, expect gaps of any size alike, and small symbols."""
    if learnt is not None:
        shares: Array = learnt.reshape(CLASSES, TOKENS)[[*range(classes - 1), CLASSES - 1]].astype(np.int32)
        return (shares * _LEARNT + (1 << 15)) >> 16
    counts = np.zeros((classes, TOKENS), np.int32)
    counts[:, :_NEAR_GAPS] = 1
    for first in (GAPS, GAPS + SIZES):
        counts[:, first : first + len(_SMALL_SIZES)] = _SMALL_SIZES
    return counts


def new_models(totals: Array, largest: int, learnt: Array | None, decoder: bool) -> Models:
    """Make models for so many coordinates in each class, and symbols up to `largest`; the last class is for tails."""
    classes = totals.size
    models = Models(
        np.zeros((classes, 3, TOKENS), np.int32),
        np.full((classes, KINDS, 3), _FIRST, np.int32),
        np.zeros((classes, KINDS, ONE if decoder else 0), np.uint8),
    )
    models.tables[:, 0] = first_counts(learnt, classes)
    _prepare(totals, largest, *models)
    return models


@kernel
def _prepare(totals: Any, largest: Any, tables: Any, pace: Any, slots: Any) -> None:
    last = totals.size - 1
    for c in range(last + 1):
        if totals[c] or c == last:
            pace[c, 0, 2] = bucket(totals[c] if c < last else 2 * MOST_TAIL + 1) + 2
            _make(tables, pace, slots, c, 0)
            if c < last:
                limit_sizes(largest, tables, pace, slots, c)


@kernel
def limit_sizes(largest: Any, tables: Any, pace: Any, slots: Any, c: Any) -> None:
    """Make a class's tables of sizes for symbols up to `largest`."""
    for kind in range(1, KINDS):
        pace[c, kind, 2] = 2 * (bucket(largest - 1) + 1)
        _make(tables, pace, slots, c, kind)


def learnt_by(models: Models) -> Array:
    """Return what models have learnt, for the next round to begin with: probabilities in 2^-16, none of them zero."""
    counts = models.tables[:, 0].astype(np.int64)
    parts = np.split(counts, [GAPS, GAPS + SIZES], axis=1)
    shares = [(part << 16) // np.maximum(part.sum(axis=1, keepdims=True), 1) for part in parts]
    found: Array = np.clip(np.concatenate(shares, axis=1), 1, 65535).astype(np.uint16).ravel()
    return found


@kernel
def bucket(number: Any) -> Any:
    """Return the token of a number."""
    if number < 4:
        return number
    e = 2
    while number >> (e + 1):
        e += 1
    return 2 * e + ((number >> (e - 1)) & 1)


@kernel
def _make(tables: Any, pace: Any, slots: Any, c: Any, kind: Any) -> None:
    """Make a table from counts: in integers, no frequency below one."""
    first, n = (GAPS + (kind - 1) * SIZES if kind else 0), pace[c, kind, 2]
    total, best = 0, first
    for t in range(first, first + n):
        total += tables[c, 0, t]
        if tables[c, 0, t] > tables[c, 0, best]:
            best = t
    given: Any = 0
    for t in range(first, first + n):
        count, frequency = np.int64(tables[c, 0, t]), np.int64(1)
        if count:
            frequency += count * (ONE - n) // total
        tables[c, 1, t] = frequency
        given += frequency
    tables[c, 1, best] += ONE - given
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
def renew(tables: Any, pace: Any, slots: Any, c: Any, kind: Any) -> Any:
    """Make a table anew; return how many tokens are to come till the next time."""
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
    inverse: Any,
    rounding: Any,
    cut: Any,
    coarse: Any,
    lower: Any,
    symbols: Any,
    gaps: Any,
    ends: Any,
) -> Any:
    """Quantize; list what is not zero: its symbol, and the gap after it. Return how many.

    Class c of block b is y[starts[b, c] : starts[b, c + 1]]; `rank` says where in its class a value lies, others being
    zero; `dither` has y's size, or none. gaps[:classes] are those before the first symbols, -1 says that no more come;
    `ends` [blocks, classes] says how many symbols come up to the end of a class of a block. From value number `cut` on
    `coarse` and `lower` take the place of `inverse` and `rounding`.
    """
    n = 0
    classes = totals.size - 1
    last, reached = np.full(classes, -1, np.int64), np.full(classes, -1, np.int64)
    for b in range(starts.shape[0]):
        for c in range(classes):
            before, at = last[c], reached[c]
            for i in range(starts[b, c], starts[b, c + 1]):
                shift = dither[i] if dither.size else 0.0
                scaled = y[i] * (inverse if i < cut else coarse) + shift
                size = abs(scaled) + (rounding if i < cut else lower)
                if size >= 1.0:
                    gaps[classes + before if before >= 0 else c] = rank[i] - at - 1
                    at, before = np.int64(rank[i]), n
                    symbols[n] = min(np.int64(size), LARGEST)
                    if scaled < 0:
                        symbols[n] = -symbols[n]
                    n += 1
            last[c], reached[c] = before, at
            ends[b, c] = n
    for c in range(classes):
        gaps[classes + last[c] if last[c] >= 0 else c] = -1
    return n


@inlined
def note(tables: Any, pace: Any, slots: Any, at: Any, c: Any, kind: Any) -> None:
    """Count a token, `at` in its class's table."""
    tables[c, 0, at] += COUNT
    pace[c, kind, 0] -= 1
    if pace[c, kind, 0] == 0:
        renew(tables, pace, slots, c, kind)


@kernel
def _record(tables: Any, pace: Any, slots: Any, records: Any, n: Any, c: Any, number: Any) -> Any:
    """Record a number of class c, apart from the others; learn it, return the index of its bits' cost."""
    e, token = 0, number + 1
    if number >= 4:
        token = bucket(number) + 1
        e = ((token - 1) >> 1) - 1
    frequency = np.int64(tables[c, 1, token])
    if records.size:
        records[n] = (number & ((1 << e) - 1)) << 32 | e << 26 | frequency << 12 | np.int64(tables[c, 2, token])
    note(tables, pace, slots, token, c, 0)
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
    most: Any,
    cost: Any,
) -> Any:
    """Turn symbols into records of tokens, learning on the way; return their bits and how many they are.

    `records` may be empty: then this tells the length alone. It stops beyond `most` bits. `tails` has a number for each
    context, negative if it is not to be coded, or is empty; `rows` [blocks + 1] says which contexts a block holds.
    """
    bits, raw, n, i, before = 0.0, 0, 0, 0, np.int64(0)
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
                counts[token] += COUNT
                pace[c, 1 + after, 0] -= 1
                if pace[c, 1 + after, 0] == 0:
                    renew(tables, pace, slots, c, 1 + after)
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
                    counts[token] += COUNT
                    due_gap -= 1
                    if due_gap == 0:
                        due_gap = renew(tables, pace, slots, c, 0)
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
