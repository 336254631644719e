"""Mixed-radix words: how V symbols with different numbers of levels fill a given number of bytes.

A budget of 2.37 bits per coordinate means five levels here and six there. Symbols are digits of 16-bit
words: a word is the fraction x / 2^16, and multiplying by the radix brings the next digit over the point, so a
decoder needs one multiplication a digit. Words lie side by side as *lanes*: digit d of lane s of a group is
coordinate start + d * lanes + s, so that loops over lanes are contiguous. An odd byte is one word of 8 bits. A symbol
may have `low` raw bits beside its digit; they lie in *planes* of 8, 4, 2 or 1 bits a coordinate.

The layout follows from (V, bytes) alone, in integer arithmetic: both ends compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.types import Ints

    Bytes = npt.NDArray[np.uint8]

WORD = 16
MAX_RADIX = 256
MAX_LOW = 8
MAX_LEVELS = 1 << 15
_UNIT = 1 << 40  # distortion is counted in integers, so that no float decides a layout
_PLANE_COST = 64  # a plane takes time: it must bring 1/64 of the distortion


@dataclass(frozen=True, slots=True)
class Group:
    """Lay out `lanes` words of `width` bits, each with the digits `radices`: coordinates from `start`, bytes from `at`.

    A word's bytes lie in planes too: the lower byte of every lane, then the upper one.
    """

    start: int
    lanes: int
    width: int
    radices: tuple[int, ...]
    at: int

    @property
    def stop(self) -> int:
        """Return the coordinate after the last one."""
        return self.start + self.lanes * len(self.radices)


@dataclass(frozen=True, slots=True)
class Plane:
    """Lay out `width` raw bits of every symbol, `place` up: byte j from `at` holds coordinates j, j + length, ..."""

    width: int
    place: int
    at: int
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
def runs(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return how many levels coordinates have, in runs of coordinates that have the same: (levels, coordinates).

    >>> runs(layout(256, 75))
    ((5, 186), (4, 31), (7, 12), (6, 24), (7, 1), (6, 2))
    """
    found: list[tuple[int, int]] = []
    for group in layout.groups:
        for radix in group.radices:
            levels, count = radix << layout.low, group.lanes
            if found and found[-1][0] == levels:
                count += found.pop()[1]
            found.append((levels, count))
    return tuple(found)


def radices(width: int, digits: int, most: int = MAX_RADIX) -> tuple[int, ...]:
    """Choose `digits` radices whose product fits into `width` bits, as large and as equal as can be.

    >>> radices(9, 4), radices(16, 3), radices(2, 3)
    ((5, 5, 5, 4), (40, 40, 40), (2, 2, 1))
    """
    if digits == 0:
        return ()
    room = 1 << width
    base = min(int(2.0 ** (width / digits)) + 1, most)  # a guess from above; integers decide
    while base**digits > room:
        base -= 1
    chosen = [base] * digits
    product = base**digits
    raised = True
    while raised:  # raise digits one by one while the product still fits
        raised = False
        for d in range(digits):
            grown = product // chosen[d] * (chosen[d] + 1)
            if grown <= room and chosen[d] < most:
                product, raised = grown, True
                chosen[d] += 1
    return tuple(chosen)


def _most(low: int) -> int:
    return min(MAX_RADIX, MAX_LEVELS >> low)


