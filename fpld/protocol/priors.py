"""A prior that each end computes for itself: the student's prediction, rounded alike on machines whose floats differ.

The aggregator rounds the log-probabilities to eighths of a nat and notes two things (`Notes`): the coordinates that lie
within `margin` of a rounding boundary, with the side it took, and a digest of each block. A node rounds by its own
floats and takes those sides. A block whose digest then differs is asked for, so nothing is coded against a prior that
the other end does not hold. With a margin of 2e-5 nats about 3 coordinates in 10,000 are noted, in two bytes each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.prior import (
    DIGEST_BYTES,
    EIGHTHS,
    LEAST_PRIOR,
    ArrayPrior,
    block_digest,
    block_rows,
    join_digests,
    ranges,
)
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy.typing as npt

    from fpld.types import Reals

    Integers = npt.NDArray[np.int16]
    Predict = Callable[[range], Reals]
    Array = np.ndarray[Any, np.dtype[Any]]

MARGIN = 2e-5  # nats: what the floats of two machines may differ by
_KEPT = 8  # blocks that were computed last: those that all nodes of a round are read against in turn
_SKIP = (1 << 15) - 1  # a gap that says: go on by so many coordinates, none is noted there


@dataclass(frozen=True, eq=False, slots=True)
class Notes:
    """What the aggregator tells a node about its rounding, block by block.

    `counts` [blocks] says how many of the entries belong to each block; an entry is twice the gap to the coordinate
    noted before it, plus one if that coordinate was rounded up.
    """

    shape: tuple[int, int]
    counts: npt.NDArray[np.int32]
    entries: npt.NDArray[np.uint16]
    digests: npt.NDArray[np.uint8]  # [blocks, DIGEST_BYTES]

    def __post_init__(self) -> None:
        blocks = len(ranges(self.shape))
        if self.counts.shape != (blocks,) or self.counts.dtype != np.int32 or (self.counts < 0).any():
            raise InputError(f"prior notes must count the entries of {blocks} blocks, got {self.counts!r:.80}")
        if self.entries.dtype != np.uint16 or self.entries.shape != (int(self.counts.sum(dtype=np.int64)),):
            raise InputError(f"prior notes must have as many entries as they count, got {self.entries.shape}")
        if self.digests.shape != (blocks, DIGEST_BYTES) or self.digests.dtype != np.uint8:
            raise InputError(f"prior notes must have a digest for each of {blocks} blocks, got {self.digests.shape}")

    @property
    def digest(self) -> bytes:
        """Return a digest of the whole prior."""
        return join_digests(self.digests.tobytes())

    @property
    def size(self) -> int:
        """Return the bytes that the notes take in a message."""
        return self.counts.nbytes + self.entries.nbytes + self.digests.nbytes

    def arrays(self) -> dict[str, Array]:
        """Return the notes as arrays of a message."""
        return {"counts": self.counts, "entries": self.entries, "digests": self.digests}

    def of(self, block: int) -> tuple[Array, Array]:
        """Return the places that are noted in a block, and which of them were rounded up."""
        start = int(self.counts[:block].sum(dtype=np.int64))
        entries = self.entries[start : start + int(self.counts[block])].astype(np.int64)
        gaps, up = entries >> 1, (entries & 1).astype(bool)
        real = gaps != _SKIP
        return np.cumsum(gaps)[real], up[real]


def check_sent(sent: Mapping[int, Array], shape: tuple[int, int]) -> dict[int, Integers]:
    """Return blocks of the prior that came from outside; refuse what is none of this shape."""
    blocks = ranges(shape)
    for block, integers in sent.items():
        if not 0 <= block < len(blocks):
            raise InputError(f"a block of the prior must be one of {len(blocks)}, got {block}")
        ArrayPrior(integers)
        if integers.shape != (len(blocks[block]), shape[1]):
            raise InputError(f"block {block} of the prior must have {len(blocks[block])} contexts of {shape[1]} tokens")
    return dict(sent)


def notes_bytes(contexts: int, vocab: int, *, margin: float = MARGIN) -> int:
    """Return about how many bytes the notes on a prior will take, with logarithms spread evenly between boundaries.

    >>> notes_bytes(16_384, 1024)
    11505
    """
    near = 2 * EIGHTHS * margin * contexts * vocab
    return round(near * np.dtype(np.uint16).itemsize) + len(ranges((contexts, vocab))) * (4 + DIGEST_BYTES)


def take_notes(blocks: Iterable[Reals], shape: tuple[int, int], *, margin: float = MARGIN) -> Iterator[Block]:
    """Round logits that come in the blocks of `ranges`; yield each with what is to be noted of it."""
    for rows, logits in zip(ranges(shape), blocks, strict=True):
        exact = _eighths(logits)
        rounded = np.rint(exact)
        near = np.flatnonzero(np.abs(np.abs(exact - rounded) - 0.5) <= EIGHTHS * margin)
        up = rounded.flat[near] > exact.flat[near]
        integers = _clipped(rounded)
        yield Block(rows, integers, _entries(near, up), block_digest(integers))


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """A block of the prior, and what is noted of it."""

    rows: range
    integers: Integers
    entries: npt.NDArray[np.uint16]
    digest: bytes


def collect(blocks: Iterable[Block], shape: tuple[int, int]) -> Notes:
    """Put together what was noted of all blocks."""
    found = [(block.entries, block.digest) for block in blocks]
    digests = np.frombuffer(b"".join(digest for _, digest in found), np.uint8).reshape(-1, DIGEST_BYTES)
    counts = np.array([len(entries) for entries, _ in found], np.int32)
    return Notes(shape, counts, np.concatenate([entries for entries, _ in found]), digests)


@dataclass(frozen=True, eq=False, slots=True)
class ComputedPrior:
    """The prior that a node computes: its own prediction, rounded by the aggregator's notes.

    `predict` returns the logits of a range of contexts; `sent` holds the blocks that were asked for and came.
    """

    predict: Predict
    notes: Notes
    sent: Mapping[int, Integers] = field(default_factory=dict)
    _last: dict[int, Integers] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (contexts, vocab)."""
        return self.notes.shape

    @property
    def digest(self) -> bytes:
        """Return the digest of the prior that the aggregator noted: no block that differs from it is ever returned."""
        return self.notes.digest

    def missing(self) -> list[int]:
        """Return the blocks that this machine does not round as the aggregator did, and that were not sent."""
        return [block for block, (_, agreed) in enumerate(self.blocks()) if not agreed]

    def blocks(self) -> Iterator[tuple[Integers, bool]]:
        """Yield the integers of each block as this machine rounds them, and whether the aggregator did so too."""
        for block in range(len(self.notes.counts)):
            integers = self._integers(block)
            yield integers, block_digest(integers) == self.notes.digests[block].tobytes()

    def block(self, rows: range) -> Integers:
        """Return the integers of a range of contexts."""
        stride = len(block_rows(self.shape, 0))
        blocks = range(rows.start // stride, -(-rows.stop // stride))
        parts = [self._checked(block) for block in blocks]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        first = rows.start - blocks.start * stride
        return whole[first : first + len(rows)]

    def _checked(self, block: int) -> Integers:
        """Return a block, and only the one that the aggregator holds; the last are kept, since reading is in order."""
        if block not in self._last:
            integers = self._integers(block)
            if block_digest(integers) != self.notes.digests[block].tobytes():
                raise InputError(f"block {block} of the prior differs from the aggregator's: ask for it")
            while len(self._last) >= _KEPT:
                del self._last[next(iter(self._last))]  # the oldest
            self._last[block] = integers
        return self._last[block]

    def _integers(self, block: int) -> Integers:
        if block in self.sent:
            return self.sent[block]
        exact = _eighths(self.predict(block_rows(self.shape, block)))
        places, up = self.notes.of(block)
        if places.size and places[-1] >= exact.size:
            raise InputError(f"prior notes name coordinate {places[-1]} of block {block}, which has {exact.size}")
        near = exact.flat[places]
        rounded = np.rint(exact, out=exact)
        # Beside the boundary k + 1/2 lie the integers k and k + 1.
        rounded.flat[places] = np.rint(near - 0.5) + up
        return _clipped(rounded)


def _eighths(logits: Reals) -> npt.NDArray[np.float64]:
    """Return log-probabilities in eighths of a nat, in double precision; memory for them is taken twice at most."""
    exact: npt.NDArray[np.float64] = np.subtract(logits, np.max(logits, axis=-1, keepdims=True), dtype=np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    exact *= EIGHTHS
    return exact


def _clipped(rounded: npt.NDArray[np.float64]) -> Integers:
    return np.clip(rounded, LEAST_PRIOR, 0, out=rounded).astype(np.int16)


def _entries(places: Array, up: Array) -> npt.NDArray[np.uint16]:
    """Return places as gaps; where a gap is too long for an entry, entries that only go on stand before it."""
    gaps = np.diff(places, prepend=0)
    skips, rest = np.divmod(gaps, _SKIP)
    out = np.full(int(skips.sum()) + gaps.size, _SKIP << 1, np.int64)
    out[np.cumsum(skips + 1) - 1] = rest << 1 | up
    return out.astype(np.uint16)
