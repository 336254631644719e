"""Which coordinates of a context to look at: all candidates and few others, at the speed of memory.

Nearly all tokens of a large vocabulary are neither candidates nor change. The loops run over integers of 16 bits and
vectorise; what they mark is looked at again, one by one, so only what they leave out must be right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fpld.codecs.samples.draws import mixed, uppers
from fpld.compiled import available, bare

Array = np.ndarray[Any, np.dtype[Any]]
_CELLS, _MARGIN = 1 << 16, 0.5  # of upper halves; float32 is exact to a small part of one


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
        lists = np.empty(vocab // 8 + 2, np.int32), np.empty(vocab + 8, np.int32)
        return cls(words, words.view("<u2"), marks, marks.view(np.uint64), *lists)


def sift_reference(
    key: Any,
    prior: Any,
    change: Any,
    at: Any,
    vocab: Any,
    inverse: Any,
    always: Any,
    above: Any,
    reach: Any,
    width: Any,
    words: Any,
    halves: Any,
    marks: Any,
    eights: Any,
    some: Any,
    places: Any,
) -> int:
    """List the tokens to look at in `places`; return how many. NumPy's version of `sift`."""
    del words, marks, eights, some
    upper = uppers(key, vocab)
    halves[:vocab] = upper
    own = prior[at : at + vocab]
    found = own > always
    for k in range(3):
        found |= (own > above[k]) & (upper + reach[k] < width[k])
    if change.size:
        scaled = change[at : at + vocab] * np.float32(inverse * _CELLS) + upper.astype(np.float32)
        found |= (scaled < np.float32(_MARGIN)) | (scaled >= np.float32(_CELLS - 1 - _MARGIN))
    listed = np.flatnonzero(found)
    places[: listed.size] = listed
    return listed.size


if available():
    from numba import float32, int16, uint8, uint16, uint64

    @bare
    def _halves(key: Any, words: Any) -> None:
        a, b, c = int(key[0]), int(key[1]), int(key[2])
        for j in range(words.size):
            words[j] = mixed(j, a, b, c)

    @bare
    def _mark(
        prior: Any, at: Any, vocab: Any, always: Any, above: Any, reach: Any, width: Any, halves: Any, marks: Any
    ) -> None:
        limit, t0, t1 = int16(always), int16(above[0]), int16(above[1])
        r0, r1, r2 = uint16(reach[0]), uint16(reach[1]), uint16(reach[2])
        w0, w1, w2 = uint16(width[0]), uint16(width[1]), uint16(width[2])
        at = uint64(at)
        for v in range(uint64(vocab)):
            p, x = prior[at + v], halves[v]
            marks[v] = (
                (uint16(x + r2) < w2)
                | ((p > t1) & (uint16(x + r1) < w1))
                | ((p > t0) & (uint16(x + r0) < w0))
                | (p > limit)
            )

    @bare
    def _mark_changes(change: Any, at: Any, vocab: Any, inverse: Any, halves: Any, marks: Any) -> None:
        scale, low, high = float32(inverse * _CELLS), float32(_MARGIN), float32(_CELLS - 1 - _MARGIN)
        at = uint64(at)
        for v in range(uint64(vocab)):
            scaled = change[at + v] * scale + float32(halves[v])
            marks[v] |= (scaled < low) | (scaled >= high)

    @bare
    def _list(marks: Any, eights: Any, some: Any, places: Any) -> Any:
        """List what is marked, without a branch that depends on it."""
        n, count = uint64(0), uint64(0)
        for j in range(uint64(eights.size)):
            some[n] = j
            n += uint64(eights[j] != uint64(0))
        for i in range(n):
            first = uint64(8) * uint64(some[i])
            for v in range(first, first + uint64(8)):
                places[count] = v
                count += uint64(marks[v])
        return count

    @bare
    def sift(
        key: Any,
        prior: Any,
        change: Any,
        at: Any,
        vocab: Any,
        inverse: Any,
        always: Any,
        above: Any,
        reach: Any,
        width: Any,
        words: Any,
        halves: Any,
        marks: Any,
        eights: Any,
        some: Any,
        places: Any,
    ) -> Any:
        """List the tokens of the context at `at` to look at in `places`; return how many.

        `change` is d, or empty; with it, whatever might not be zero with the step 1 / `inverse` is listed too.
        `halves` takes the upper halves of the draws.
        """
        _halves(key, words)
        _mark(prior, at, vocab, always, above, reach, width, halves, marks)
        if change.size:
            _mark_changes(change, at, vocab, inverse, halves, marks)
        return int(_list(marks, eights, some, places))

else:
    sift = sift_reference