@cache
def _cost(width: int, digits: int, low: int) -> int:
    """Return the distortion of a word, the sum of 1 / (N - 1)^2 over its digits; one level counts as four."""
    levels = (n << low for n in radices(width, digits, _most(low)))
    return sum(4 * _UNIT if n == 1 else _UNIT // (n - 1) ** 2 for n in levels)


def _digits_per_word(words: int, symbols: int, low: int) -> list[int]:
    """Split `symbols` over `words` full words at the least distortion.

    The cost of a word is not convex in its digits, so the best split mixes the two digit counts that span
    the mean on the lower convex hull; one word takes the remainder.
    """
    mean = symbols // words
    spans = [(a, b) for a in range(max(mean - 6, 0), mean + 1) for b in range(mean + 1, mean + 7)]
    # Cost of the mixture at the mean, times (b - a): compare as fractions, in integers.
    best, best_span = None, spans[0]
    for a, b in spans:
        over = symbols - a * words
        total = _cost(WORD, a, low) * ((b - a) * words - over) + _cost(WORD, b, low) * over
        if best is None or total * best[1] < best[0] * (b - a):
            best, best_span = (total, b - a), (a, b)
    a, b = best_span
    many, rest = divmod(symbols - a * words, b - a)
    counts = [b] * many + [a] * (words - many)
    if rest:
        counts[many] += rest
    return counts


def _with_low(vocab: int, size: int, low: int) -> tuple[Layout, int] | None:
    """Lay out with `low` raw bits; return the distortion too. None if the planes alone do not fit."""
    widths = [width for width in (8, 4, 2, 1) if low & width]
    lengths = [-(-vocab * width // 8) for width in widths]
    room = size - sum(lengths)
    if room < 0:
        return None
    words, odd = divmod(room, 2)
    in_odd = vocab if words == 0 else odd * vocab // room
    groups: list[Group] = []
    start = at = 0
    if words:
        counts = _digits_per_word(words, vocab - in_odd, low)
        edges = [i for i in range(words) if i == 0 or counts[i] != counts[i - 1]] + [words]
        for first, last in pairwise(edges):
            group = Group(start, last - first, WORD, radices(WORD, counts[first], _most(low)), at)
            groups.append(group)
            start, at = group.stop, at + 2 * group.lanes
    if odd:
        groups.append(Group(start, 1, 8, radices(8, in_odd, _most(low)), at))
    elif start < vocab:
        groups.append(Group(start, vocab - start, 0, (1,), at))  # no digits: all is in the planes
    planes, at, place = [], room, low
    for width, length in zip(widths, lengths, strict=True):
        place -= width
        planes.append(Plane(width, place, at, length))
        at += length
    cost = sum(group.lanes * _cost(group.width, len(group.radices), low) for group in groups)
    return Layout(vocab, size, low, tuple(groups), tuple(planes)), cost


@lru_cache(maxsize=256)
def layout(vocab: int, size: int) -> Layout:
    """Lay out `vocab` symbols in `size` bytes at the least distortion.

    >>> layout(256, 32).levels().tolist() == [2] * 256
    True
    >>> sorted(set(layout(256, 75).levels().tolist()))
    [4, 5, 6, 7]
    """
    found = [_with_low(vocab, size, low) for low in range(min(8 * size // vocab, MAX_LOW) + 1)]
    fitting = [pair for pair in found if pair is not None]
    return min(fitting, key=lambda pair: pair[1] * (_PLANE_COST + len(pair[0].planes)))[0]


def pack(symbols: Ints, layout: Layout) -> Bytes:
    """Write symbols [rows, V] as bytes [rows, size]."""
    rows = len(symbols)
    out = np.zeros((rows, layout.size), np.uint8)
    high = symbols >> layout.low
    for group in layout.groups:
        digits = high[:, group.start : group.stop].reshape(rows, len(group.radices), group.lanes)
        number, product = np.zeros((rows, group.lanes), np.int64), 1
        for d, radix in enumerate(group.radices):
            number = number * radix + digits[:, d]
            product *= radix
        word = -(-(number << group.width) // product)  # the least fraction that decodes to these digits
        for byte in range(group.width // 8):
            first = group.at + byte * group.lanes
            out[:, first : first + group.lanes] = word >> 8 * byte & 255
    for plane in layout.planes:
        raw = symbols >> plane.place & (1 << plane.width) - 1
        for i in range(8 // plane.width):
            part = raw[:, i * plane.length : (i + 1) * plane.length]
            out[:, plane.at : plane.at + part.shape[1]] |= (part << plane.width * i).astype(np.uint8)
    return out


def unpack(data: Bytes, layout: Layout) -> Ints:
    """Read symbols [rows, V] from bytes [rows, size]: whatever the bytes are, every symbol is below its levels."""
    rows = len(data)
    symbols = np.empty((rows, layout.vocab), np.int64)
    for group in layout.groups:
        word = np.zeros((rows, group.lanes), np.int64)
        for byte in range(group.width // 8):
            first = group.at + byte * group.lanes
            word |= data[:, first : first + group.lanes].astype(np.int64) << 8 * byte
        digits = symbols[:, group.start : group.stop].reshape(rows, len(group.radices), group.lanes)
        for d, radix in enumerate(group.radices):
            word = word * radix
            digits[:, d] = word >> group.width
            word &= (1 << group.width) - 1
        symbols[:, group.start : group.stop] = digits.reshape(rows, -1)
    symbols <<= layout.low
    for plane in layout.planes:
        bits = data[:, plane.at : plane.at + plane.length].astype(np.int64)
        for i in range(8 // plane.width):
            part = symbols[:, i * plane.length : (i + 1) * plane.length]
            part |= (bits[:, : part.shape[1]] >> plane.width * i & (1 << plane.width) - 1) << plane.place
    return symbols
