"""Which coordinates of a context to look at: all candidates and few others, at the speed of memory.

Nearly all tokens of a large vocabulary are neither candidates nor change. The loops run over integers of 16 bits and
vectorise; what they mark is looked at again, one by one, so only what they leave out must be right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fpld.codecs.dither import GOLDEN, MIX_1, MIX_2
from fpld.codecs.samples.draws import uppers
from fpld.compiled import available, bare

Array = np.ndarray[Any, np.dtype[Any]]
_HIGH = np.float32((1 << 16) - 1.5)  # of upper halves: one is in question, and float32 is exact to a small part of one
LANES = 4096  # tokens at a time: what the loops touch stays in the first cache


class Scratch(NamedTuple):
    """Hold what sifting a context needs: its words, the same as halves, marks, the same by eight, and two lists."""

    words: Array
    halves: Array
    marks: Array
    eights: Array
    some: Array
    places: Array

    @classmethod
    def make(cls, vocab: int) -> Scratch:
        """Make room for a vocabulary."""
        words, marks = np.zeros(-(-vocab // 2), "<u4"), np.zeros(-(-vocab // 8) * 8, np.uint8)
        lists = np.empty(LANES // 8 + 1, np.int32), np.empty(LANES + 8, np.int32)
        return cls(words, words.view("<u2"), marks, marks.view(np.uint64), *lists)


def sift_reference(
    key: Any, prior: Any, chances: Any, at: Any, first: Any, last: Any, scale: Any, sieve: Any, scratch: Any
) -> int:
    """List the tokens to look at in `scratch.places`; return how many. NumPy's version of `sift`."""
    upper = uppers(key, last)[first:]
    scratch.halves[first:last] = upper
    own, folded = prior[at + first : at + last], upper * np.uint16(sieve.slots % (1 << 16))
    found = own > sieve.always
    for k in range(3):
        found |= (own > sieve.above[k]) & (folded + sieve.reach[k] <= sieve.width[k])
    if chances.size:
        found |= chances[first:last] * np.float32(scale) + upper.astype(np.float32) >= _HIGH
    listed = first + np.flatnonzero(found)
    scratch.places[: listed.size] = listed
    return int(listed.size)


if available():
    from numba import float32, int16, uint16, uint32, uint64

    _GOLDEN, _MIX_1, _MIX_2 = np.uint32(GOLDEN), np.uint32(MIX_1), np.uint32(MIX_2)

    @bare
    def _halves(key: Any, words: Any, first: Any, last: Any) -> None:
        """Fill words from number `first` on: `fpld.codecs.dither.mix`."""
        counter, b, c, low = uint32(key[0] + uint32(uint32(first) * _GOLDEN)), key[1], key[2], uint32(key[4])
        high = uint32(low << uint32(16))
        for j in range(uint64(first), uint64(last)):
            h = uint32(counter ^ (counter >> uint32(16)))
            counter = uint32(counter + _GOLDEN)
            h = uint32(h * _MIX_1)
            h ^= b
            h ^= h >> uint32(15)
            h = uint32(h * _MIX_2)
            h = uint32(h + c)
            h ^= h >> uint32(15)
            words[j] = uint32((h & uint32(0xFFFF0000)) + high) | (uint32(h + low) & uint32(0xFFFF))

    @bare
    def _mark(prior: Any, at: Any, first: Any, last: Any, sieve: Any, halves: Any, marks: Any) -> None:
        above, reach, width, slots = sieve.above, sieve.reach, sieve.width, uint16(sieve.slots)
        limit, t0, t1 = int16(sieve.always), int16(above[0]), int16(above[1])
        r0, r1, r2 = uint16(reach[0]), uint16(reach[1]), uint16(reach[2])
        w0, w1, w2 = uint16(width[0]), uint16(width[1]), uint16(width[2])
        at = uint64(at)
        for v in range(uint64(first), uint64(last)):
            p, x = prior[at + v], uint16(halves[v] * slots)
            marks[v] = (
                (uint16(x + r2) <= w2)
                | ((p > t1) & (uint16(x + r1) <= w1))
                | ((p > t0) & (uint16(x + r0) <= w0))
                | (p > limit)
            )

    @bare
    def _mark_changes(chances: Any, first: Any, last: Any, scale: Any, halves: Any, marks: Any) -> None:
        scale = float32(scale)
        for v in range(uint64(first), uint64(last)):
            marks[v] |= chances[v] * scale + float32(halves[v]) >= _HIGH

    @bare
    def _list(marks: Any, eights: Any, first: Any, last: Any, some: Any, places: Any) -> Any:
        """List what is marked, without a branch that depends on it."""
        n, count = uint64(0), uint64(0)
        for j in range(uint64(first), uint64(last)):
            some[n] = j
            n += uint64(eights[j] != uint64(0))
        for i in range(n):
            start = uint64(8) * uint64(some[i])
            for v in range(start, start + uint64(8)):
                places[count] = v
                count += uint64(marks[v])
        return int(count)

    @bare
    def sift(
        key: Any, prior: Any, chances: Any, at: Any, first: Any, last: Any, scale: Any, sieve: Any, scratch: Any
    ) -> Any:
        """List the tokens from `first` to `last` of the context at `at` of the prior to look at; return how many.

        `chances` is empty, or has the context's p, which `scale` takes to 2^16 p / tau: then tokens whose symbol may be
        above zero are listed too. `scratch.places` takes the list, `scratch.halves` the upper halves of the draws.
        """
        halves, marks = scratch.halves, scratch.marks
        _halves(key, scratch.words, first // 2, (last + 1) // 2)
        _mark(prior, at, first, last, sieve, halves, marks)
        if chances.size:
            _mark_changes(chances, first, last, scale, halves, marks)
        return _list(marks, scratch.eights, first // 8, (last + 7) // 8, scratch.some, scratch.places)

else:
    sift = sift_reference
