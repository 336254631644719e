"""Mixed-radix words: how V symbols with different numbers of levels fill a given number of bits.

A budget of 2.37 bits per coordinate means five levels here and six there. Symbols are digits of 24-bit
words: a word is the fraction x / 2^24, and multiplying by the radix brings the next digit over the point, so a
decoder needs one multiplication a digit. Words lie side by side as *lanes*: digit d of lane s of a group is
coordinate start + d * lanes + s, so that loops over lanes are contiguous. What does not fill a word of 24 bits
goes to one shorter word. Above four bits a symbol is a digit plus raw low bits.

The layout follows from (V, bits) alone, in integer arithmetic: both ends compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fpld.errors import FrameError

if TYPE_CHECKING:
    from fpld.types import Ints

WORD = 24
RADIX_BITS = 3  # with more whole bits than this per coordinate, the rest are raw low bits
MAX_LOW = 13
_UNIT = 1 << 40  # distortion is counted in integers, so that no float decides a layout


@dataclass(frozen=True, slots=True)
class Group:
    """Lay out `lanes` words of `width` bits, each with the digits `radices`, from coordinate `start`."""

    start: int
    lanes: int
    width: int
    radices: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Give the coordinate after the last one."""
        return self.start + self.lanes * len(self.radices)


@dataclass(frozen=True, slots=True)
class Layout:
    """Lay out one context: groups of words, then `low` raw bits for each of `vocab` coordinates."""

    vocab: int
    bits: int
    low: int
    groups: tuple[Group, ...]

    def levels(self) -> Ints:
        """Give the number of levels of each coordinate, [V]."""
        radices = [np.repeat(group.radices, group.lanes) for group in self.groups]
        return np.concatenate(radices).astype(np.int64) << self.low


def radices(width: int, digits: int) -> tuple[int, ...]:
    """Choose `digits` radices whose product fits into `width` bits, as large and as equal as can be.

    >>> radices(9, 4), radices(24, 5), radices(2, 3)
    ((5, 5, 5, 4), (28, 28, 28, 28, 27), (2, 2, 1))
    """
    if digits == 0:
        return ()
    room = 1 << width
    base = int(2.0 ** (width / digits)) + 1  # a guess from above; integers decide
    while base**digits > room:
        base -= 1
    chosen = [base] * digits
    product = base**digits
    raised = True
    while raised:  # raise digits one by one while the product still fits
        raised = False
        for d in range(digits):
            grown = product // chosen[d] * (chosen[d] + 1)
            if grown <= room:
                product, raised = grown, True
                chosen[d] += 1
    return tuple(chosen)


@cache
def _cost(width: int, digits: int) -> int:
    """Give the distortion of a word, the sum of 1 / (N - 1)^2 over its digits; one level counts as four."""
    return sum(4 * _UNIT if n == 1 else _UNIT // (n - 1) ** 2 for n in radices(width, digits))


def _digits_per_word(words: int, symbols: int) -> list[int]:
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
        total = _cost(WORD, a) * ((b - a) * words - over) + _cost(WORD, b) * over
        if best is None or total * best[1] < best[0] * (b - a):
            best, best_span = (total, b - a), (a, b)
    a, b = best_span
    many, rest = divmod(symbols - a * words, b - a)
    counts = [b] * many + [a] * (words - many)
    if rest:
        counts[many] += rest
    return counts


@lru_cache(maxsize=64)
def layout(vocab: int, bits: int) -> Layout:
    """Lay out `vocab` symbols in exactly `bits` bits (or fewer, where more would be of no use).

    >>> layout(256, 256).levels().tolist() == [2] * 256
    True
    >>> sorted(set(layout(256, 600).levels().tolist()))
    [4, 5, 6, 7]
    """
    low = min(max(bits // vocab - RADIX_BITS, 0), MAX_LOW)
    words, tail = divmod(bits - low * vocab, WORD)
    in_tail = vocab if words == 0 else tail * vocab // (bits - low * vocab)
    groups: list[Group] = []
    start = 0
    if words:
        counts = _digits_per_word(words, vocab - in_tail)
        edges = [i for i in range(words) if i == 0 or counts[i] != counts[i - 1]] + [words]
        for first, last in pairwise(edges):
            group = Group(start, last - first, WORD, radices(WORD, counts[first]))
            groups.append(group)
            start = group.stop
    groups.append(Group(start, 1, tail, radices(tail, in_tail)))
    return Layout(vocab, bits, low, tuple(groups))


def pack(symbols: Ints, plan: Layout) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Write symbols [rows, V] as bits [rows, bits], most significant first (one byte a bit)."""
    rows = len(symbols)
    high = symbols >> plan.low
    parts = []
    for group in plan.groups:
        digits = high[:, group.start : group.stop].reshape(rows, len(group.radices), group.lanes)
        number, product = np.zeros((rows, group.lanes), np.int64), 1
        for d, radix in enumerate(group.radices):
            number = number * radix + digits[:, d]
            product *= radix
        word = -(-(number << group.width) // product)  # the least fraction that decodes to these digits
        parts.append(_to_bits(word, group.width))
    parts.append(_to_bits(symbols & ((1 << plan.low) - 1), plan.low))
    return np.concatenate(parts, axis=1)


def unpack(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], plan: Layout) -> Ints:
    """Read symbols [rows, V] from bits [rows, bits]; a word that no encoder writes is refused."""
    rows = len(bits)
    symbols = np.empty((rows, plan.vocab), np.int64)
    position = 0
    for group in plan.groups:
        end = position + group.lanes * group.width
        word = _from_bits(bits[:, position:end], group.lanes, group.width)
        digits = symbols[:, group.start : group.stop].reshape(rows, len(group.radices), group.lanes)
        product = 1
        for d, radix in enumerate(group.radices):
            word = word * radix
            digits[:, d] = word >> group.width
            word &= (1 << group.width) - 1
            product *= radix
        # What is left of the least fraction is below the product of the radices; of no other one it is.
        if (word >= product).any():
            raise FrameError("payload holds a word that no encoder writes")
        symbols[:, group.start : group.stop] = digits.reshape(rows, -1)
        position = end
    low = _from_bits(bits[:, position : position + plan.vocab * plan.low], plan.vocab, plan.low)
    return (symbols << plan.low) | low


def _to_bits(words: Ints, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    shifts = np.arange(width - 1, -1, -1)
    return ((words[:, :, None] >> shifts) & 1).astype(np.uint8).reshape(len(words), -1)


def _from_bits(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], count: int, width: int) -> Ints:
    weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
    return bits.reshape(len(bits), count, width).astype(np.int64) @ weights
