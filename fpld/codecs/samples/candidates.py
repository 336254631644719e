"""Where the candidates of a context lie: a prefilter at the speed of memory, and an index for several nodes at once.

Nearly all tokens of a large vocabulary are neither candidates nor change. So a *prefilter* first marks the tokens that
may be, with bounds in 16-bit integers whose loops vectorise. Each marked token is then examined by itself, so the
prefilter must not miss any, but may mark too many.

Stratified nodes have the same draws but for a shift of the upper half by slot / slots. So a token's draw tells for
which slots it may be a candidate: those whose shift takes it past the top of the circle, or nearly so.
`CandidateIndex` finds the candidates of all such nodes in one pass over prior and draws. A node with draws of its own
is the case of one slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.dither import GOLDEN, MIX_1, MIX_2
from fpld.codecs.samples import steps
from fpld.codecs.samples.draws import HALF_BITS, HALF_RANGE, SHIFT, draw_keys, upper_halves
from fpld.codecs.samples.probabilities import check_range
from fpld.codecs.samples.steps import BIN_OFFSET, BIN_SHIFT, LEVEL_COUNT, MINUS_BINS, PLUS_BINS, STEPS_PER_OCTAVE
from fpld.kernels import borrowing_kernel, inlined, numba_available

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.codecs.prior import Eighths
    from fpld.types import Array, Plan

CHUNK_TOKENS = 4096  # tokens at a time: what the loops touch stays in the first cache

# The sum of 2^16 p / tau and an upper half from which a symbol may be positive. The lower half of the draw is unknown,
# so one unit is in question; float32 is exact to a small part of one.
_POSITIVE_BOUND = np.float32(HALF_RANGE - 1.5)
_LOG_SLACK = 32  # a logarithm of the middle of a cell is at most so far from the exact one
# Classes of levels, by the share of draws that make a node's candidates. Tokens of the first class are all examined.
_CLASS_SHARES = 1 / 4, 1 / 24, 1 / 160
_NO_PROBABILITIES = np.empty(0, np.float32)
_HALF_MASK = HALF_RANGE - 1


class PrefilterBounds(NamedTuple):
    """Hold bounds, in 16-bit integers, that let through all candidates of `slots` nodes and few others.

    The nodes' draws lie evenly spaced on a circle, so `slots` times them is nearly the same for all. Let p be the
    prior's integer of a coordinate, and w the upper half of the first node's draw. The coordinate is examined if
    p > always_above, or if slots (w + class_reach[k]) mod 2^16 <= class_width[k] for a k with p > class_above[k]. A
    single node has closer bounds by level: its w must have (w + level_reach[level]) mod 2^16 < level_width[level].
    """

    slots: int
    always_above: int
    class_above: Array
    class_reach: Array
    class_width: Array
    level_reach: Array
    level_width: Array


def prefilter_bounds(ratios: Array, slots: int = 1, below: int = 0) -> PrefilterBounds:
    """Return the bounds for the log ratios of a step, `steps.log_ratios`.

    With `below`, coordinates whose ratio for negative symbols exceeds a candidate's by so much pass too. Floats serve
    here, since what passes is examined again.
    """
    upper, lower = (
        np.exp2(np.minimum(((bins - BIN_OFFSET << BIN_SHIFT) + _LOG_SLACK + more - ratios) / STEPS_PER_OCTAVE, 0.0))
        for bins, more in ((PLUS_BINS, 0), (MINUS_BINS, below))
    )
    share = np.maximum(upper, lower)
    above, under = (
        np.minimum(np.ceil(HALF_RANGE * part) + 1, HALF_RANGE // 2 - 1).astype(np.int64) for part in (upper, lower)
    )
    # Levels are sorted from likely to unlikely tokens, so a class is a range of levels and its first one the widest.
    firsts = [int((share >= bound / slots).sum()) for bound in _CLASS_SHARES]
    widest = np.minimum(firsts, LEVEL_COUNT - 1)
    return PrefilterBounds(
        slots=slots,
        always_above=-firsts[0],
        class_above=-np.array([*firsts[1:], LEVEL_COUNT], np.int16),
        class_reach=(slots * above[widest] % HALF_RANGE).astype(np.uint16),
        class_width=(np.minimum(slots * (above + under)[widest], HALF_RANGE) - 1).astype(np.uint16),
        level_reach=above,
        level_width=np.where(share >= _CLASS_SHARES[0], HALF_RANGE, above + under),
    )


class PrefilterScratch(NamedTuple):
    """Hold the memory that prefiltering a context needs.

    `words` has the words of two draws each, and `halves` the same memory by halves. `marks` has a byte for each token,
    and `mark_words` the same memory by eight. `groups` lists the groups of eight with a mark, `tokens` the tokens.
    """

    words: Array
    halves: Array
    marks: Array
    mark_words: Array
    groups: Array
    tokens: Array

    @classmethod
    def allocate(cls, vocab: int) -> PrefilterScratch:
        """Allocate the memory for a vocabulary."""
        words = np.zeros(-(-vocab // 2), "<u4")
        marks = np.zeros(-(-vocab // 8) * 8, np.uint8)
        groups = np.empty(CHUNK_TOKENS // 8 + 1, np.int32)
        tokens = np.empty(CHUNK_TOKENS + 8, np.int32)
        return cls(words, words.view("<u2"), marks, marks.view(np.uint64), groups, tokens)


def prefilter_reference(
    key: Any, prior: Any, probabilities: Any, at: Any, first: Any, last: Any, scale: Any, bounds: Any, scratch: Any
) -> int:
    """List the tokens to examine: the NumPy version of `prefilter`."""
    upper = upper_halves(key, last)[first:]
    scratch.halves[first:last] = upper
    integers = prior[at + first : at + last]
    folded = upper * np.uint16(bounds.slots % HALF_RANGE)
    marked = integers > bounds.always_above
    for k in range(len(_CLASS_SHARES)):
        marked |= (integers > bounds.class_above[k]) & (folded + bounds.class_reach[k] <= bounds.class_width[k])
    if probabilities.size:
        marked |= probabilities[first:last] * np.float32(scale) + upper.astype(np.float32) >= _POSITIVE_BOUND
    tokens = first + np.flatnonzero(marked)
    scratch.tokens[: tokens.size] = tokens
    return int(tokens.size)


if numba_available():
    from numba import float32, int16, uint16, uint32, uint64

    _GOLDEN = np.uint32(GOLDEN)
    _MIX_1 = np.uint32(MIX_1)
    _MIX_2 = np.uint32(MIX_2)

    @borrowing_kernel
    def _fill_halves(key: Any, words: Any, first: Any, last: Any) -> None:
        """Fill the words from number `first` on, as `fpld.codecs.dither.mix` does, and shift both halves."""
        counter = uint32(key[0] + uint32(uint32(first) * _GOLDEN))
        b = key[1]
        c = key[2]
        low = uint32(key[SHIFT])
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

    @borrowing_kernel
    def _mark(prior: Any, at: Any, first: Any, last: Any, bounds: Any, halves: Any, marks: Any) -> None:
        """Mark the tokens that the bounds let through."""
        # The bounds as scalars of 16 bits: the loop has no load but those of its two arrays, and vectorises.
        above = bounds.class_above
        reach = bounds.class_reach
        width = bounds.class_width
        slots = uint16(bounds.slots)
        limit = int16(bounds.always_above)
        t0 = int16(above[0])
        t1 = int16(above[1])
        r0 = uint16(reach[0])
        r1 = uint16(reach[1])
        r2 = uint16(reach[2])
        w0 = uint16(width[0])
        w1 = uint16(width[1])
        w2 = uint16(width[2])
        at = uint64(at)
        for v in range(uint64(first), uint64(last)):
            p = prior[at + v]
            x = uint16(halves[v] * slots)
            marks[v] = (
                (uint16(x + r2) <= w2)
                | ((p > t1) & (uint16(x + r1) <= w1))
                | ((p > t0) & (uint16(x + r0) <= w0))
                | (p > limit)
            )

    @borrowing_kernel
    def _mark_positive(probabilities: Any, first: Any, last: Any, scale: Any, halves: Any, marks: Any) -> None:
        """Mark the tokens whose symbol may be positive."""
        scale = float32(scale)
        for v in range(uint64(first), uint64(last)):
            marks[v] |= probabilities[v] * scale + float32(halves[v]) >= _POSITIVE_BOUND

    @borrowing_kernel
    def _list_marked(marks: Any, mark_words: Any, first: Any, last: Any, groups: Any, tokens: Any) -> Any:
        """List the marked tokens, by groups of eight, without a branch that depends on a mark."""
        n = uint64(0)
        count = uint64(0)
        for j in range(uint64(first), uint64(last)):
            groups[n] = j
            n += uint64(mark_words[j] != uint64(0))
        for i in range(n):
            start = uint64(8) * uint64(groups[i])
            for v in range(start, start + uint64(8)):
                tokens[count] = v
                count += uint64(marks[v])
        return int(count)

    @borrowing_kernel
    def prefilter(
        key: Any, prior: Any, probabilities: Any, at: Any, first: Any, last: Any, scale: Any, bounds: Any, scratch: Any
    ) -> Any:
        """List the tokens to examine, from `first` to `last` of a context; return how many they are.

        Parameters
        ----------
        key:
            The context's key (`draws.draw_keys`).
        prior, at:
            The integers of all contexts in one dimension, and where those of this context begin.
        probabilities, scale:
            Empty, or the context's p, which `scale` takes to 2^16 p / tau: then tokens whose symbol may be positive are
            listed too.
        bounds, scratch:
            The bounds of the step. `scratch.tokens` takes the list, `scratch.halves` the upper halves of the draws.
        """
        halves = scratch.halves
        marks = scratch.marks
        _fill_halves(key, scratch.words, first // 2, (last + 1) // 2)
        _mark(prior, at, first, last, bounds, halves, marks)
        if probabilities.size:
            _mark_positive(probabilities, first, last, scale, halves, marks)
        return _list_marked(marks, scratch.mark_words, first // 8, (last + 7) // 8, scratch.groups, scratch.tokens)

else:
    prefilter = prefilter_reference


class Candidates(NamedTuple):
    """Hold where a node may have candidates: packed coordinates (`unpack_coordinate`), and where each context ends."""

    packed: Array
    ends: Array


class _Slots(NamedTuple):
    """Hold the shift of each slot, twice around the circle, and the number of its node, -1 if it has none."""

    shifts: Array
    nodes: Array


@inlined
def _pack_coordinate(token: Any, level: Any, half: Any) -> Any:
    """Pack a coordinate into 64 bits: its token, its level and the upper half of its draw, 16 bits each of the two."""
    return token << (2 * HALF_BITS) | level << HALF_BITS | half


@inlined
def unpack_coordinate(packed: Any) -> Any:
    """Return the token, the level and the upper half of the draw of a packed coordinate."""
    return packed >> (2 * HALF_BITS), (packed >> HALF_BITS) & _HALF_MASK, packed & _HALF_MASK


class CandidateBuffer:
    """Memory for candidates that indexes share: what one has found is gone when another one searches."""

    def __init__(self) -> None:
        self._array = np.empty((0, 0), np.int64)

    def reserve(self, nodes: int, size: int) -> Array:
        """Return memory for `size` coordinates, or more, of each of some nodes."""
        rows, columns = self._array.shape
        if rows < nodes or columns < size:
            self._array = np.empty((max(rows, nodes), max(columns, size)), np.int64)
        return self._array[:nodes]


class CandidateIndex:
    """Find where nodes may have candidates with steps from number `step` on; they share draws but for their slots."""

    def __init__(self, plans: Sequence[Plan], step: int, buffer: CandidateBuffer | None = None) -> None:
        self._plan = plans[0]
        self._node_count = len(plans)
        self._shared = len(plans) > 1
        slots = self._plan.slots if self._shared else 1
        nodes = np.full(slots, -1)
        nodes[[plan.slot if self._shared else 0 for plan in plans]] = np.arange(len(plans))
        around = 2 * slots + 1
        self._slots = _Slots((np.arange(around) << HALF_BITS) // slots, np.resize(nodes, around))
        self._bounds = prefilter_bounds(steps.log_ratios(step), slots)
        self._scratch = PrefilterScratch.allocate(self._plan.vocab)
        self._buffer = buffer or CandidateBuffer()

    def find(self, rows: range, prior: Eighths) -> list[Candidates]:
        """Return the candidates of each node in these contexts; raise `InputError` for a prior out of range."""
        packed = self._buffer.reserve(self._node_count, prior.size)
        ends = np.zeros((self._node_count, len(rows)), np.int64)
        keys = draw_keys(self._plan, rows)
        if self._shared:
            keys[:, SHIFT] = 0
        source = self._plan.vocab, self._bounds, self._slots, self._scratch, _NO_PROBABILITIES
        if not _find(keys, prior.ravel(), *source, Candidates(packed, ends)):
            check_range(prior)
        return [Candidates(*node) for node in zip(packed, ends, strict=True)]


@borrowing_kernel
def _find(
    keys: Any, prior: Any, vocab: Any, bounds: Any, slots: Any, scratch: Any, no_probabilities: Any, candidates: Any
) -> Any:
    """Find the candidates of each node, by context and token; return whether the prior is within its range."""
    halves = scratch.halves
    tokens = scratch.tokens
    level_reach = bounds.level_reach
    level_width = bounds.level_width
    shifts = slots.shifts
    nodes = slots.nodes
    packed = candidates.packed
    ends = candidates.ends
    for row in range(keys.shape[0]):
        at = row * vocab
        if row:
            for node in range(ends.shape[0]):
                ends[node, row] = ends[node, row - 1]
        for first in range(0, vocab, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, vocab)
            count = prefilter(keys[row], prior, no_probabilities, at, first, last, 0.0, bounds, scratch)
            for k in range(count):
                v = np.int64(tokens[k])
                level = -np.int64(prior[at + v])
                half = np.int64(halves[v])
                if level < 0 or level >= level_reach.size:
                    return False
                # From the first slot on whose shift takes the draw past the top of the circle.
                ahead = ((half + level_reach[level]) & _HALF_MASK) - HALF_RANGE
                slot = (-ahead * bounds.slots + HALF_RANGE - 1) >> HALF_BITS
                while ahead + shifts[slot] < level_width[level]:
                    node = nodes[slot]
                    if node >= 0:
                        shifted = (half + shifts[slot]) & _HALF_MASK
                        packed[node, ends[node, row]] = _pack_coordinate(v, level, shifted)
                        ends[node, row] += 1
                    slot += 1
    return True
