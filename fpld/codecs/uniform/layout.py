"""How a uniform payload is laid out: the contexts' ranges, their shares of bytes, and the symbols within a share.

**Shares.** Without a clip the payload begins with each context's centre and half-range. The bytes after that are
divided equally over the contexts; the first ones take a byte more, so that none is lost.

**Mixed-radix words.** V symbols with different numbers of levels fill a context's bytes: a budget of 2.37 bits per
coordinate means five levels here and six there. Symbols are digits of 16-bit words. A word is the fraction x / 2^16,
and multiplying by the radix brings the next digit over the point, so a decoder needs one multiplication a digit. Words
lie side by side as *lanes*: digit d of lane s of a group is coordinate start + d * lanes + s, so that loops over lanes
are contiguous. An odd byte is one word of 8 bits. A symbol may have `low` raw bits beside its digit; they lie in
*planes* of 8, 4, 2 or 1 bits a coordinate.

The layout follows from (V, bytes) alone, in integer arithmetic: both ends compute the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.codecs.base import MAX_LOGIT
from fpld.errors import BudgetError, FrameError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.types import Bytes, Floats, Ints, Plan

MAX_BITS = 15  # per coordinate: beyond this a float32 logit has little more to say
RANGE_BYTES = 4  # centre and half-range of a context
WORD = 16
MAX_RADIX = 256
MAX_LOW = 8
MAX_LEVELS = 1 << 15
_DISTORTION_UNIT = 1 << 40  # distortion is counted in integers, so that no float decides a layout
_PLANE_COST = 64  # a plane takes time: it must bring 1/64 of the distortion
_BLOCK_COORDINATES = 1 << 20  # worked on at a time


@dataclass(frozen=True, slots=True)
class Group:
    """Lay out `lanes` words of `width` bits, each with the digits `radices`.

    Coordinates begin at `start`, bytes at `offset`. A word's bytes lie in planes too: the lower byte of every lane,
    then the upper one.
    """

    start: int
    lanes: int
    width: int
    radices: tuple[int, ...]
    offset: int

    @property
    def stop(self) -> int:
        """Return the coordinate after the last one."""
        return self.start + self.lanes * len(self.radices)


@dataclass(frozen=True, slots=True)
class Plane:
    """Lay out `width` raw bits of every symbol, `place` up: byte offset + j holds coordinates j, j + length, ..."""

    width: int
    place: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Lay out one context in `size` bytes: groups of words, then planes of `low` raw bits in all."""

    vocab: int
    size: int
    low: int
    groups: tuple[Group, ...]
    planes: tuple[Plane, ...]

    def levels(self) -> Ints:
        """Return the number of levels of each coordinate, [V]."""
        radices = [np.repeat(group.radices, group.lanes) for group in self.groups]
        return np.concatenate(radices).astype(np.int64) << self.low


