"""What the predictive codec's coders code: tokens, their tables, and how these adapt.

Symbols come in classes. Of each class only the symbols that are not zero are coded, each with its sign and size as one
token, and the gap to the next one as another: what is zero costs no time. A token stands for a number below four or for
half an octave; the bits below follow raw. Tables of a class's tokens are made anew from counts after 4 of them, after
8 more, and so on, at both ends alike: no table is ever sent. All in integers; docs/wire.md has the format.

Encoding takes two steps before the coder: `collect_symbols` quantizes and lists what is not zero, `model_tokens` turns
the list into *records*, one integer for each token, and counts their bits. `ans` writes records fast, `compact_ans` in
few bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs import prior
from fpld.kernels import inlined, kernel

if TYPE_CHECKING:
    from fpld.types import Array

CLASSES = prior.CLASSES + 1  # the last is for numbers of whole contexts
MAX_TAIL = 255
MAX_SYMBOL = (1 << 24) - 1
MAX_COORDINATES = 1 << 31
# Tokens of a table: gaps are "no more" and numbers below 2^31, sizes are numbers below 2^24 with their sign.
GAPS = 64
SIZES = 96
KINDS = 3  # of tables: gaps, sizes after a symbol above zero, sizes after one below
TOKENS = GAPS + 2 * SIZES

BITS = 12
ONE = 1 << BITS  # what the frequencies of a table add up to
LOW = 1 << 16  # the least state of a coder
COUNT = 4  # what a token adds to its count
_FIRST_PERIOD = 4  # tokens after which a table is made anew for the first time
_LONGEST_PERIOD = 2048
_MAX_COUNTS = 1 << 14  # of a table: beyond it all are halved
_NEAR_GAPS = 24  # tokens of gaps that a table begins with
_SMALL_SIZES = (5, 5, 3, 3, 2, 2, 1, 1, 1, 1)  # counts of sizes that it begins with
_LEARNT_COUNTS = 192  # that a table begins with where an earlier round has taught it
COST = -np.log2(np.maximum(np.arange(ONE + 1), 0.5) / ONE)  # bits, by frequency

# What the tokens of gaps stand for, and how many raw bits follow; the first says that no more come.
_GAP_BUCKETS = np.arange(GAPS) - 1
RAW_BITS = np.where(_GAP_BUCKETS < 4, 0, (_GAP_BUCKETS >> 1) - 1)
NUMBERS = np.where(_GAP_BUCKETS < 4, _GAP_BUCKETS, (2 + (_GAP_BUCKETS & 1)) << RAW_BITS)

# Rows of `TokenModels.tables` and columns of `TokenModels.pace`.
COUNTS = 0
FREQUENCIES = 1
BELOW = 2
DUE = 0
PERIOD = 1
SIZE = 2

# A record from its lowest bit: sum of frequencies before (12), frequency (13), whether it is a size (1), number of raw
# bits (6), and the raw bits.
FREQUENCY_SHIFT = 12
FREQUENCY_MASK = (1 << 13) - 1
KIND_SHIFT = 25
RAW_BITS_SHIFT = 26
RAW_BITS_MASK = 63
RAW_SHIFT = 32


class TokenModels(NamedTuple):
    """Tables of tokens, gaps and then sizes. Inner kernels take the arrays one by one: a tuple of them is slow.

    `tables` [class, 3, token] has counts, frequencies, and the sum of the frequencies before; `pace` [class, KINDS, 3]
    how many tokens are due till a table is made anew, the whole period, and the table's size; `slots` [class, KINDS,
    slot] the token of each slot, for a decoder.
    """

    tables: Array
    pace: Array
    slots: Array


class Scale(NamedTuple):
    """How y becomes a size: |y| inverse + rounding, cut off; from value number `cut` on with `coarse` and `lower`."""

    inverse: float
    rounding: float
    cut: int
    coarse: float
    lower: float


class SymbolList(NamedTuple):
    """Symbols that are not zero, in the coder's order, and the gaps between them.

    gaps[:classes] are those before the first symbols of each class, gaps[classes + i] comes after symbol i; -1 says
    that no more come. `ends` [block, class] says how many symbols come up to the end of a class of a block.
    """

    values: Array
    gaps: Array
    ends: Array


def _first_counts(learnt: Array | None, classes: int) -> Array:
    """Return the counts to begin with; if nothing was learnt, expect gaps of any size alike, and small symbols."""
    if learnt is not None:
        probabilities: Array = learnt.reshape(CLASSES, TOKENS).astype(np.int32)
        return (probabilities * _LEARNT_COUNTS + (1 << 15)) >> 16
    counts = np.zeros((classes, TOKENS), np.int32)
    counts[:, :_NEAR_GAPS] = 1
    for first in (GAPS, GAPS + SIZES):
        counts[:, first : first + len(_SMALL_SIZES)] = _SMALL_SIZES
    return counts


def new_models(totals: Array, largest: int, learnt: Array | None, decoder: bool) -> TokenModels:
    """Make models for `totals` coordinates in each class, and symbols up to `largest`; the last class is for tails.

    `learnt` is what `learnt_token_probabilities` returned in the round before, if anything. A `decoder` needs slots.
    """
    classes = totals.size
    models = TokenModels(
        np.zeros((classes, 3, TOKENS), np.int32),
        np.full((classes, KINDS, 3), _FIRST_PERIOD, np.int32),
        np.zeros((classes, KINDS, ONE if decoder else 0), np.uint8),
    )
    models.tables[:, COUNTS] = _first_counts(learnt, classes)
    _prepare(totals, largest, *models)
    return models


@kernel
def _prepare(totals: Any, largest: Any, tables: Any, pace: Any, slots: Any) -> None:
    """Make the first tables of each class that has coordinates, and of the tails; tails have no sizes."""
    last = totals.size - 1
    for c in range(last + 1):
        if totals[c] or c == last:
            pace[c, 0, SIZE] = bucket(totals[c] if c < last else 2 * MAX_TAIL + 1) + 2
            _make_table(tables, pace, slots, c, 0)
            for kind in range(1, KINDS if c < last else 1):
                pace[c, kind, SIZE] = 2 * (bucket(largest - 1) + 1)
                _make_table(tables, pace, slots, c, kind)


def learnt_token_probabilities(models: TokenModels) -> Array:
    """Return what models have learnt, for the next round to begin with: probabilities in 2^-16, none of them zero."""
    counts = models.tables[:, COUNTS].astype(np.int64)
    parts = np.split(counts, [GAPS, GAPS + SIZES], axis=1)
    shares = [(part << 16) // np.maximum(part.sum(axis=1, keepdims=True), 1) for part in parts]
    probabilities: Array = np.clip(np.concatenate(shares, axis=1), 1, 65535).astype(np.uint16).ravel()
    return probabilities


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
def _make_table(tables: Any, pace: Any, slots: Any, c: Any, kind: Any) -> None:
    """Make a table of frequencies from counts, in integers, none below one; the largest count takes what is left."""
    first = GAPS + (kind - 1) * SIZES if kind else 0
    n = pace[c, kind, SIZE]
    total = 0
    best = first
    for t in range(first, first + n):
        total += tables[c, COUNTS, t]
        if tables[c, COUNTS, t] > tables[c, COUNTS, best]:
            best = t
    assigned: Any = 0
    for t in range(first, first + n):
        count = np.int64(tables[c, COUNTS, t])
        frequency = np.int64(1)
        if count:
            frequency += count * (ONE - n) // total
        tables[c, FREQUENCIES, t] = frequency
        assigned += frequency
    tables[c, FREQUENCIES, best] += ONE - assigned
    at = 0
    row = slots[c, kind]
    for t in range(first, first + n):
        tables[c, BELOW, t] = at
        end = at + tables[c, FREQUENCIES, t]
        if row.size:
            row[at:end] = np.uint8(t - first)
        at = end
    if total > _MAX_COUNTS:
        for t in range(first, first + n):
            tables[c, COUNTS, t] >>= 1


@kernel
def renew_table(tables: Any, pace: Any, slots: Any, c: Any, kind: Any) -> Any:
    """Make a table anew; return how many tokens are due till the next time."""
    pace[c, kind, PERIOD] = min(2 * pace[c, kind, PERIOD], _LONGEST_PERIOD)
    pace[c, kind, DUE] = pace[c, kind, PERIOD]
    _make_table(tables, pace, slots, c, kind)
    return pace[c, kind, DUE]


@kernel
def collect_symbols(y: Any, rank: Any, dither: Any, starts: Any, totals: Any, scale: Any, symbols: Any) -> Any:
    """Quantize y; list what is not zero in `symbols`, and return how many.

    Class c of block b is y[starts[b, c] : starts[b, c + 1]]; `rank` says where in its class a value lies, others being
    zero; `dither` has y's size, or none; `totals` are the coordinates of each class.
    """
    inverse, rounding, cut, coarse, lower = scale
    values, gaps, ends = symbols
    n = 0
    classes = totals.size - 1
    last = np.full(classes, -1, np.int64)
    reached = np.full(classes, -1, np.int64)
    for b in range(starts.shape[0]):
        for c in range(classes):
            previous = last[c]
            at = reached[c]
            for i in range(starts[b, c], starts[b, c + 1]):
                shift = dither[i] if dither.size else 0.0
                scaled = y[i] * (inverse if i < cut else coarse) + shift
                size = abs(scaled) + (rounding if i < cut else lower)
                if size >= 1.0:
                    gaps[classes + previous if previous >= 0 else c] = rank[i] - at - 1
                    at = np.int64(rank[i])
                    previous = n
                    values[n] = min(np.int64(size), MAX_SYMBOL)
                    if scaled < 0:
                        values[n] = -values[n]
                    n += 1
            last[c] = previous
            reached[c] = at
            ends[b, c] = n
    for c in range(classes):
        gaps[classes + last[c] if last[c] >= 0 else c] = -1
    return n


@inlined
def count_token(tables: Any, pace: Any, slots: Any, at: Any, c: Any, kind: Any) -> None:
    """Count a token, `at` in its class's table, and make the table anew when that is due."""
    tables[c, COUNTS, at] += COUNT
    pace[c, kind, DUE] -= 1
    if pace[c, kind, DUE] == 0:
        renew_table(tables, pace, slots, c, kind)


