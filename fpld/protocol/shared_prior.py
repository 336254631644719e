"""The shared prior: the student's prediction, which both ends compute, rounded to the same integers.

The floats of two machines differ in their last digits, so rounding alone would differ now and then. The aggregator
rounds the log-probabilities to eighths of a nat and sends `PriorNotes`: the coordinates within `margin` of a rounding
boundary, with the side that it took, and a digest of each block. A node rounds its own floats and takes those sides. A
node asks for a block whose digest still differs, so nothing is coded against a prior that the other end does not hold.
With a margin of 2e-5 nats about 3 coordinates in 10,000 are noted, in two bytes each.

For contexts that a node has written, it is the other way round: the node rounds, and sends `RoundingNotes`, which are
shorter since nobody asks for blocks. An aggregator that rounds otherwise all the same refuses those labels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.codecs.prior import (
    DIGEST_BYTES,
    EIGHTHS_PER_NAT,
    FINE_GRID,
    ArrayPrior,
    block_count,
    block_digest,
    block_ranges,
    block_rows,
    exact_eighths,
    join_digests,
)
from fpld.errors import FrameError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy.typing as npt

    from fpld.codecs.prior import Eighths, PriorGrid
    from fpld.types import Array, Floats, Reals

MARGIN = 2e-5  # nats by which the floats of two machines may differ
_CACHED_BLOCKS = 8  # the last ones: all nodes of a round are decoded against a block in turn
_SKIP = (1 << 15) - 1  # the largest gap of an entry; it names no coordinate, the next gap starts there


@dataclass(frozen=True, eq=False, slots=True)
class PriorNotes:
    """Hold what a node needs to round as the aggregator did, block by block.

    `counts` [blocks] is the number of entries of each block. An entry is twice the gap to the coordinate noted before
    it, plus one if its coordinate was rounded up. `digests` [blocks, DIGEST_BYTES] are those of the rounded blocks.
    """

    shape: tuple[int, int]
    counts: npt.NDArray[np.int32]
    entries: npt.NDArray[np.uint16]
    digests: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        blocks = block_count(self.shape)
        if self.counts.shape != (blocks,) or self.counts.dtype != np.int32 or (self.counts < 0).any():
            raise InputError(f"prior notes must count the entries of {blocks} blocks, got {self.counts!r:.80}")
        if self.entries.dtype != np.uint16 or self.entries.shape != (int(self.counts.sum(dtype=np.int64)),):
            raise InputError(f"prior notes must have as many entries as they count, got {self.entries.shape}")
        if self.digests.shape != (blocks, DIGEST_BYTES) or self.digests.dtype != np.uint8:
            raise InputError(f"prior notes must have a digest for each of {blocks} blocks, got {self.digests.shape}")

    @property
    def digest(self) -> bytes:
        """Return the digest of the whole prior."""
        return join_digests(self.digests.tobytes())

    @property
    def size(self) -> int:
        """Return the bytes of the notes in a message."""
        return self.counts.nbytes + self.entries.nbytes + self.digests.nbytes

    def arrays(self) -> dict[str, Array]:
        """Return the notes as arrays of a message."""
        return {"counts": self.counts, "entries": self.entries, "digests": self.digests}

    def sides(self, block: int) -> tuple[Array, Array]:
        """Return the coordinates that are noted in a block, and which of them were rounded up."""
        start = int(self.counts[:block].sum(dtype=np.int64))
        return _decoded(self.entries[start : start + int(self.counts[block])])


def describe_differing(blocks: int, total: int) -> str:
    """Return in words how much of a prior two machines predict differently.

    >>> describe_differing(3, 12)[:44]
    '3 of 12 blocks (25%) of the prediction: the '
    """
    share = blocks / max(total, 1)
    return f"{blocks} of {total} blocks ({share:.0%}) of the prediction: the machines' differ by more than probe.margin"


def check_prior_blocks(sent: Mapping[int, Array], shape: tuple[int, int]) -> dict[int, Eighths]:
    """Check blocks of the prior that a message brought; raise InputError for a wrong number, shape or value."""
    blocks = block_count(shape)
    for block, integers in sent.items():
        if not 0 <= block < blocks:
            raise InputError(f"a block of the prior must be one of {blocks}, got {block}")
        ArrayPrior(integers)
        contexts = len(block_rows(shape, block))
        if integers.shape != (contexts, shape[1]):
            raise InputError(f"block {block} of the prior must have {contexts} contexts of {shape[1]} tokens")
    return dict(sent)


def estimate_notes_bytes(contexts: int, vocab: int, *, margin: float = MARGIN, coarse: bool = False) -> int:
    """Estimate the bytes of the notes on a prior, for logarithms that are spread evenly between boundaries.

    On the coarse grid about an eighth as many lie close to one.

    >>> estimate_notes_bytes(16_384, 1024)
    11505
    """
    near = 2 * EIGHTHS_PER_NAT * margin * contexts * vocab / (EIGHTHS_PER_NAT if coarse else 1)
    return round(near * np.dtype(np.uint16).itemsize) + block_count((contexts, vocab)) * (4 + DIGEST_BYTES)


def round_blocks(
    blocks: Iterable[Reals], shape: tuple[int, int], *, margin: float = MARGIN, grid: PriorGrid = FINE_GRID
) -> Iterator[RoundedBlock]:
    """Round logits that come in the blocks of `block_ranges`; yield each with what is noted of it and its digest."""
    for rows, logits in zip(block_ranges(shape), blocks, strict=True):
        exact = exact_eighths(logits)
        units = grid.units(exact)
        rounded = np.rint(exact / units) * units
        close = np.abs(np.abs(exact - rounded) - 0.5 * units) <= EIGHTHS_PER_NAT * margin
        # Far below the least value of the grid either side becomes that value.
        near = np.flatnonzero(close & (exact > grid.least - EIGHTHS_PER_NAT))
        up = rounded.flat[near] > exact.flat[near]
        integers = grid.clipped(rounded)
        yield RoundedBlock(rows, integers, near, up, block_digest(integers))


@dataclass(frozen=True, eq=False, slots=True)
class RoundedBlock:
    """Hold a rounded block of the prior and its digest; `places` are close to a boundary, `up` those rounded up."""

    rows: range
    integers: Eighths
    places: Array
    up: Array
    digest: bytes


def collect_notes(blocks: Iterable[RoundedBlock], shape: tuple[int, int]) -> PriorNotes:
    """Return the notes of all blocks; only one block is held at a time."""
    entries = []
    digests = bytearray()
    for block in blocks:
        entries.append(_entries(block.places, block.up))
        digests += block.digest
    counts = np.array([len(part) for part in entries], np.int32)
    table = np.frombuffer(bytes(digests), np.uint8).reshape(-1, DIGEST_BYTES)
    return PriorNotes(shape, counts, np.concatenate(entries), table)


@dataclass(frozen=True, eq=False, slots=True)
class ComputedPrior:
    """A prior that a node computes: its prediction, rounded by the aggregator's notes.

    `predict` returns the logits of a range of contexts; `sent` holds the blocks that the node asked for.
    """

    predict: Callable[[range], Reals]
    notes: PriorNotes
    sent: Mapping[int, Eighths] = field(default_factory=dict)
    grid: PriorGrid = FINE_GRID
    _cache: dict[int, Eighths] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (contexts, vocab)."""
        return self.notes.shape

    @property
    def digest(self) -> bytes:
        """Return the digest of the aggregator's prior: no block that differs from it is ever returned."""
        return self.notes.digest

    def missing(self) -> list[int]:
        """Return the blocks that were not sent and differ from the aggregator's."""
        return [block for block, (_, agreed) in enumerate(self.blocks()) if not agreed]

    def blocks(self) -> Iterator[tuple[Eighths, bool]]:
        """Yield the integers of each block, and whether they are the aggregator's."""
        for block in range(len(self.notes.counts)):
            integers = self._integers(block)
            yield integers, block_digest(integers) == self.notes.digests[block].tobytes()

    def block(self, rows: range) -> Eighths:
        """Return the integers of a range of contexts."""
        stride = len(block_rows(self.shape, 0))
        blocks = range(rows.start // stride, -(-rows.stop // stride))
        parts = [self._checked(block) for block in blocks]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        first = rows.start - blocks.start * stride
        return whole[first : first + len(rows)]

    def _checked(self, block: int) -> Eighths:
        """Return a block if it is the aggregator's; raise InputError if not. The last blocks are cached."""
        if block not in self._cache:
            integers = self._integers(block)
            if block_digest(integers) != self.notes.digests[block].tobytes():
                raise InputError(f"block {block} of the prior differs from the aggregator's: ask for it")
            while len(self._cache) >= _CACHED_BLOCKS:
                del self._cache[next(iter(self._cache))]  # the oldest
            self._cache[block] = integers
        return self._cache[block]

    def _integers(self, block: int) -> Eighths:
        if block in self.sent:
            return self.sent[block]
        exact = exact_eighths(self.predict(block_rows(self.shape, block)))
        places, up = self.notes.sides(block)
        if places.size and places[-1] >= exact.size:
            raise InputError(f"prior notes name coordinate {places[-1]} of block {block}, which has {exact.size}")
        return _round_by(exact, places, up, self.grid)


class RoundingNotes(NamedTuple):
    """How a node has rounded the prior of contexts that it wrote: the entries of all coordinates, and the digest."""

    entries: npt.NDArray[np.uint16]
    digest: bytes

    @classmethod
    def collect(cls, blocks: Iterable[RoundedBlock], vocab: int) -> RoundingNotes:
        """Return the notes on blocks that come in order; only one block is held at a time."""
        places = [np.empty(0, np.int64)]
        up = [np.empty(0, bool)]
        digests = bytearray()
        for block in blocks:
            places.append(block.places + block.rows.start * vocab)
            up.append(block.up)
            digests += block.digest
        return cls(_entries(np.concatenate(places), np.concatenate(up)), join_digests(bytes(digests)))

    def apply(self, blocks: Iterable[Reals], shape: tuple[int, int], grid: PriorGrid) -> Iterator[Eighths]:
        """Round logits that come in the blocks of `block_ranges`, to the sides that are noted."""
        places, up = _decoded(self.entries)
        if places.size and places[-1] >= shape[0] * shape[1]:
            raise FrameError(f"rounding notes must name coordinates below {shape[0] * shape[1]}, got {places[-1]}")
        for rows, logits in zip(block_ranges(shape), blocks, strict=True):
            first, last = np.searchsorted(places, [rows.start * shape[1], rows.stop * shape[1]])
            here = places[first:last] - rows.start * shape[1]
            yield _round_by(exact_eighths(logits), here, up[first:last], grid)


def _round_by(exact: Floats, places: Array, up: Array, grid: PriorGrid) -> Eighths:
    """Round log-probabilities in eighths of a nat, those at some places to the side that is noted."""
    units = grid.units(exact)
    near = exact.flat[places]
    width = units if isinstance(units, float) else units.flat[places]
    rounded = np.rint(exact / units) * units
    # Beside the boundary k + 1/2 lie the integers k and k + 1.
    rounded.flat[places] = (np.rint(near / width - 0.5) + up) * width
    return grid.clipped(rounded)


def _entries(places: Array, up: Array) -> npt.NDArray[np.uint16]:
    """Encode places as gaps; a gap that is too long for an entry is preceded by entries that only skip."""
    gaps = np.diff(places, prepend=0)
    skips, rest = np.divmod(gaps, _SKIP)
    out = np.full(int(skips.sum()) + gaps.size, _SKIP << 1, np.int64)
    out[np.cumsum(skips + 1) - 1] = rest << 1 | up
    return out.astype(np.uint16)


def _decoded(entries: Array) -> tuple[Array, Array]:
    """Return the places that entries name, and which of them were rounded up."""
    numbers = entries.astype(np.int64)
    gaps = numbers >> 1
    real = gaps != _SKIP
    return np.cumsum(gaps)[real], (numbers[real] & 1).astype(bool)