@lru_cache(maxsize=256)
def level_runs(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return the runs of coordinates with the same number of levels, as pairs (levels, coordinates).

    >>> level_runs(make_layout(256, 75))
    ((5, 186), (4, 31), (7, 12), (6, 24), (7, 1), (6, 2))
    """
    runs: list[tuple[int, int]] = []
    for group in layout.groups:
        for radix in group.radices:
            levels = radix << layout.low
            count = group.lanes
            if runs and runs[-1][0] == levels:
                count += runs.pop()[1]
            runs.append((levels, count))
    return tuple(runs)


def radices(width: int, digits: int, largest: int = MAX_RADIX) -> tuple[int, ...]:
    """Choose `digits` radices whose product fits into `width` bits, as large and as equal as can be.

    >>> radices(9, 4), radices(16, 3), radices(2, 3)
    ((5, 5, 5, 4), (40, 40, 40), (2, 2, 1))
    """
    if digits == 0:
        return ()
    room = 1 << width
    base = min(int(2.0 ** (width / digits)) + 1, largest)  # a guess from above; integers decide
    while base**digits > room:
        base -= 1
    chosen = [base] * digits
    product = base**digits
    raised = True
    # Raise the radices one by one while their product still fits.
    while raised:
        raised = False
        for d in range(digits):
            grown = product // chosen[d] * (chosen[d] + 1)
            if grown <= room and chosen[d] < largest:
                product = grown
                raised = True
                chosen[d] += 1
    return tuple(chosen)


def _max_radix(low: int) -> int:
    return min(MAX_RADIX, MAX_LEVELS >> low)


@cache
def _cost(width: int, digits: int, low: int) -> int:
    """Return the distortion of a word, the sum of 1 / (N - 1)^2 over its digits; one level counts as four."""
    levels = (n << low for n in radices(width, digits, _max_radix(low)))
    return sum(4 * _DISTORTION_UNIT if n == 1 else _DISTORTION_UNIT // (n - 1) ** 2 for n in levels)


def _digits_per_word(words: int, symbols: int, low: int) -> list[int]:
    """Split `symbols` over `words` full words at the least distortion.

    The cost of a word is not convex in its digits, so the best split mixes the two digit counts that span
    the mean on the lower convex hull; one word takes the remainder.
    """
    mean = symbols // words
    spans = [(a, b) for a in range(max(mean - 6, 0), mean + 1) for b in range(mean + 1, mean + 7)]
    # Cost of the mixture at the mean, times (b - a): compare as fractions, in integers.
    best = None
    best_span = spans[0]
    for a, b in spans:
        over = symbols - a * words
        total = _cost(WORD, a, low) * ((b - a) * words - over) + _cost(WORD, b, low) * over
        if best is None or total * best[1] < best[0] * (b - a):
            best = (total, b - a)
            best_span = (a, b)
    a, b = best_span
    many, rest = divmod(symbols - a * words, b - a)
    counts = [b] * many + [a] * (words - many)
    if rest:
        counts[many] += rest
    return counts


def _with_low(vocab: int, size: int, low: int) -> tuple[Layout, int] | None:
    """Return the layout with `low` raw bits and its distortion, or None if the planes alone do not fit."""
    widths = [width for width in (8, 4, 2, 1) if low & width]
    lengths = [-(-vocab * width // 8) for width in widths]
    room = size - sum(lengths)
    if room < 0:
        return None
    words, odd = divmod(room, 2)
    in_odd = vocab if words == 0 else odd * vocab // room
    groups: list[Group] = []
    start = offset = 0
    if words:
        counts = _digits_per_word(words, vocab - in_odd, low)
        edges = [i for i in range(words) if i == 0 or counts[i] != counts[i - 1]] + [words]
        for first, last in pairwise(edges):
            group = Group(start, last - first, WORD, radices(WORD, counts[first], _max_radix(low)), offset)
            groups.append(group)
            start = group.stop
            offset += 2 * group.lanes
    if odd:
        groups.append(Group(start, 1, 8, radices(8, in_odd, _max_radix(low)), offset))
    elif start < vocab:
        groups.append(Group(start, vocab - start, 0, (1,), offset))  # no digits: all is in the planes
    planes = []
    offset = room
    place = low
    for width, length in zip(widths, lengths, strict=True):
        place -= width
        planes.append(Plane(width, place, offset, length))
        offset += length
    cost = sum(group.lanes * _cost(group.width, len(group.radices), low) for group in groups)
    return Layout(vocab, size, low, tuple(groups), tuple(planes)), cost


@lru_cache(maxsize=256)
def make_layout(vocab: int, size: int) -> Layout:
    """Lay out `vocab` symbols in `size` bytes at the least distortion.

    >>> make_layout(256, 32).levels().tolist() == [2] * 256
    True
    >>> sorted(set(make_layout(256, 75).levels().tolist()))
    [4, 5, 6, 7]
    """
    candidates = [_with_low(vocab, size, low) for low in range(min(8 * size // vocab, MAX_LOW) + 1)]
    fitting = [pair for pair in candidates if pair is not None]
    return min(fitting, key=lambda pair: pair[1] * (_PLANE_COST + len(pair[0].planes)))[0]


def pack_symbols(symbols: Ints, layout: Layout) -> Bytes:
    """Write symbols [rows, V] as bytes [rows, size]."""
    rows = len(symbols)
    out = np.zeros((rows, layout.size), np.uint8)
    high = symbols >> layout.low
    for group in layout.groups:
        digits = high[:, group.start : group.stop].reshape(rows, len(group.radices), group.lanes)
        number = np.zeros((rows, group.lanes), np.int64)
        product = 1
        for d, radix in enumerate(group.radices):
            number = number * radix + digits[:, d]
            product *= radix
        word = -(-(number << group.width) // product)  # the least fraction that decodes to these digits
        for byte in range(group.width // 8):
            first = group.offset + byte * group.lanes
            out[:, first : first + group.lanes] = word >> 8 * byte & 255
    for plane in layout.planes:
        raw = symbols >> plane.place & (1 << plane.width) - 1
        for i in range(8 // plane.width):
            part = raw[:, i * plane.length : (i + 1) * plane.length]
            out[:, plane.offset : plane.offset + part.shape[1]] |= (part << plane.width * i).astype(np.uint8)
    return out


def unpack_symbols(data: Bytes, layout: Layout) -> Ints:
    """Read symbols [rows, V] from bytes [rows, size]: whatever the bytes are, every symbol is below its levels."""
    rows = len(data)
    symbols = np.empty((rows, layout.vocab), np.int64)
    for group in layout.groups:
        word = np.zeros((rows, group.lanes), np.int64)
        for byte in range(group.width // 8):
            first = group.offset + byte * group.lanes
            word |= data[:, first : first + group.lanes].astype(np.int64) << 8 * byte
        digits = symbols[:, group.start : group.stop].reshape(rows, len(group.radices), group.lanes)
        for d, radix in enumerate(group.radices):
            word = word * radix
            digits[:, d] = word >> group.width
            word &= (1 << group.width) - 1
        symbols[:, group.start : group.stop] = digits.reshape(rows, -1)
    symbols <<= layout.low
    for plane in layout.planes:
        bits = data[:, plane.offset : plane.offset + plane.length].astype(np.int64)
        for i in range(8 // plane.width):
            part = symbols[:, i * plane.length : (i + 1) * plane.length]
            part |= (bits[:, : part.shape[1]] >> plane.width * i & (1 << plane.width) - 1) << plane.place
    return symbols


class PayloadLayout(NamedTuple):
    """Lay out a payload: `range_bytes`, then the contexts; the first `longer` of them have the first layout.

    The others have the second one, which is a byte shorter.
    """

    range_bytes: int
    longer: int
    layouts: tuple[Layout, Layout]

    def offset(self, row: int) -> int:
        """Return the byte where a context begins."""
        size = self.layouts[1].size
        return self.range_bytes + row * size + min(row, self.longer)

    def blocks(self, rows: range) -> Iterator[tuple[Layout, range]]:
        """Cut rows into blocks of one layout that are small enough to work on."""
        for layout, first, last in ((self.layouts[0], 0, self.longer), (self.layouts[1], self.longer, rows.stop)):
            stride = max(_BLOCK_COORDINATES // layout.vocab, 1)
            for start in range(max(first, rows.start), min(last, rows.stop), stride):
                yield layout, range(start, min(start + stride, last, rows.stop))


def least_bits(plan: Plan) -> float:
    """Return the least budget in bits per probe context: a bit per coordinate, and a context's own range."""
    return float(plan.vocab if plan.clip is not None else plan.vocab + 8 * RANGE_BYTES + 8)


def payload_bytes(plan: Plan) -> int:
    """Return the exact length of a payload: the whole bytes of the budget, less what could be of no use."""
    if plan.bits < plan.vocab:
        raise BudgetError(
            f"bits must be at least {plan.vocab} per probe context (one bit per coordinate) for the uniform "
            f"codec, got {plan.bits:g}"
        )
    ranges = range_bytes(plan)
    if ranges and (plan.budget_bytes - ranges) * 8 < plan.contexts * plan.vocab:
        raise BudgetError(
            f"bits must be at least {least_bits(plan):g} per probe context without a clip "
            f"(each context states its own range in {8 * RANGE_BYTES} bits), got {plan.bits:g}; "
            "raise bits, or set clip"
        )
    return min(plan.budget_bytes, ranges + math.ceil(plan.contexts * plan.vocab * MAX_BITS / 8))


def check_payload_size(payload: bytes | memoryview, plan: Plan) -> None:
    """Raise `FrameError` unless a payload has the length that follows from the plan."""
    size = payload_bytes(plan)
    if len(payload) != size:
        raise FrameError(f"payload must be {size} bytes under this plan, got {len(payload)}")


def range_bytes(plan: Plan) -> int:
    """Return the bytes of all contexts' ranges: none with a clip."""
    return 0 if plan.clip is not None else RANGE_BYTES * plan.contexts


def payload_layout(plan: Plan, size: int) -> PayloadLayout:
    """Return the layout of a payload of `size` bytes."""
    return _payload_layout(plan.contexts, plan.vocab, range_bytes(plan), size)


@lru_cache(maxsize=1024)
def _payload_layout(contexts: int, vocab: int, ranges: int, size: int) -> PayloadLayout:
    share, longer = divmod(size - ranges, contexts)
    return PayloadLayout(ranges, longer, (make_layout(vocab, share + bool(longer)), make_layout(vocab, share)))


def read_ranges(payload: bytes | memoryview, plan: Plan, rows: range) -> tuple[Floats, Floats]:
    """Return centre and half-range of contexts; raise `FrameError` for what no encoder writes."""
    if plan.clip is not None:
        return np.zeros(len(rows)), np.full(len(rows), plan.clip)
    pairs = np.frombuffer(payload, "<f2", 2 * len(rows), RANGE_BYTES * rows.start).reshape(-1, 2).astype(np.float64)
    if not np.isfinite(pairs).all() or (pairs[:, 1] < 0).any():
        raise FrameError("payload states a range that is not a finite, non-negative number")
    # Half of the largest logit, since dither takes values up to as far again beyond the range: with two levels the step
    # is all of it. A sixty-fourth more: centre and half-range are rounded to float16.
    if len(pairs) and (np.abs(pairs[:, 0]) + pairs[:, 1]).max() > MAX_LOGIT / 2 * (1 + 1 / 64):
        raise FrameError(f"payload states a range that reaches beyond ±{MAX_LOGIT / 2:g}")
    return pairs[:, 0], pairs[:, 1]