@inlined
def pack_record(number: Any, raw_bits: Any, kind: Any, frequency: Any, below: Any) -> Any:
    """Return the record of a token: its place in the table, and the lowest `raw_bits` bits of its number."""
    raw = (number & ((1 << raw_bits) - 1)) << RAW_SHIFT | raw_bits << RAW_BITS_SHIFT
    return raw | kind << KIND_SHIFT | np.int64(frequency) << FREQUENCY_SHIFT | np.int64(below)


@kernel
def _record_number(tables: Any, pace: Any, slots: Any, records: Any, n: Any, c: Any, number: Any) -> Any:
    """Record a number of class c, apart from the others, and count it; return its frequency and its raw bits."""
    e = 0
    token = number + 1
    if number >= 4:
        token = bucket(number) + 1
        e = ((token - 1) >> 1) - 1
    frequency = np.int64(tables[c, FREQUENCIES, token])
    if records.size:
        records[n] = pack_record(number, e, 0, frequency, tables[c, BELOW, token])
    count_token(tables, pace, slots, token, c, 0)
    return frequency, e


@kernel
def model_tokens(
    symbols: Any, totals: Any, tails: Any, rows: Any, models: Any, records: Any, max_bits: Any, cost: Any
) -> Any:
    """Turn symbols into records of tokens, adapting the tables; return their bits and how many they are.

    `records` may be empty: then only the length is computed. It stops beyond `max_bits`. `tails` has a number for each
    context, negative if it is not to be coded, or is empty; `rows` [blocks + 1] says which contexts a block holds.
    """
    values, gaps, ends = symbols
    tables, pace, slots = models
    bits = 0.0
    raw = 0
    n = 0
    i = 0
    last_tail = np.int64(0)
    writes = records.size > 0
    classes = totals.size - 1
    left = totals.copy()
    signs = np.zeros(classes, np.int64)
    # The gap before the first symbol of each class.
    for c in range(classes):
        if left[c]:
            frequency, e = _record_number(tables, pace, slots, records, n, c, gaps[c])
            bits += cost[frequency]
            raw += e
            n += 1
            left[c] -= gaps[c]
    for b in range(ends.shape[0]):
        for c in range(classes):
            end = ends[b, c]
            rest = left[c]
            if i == end:
                continue
            counts = tables[c, COUNTS]
            frequencies = tables[c, FREQUENCIES]
            below = tables[c, BELOW]
            due_gap = pace[c, 0, DUE]
            sign = signs[c]
            while i < end:
                # The symbol's sign and size, in the table that the sign before it chooses.
                symbol = np.int64(values[i])
                number = abs(symbol) - 1
                e = 0
                token = number
                if number >= 4:
                    token = bucket(number)
                    e = (token >> 1) - 1
                after = sign
                sign = 1 if symbol < 0 else 0
                token = GAPS + after * SIZES + 2 * token + sign
                bits += cost[frequencies[token]]
                raw += e
                if writes:
                    records[n] = pack_record(number, e, 1, frequencies[token], below[token])
                n += 1
                counts[token] += COUNT
                pace[c, 1 + after, DUE] -= 1
                if pace[c, 1 + after, DUE] == 0:
                    renew_table(tables, pace, slots, c, 1 + after)
                # The gap to the next one, unless this was the class's last coordinate.
                rest -= 1
                if rest:
                    number = gaps[classes + i]
                    e = 0
                    rest -= number
                    token = number + 1
                    if number >= 4:
                        token = bucket(number) + 1
                        e = ((token - 1) >> 1) - 1
                    bits += cost[frequencies[token]]
                    raw += e
                    if writes:
                        records[n] = pack_record(number, e, 0, frequencies[token], below[token])
                    n += 1
                    counts[token] += COUNT
                    due_gap -= 1
                    if due_gap == 0:
                        due_gap = renew_table(tables, pace, slots, c, 0)
                i += 1
            left[c] = rest
            signs[c] = sign
            pace[c, 0, DUE] = due_gap
            if bits + raw > max_bits:
                return bits + raw, n
        if tails.size:
            for row in range(rows[b], rows[b + 1]):
                if tails[row] >= 0:
                    change = np.int64(tails[row]) - last_tail
                    number = 2 * change if change >= 0 else -2 * change - 1
                    frequency, e = _record_number(tables, pace, slots, records, n, classes, number)
                    bits += cost[frequency]
                    raw += e
                    n += 1
                    last_tail = np.int64(tails[row])
    return bits + raw, n
