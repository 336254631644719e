"""The prior: a prediction of the logits that both ends hold exactly, as log-probabilities in eighths of a nat.

The integers run from -320 to 0, and both ends derive all else from them: a table over the 321 values serves. A prior is
identified by a digest of digests, of blocks of contexts, so that it can be verified block by block.

A *grid* says which of the integers are used. On the fine one all are. The coarse one has whole nats for unlikely
tokens, and none below about 1 / (16 V). So far fewer log-probabilities lie close to a rounding boundary, where the
floats of two machines may round to different sides. Labels are hardly longer or noisier for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fpld.errors import InputError
from fpld.numerics import split

if TYPE_CHECKING:
    from fpld.types import Floats, Plan, Reals

EIGHTHS_PER_NAT = 8
LEAST_PRIOR = -EIGHTHS_PER_NAT * 40
LOG_PRIOR = -np.arange(-LEAST_PRIOR + 1) / EIGHTHS_PER_NAT  # the log-probability of integer -i
# Classes of tokens, half a nat of the prior each: the predictive codec has adaptive tables for each of them.
CLASSES = 48
CLASS_OF = np.minimum(np.arange(-LEAST_PRIOR + 1) // (EIGHTHS_PER_NAT // 2), CLASSES - 1).astype(np.uint8)

DIGEST_BLOCK = 1 << 18  # coordinates of a block that has a digest of its own
DIGEST_BYTES = 8  # of a block

Eighths = np.ndarray[Any, np.dtype[np.int16]]

_LIKELY_EIGHTHS = -5 * EIGHTHS_PER_NAT  # the coarse grid has every eighth of a nat above


@dataclass(frozen=True, slots=True)
class PriorGrid:
    """The integers that log-probabilities are rounded to: every eighth of a nat above `likely`, whole nats to `least`.

    >>> coarse_grid(1024).round(np.array([-1.4, -39.4, -45.0, -300.0])).tolist()
    [-1, -39, -48, -80]
    """

    likely: int = LEAST_PRIOR
    least: int = LEAST_PRIOR

    def units(self, exact: Floats) -> Floats | float:
        """Return the distance of the integers around each log-probability, all in eighths of a nat."""
        if self.likely <= self.least:
            return 1.0
        return np.where(exact > self.likely, 1.0, float(EIGHTHS_PER_NAT))

    def clipped(self, rounded: Floats) -> Eighths:
        """Return rounded log-probabilities as integers, none below the least."""
        return np.clip(rounded, self.least, 0, out=rounded).astype(np.int16)

    def round(self, exact: Floats) -> Eighths:
        """Round log-probabilities in eighths of a nat."""
        units = self.units(exact)
        return self.clipped(np.rint(exact / units) * units)


FINE_GRID = PriorGrid()


def coarse_grid(vocab: int) -> PriorGrid:
    """Return the coarse grid for a vocabulary; its least value is about 1 / (16 V), by integer arithmetic."""
    nats = (16 * vocab).bit_length() * 7 // 10
    return PriorGrid(_LIKELY_EIGHTHS, max(-EIGHTHS_PER_NAT * nats, LEAST_PRIOR))


class Prior(Protocol):
    """Predict the logits [m, V] of a probe set, the same integers at both ends."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape [m, V]."""
        ...

    @property
    def digest(self) -> bytes:
        """Return the digest of all integers, 32 bytes (`join_digests`)."""
        ...

    def block(self, rows: range) -> Eighths:
        """Return the prediction of some contexts, [n, V]: log-probabilities in eighths of a nat, from -320 to 0."""
        ...


def block_ranges(shape: tuple[int, int]) -> list[range]:
    """Return the contexts of each block of a prior that has a digest of its own."""
    return split(shape[0], shape[1], DIGEST_BLOCK)


def block_count(shape: tuple[int, int]) -> int:
    """Return the number of blocks: that of the items of `block_ranges`, without the list.

    A shape that a peer claims is counted by this, so that its size moves no memory.

    >>> block_count((5, DIGEST_BLOCK // 2)), block_count((2**32 - 1, 2**24))
    (3, 4294967295)
    """
    return -(-shape[0] // _block_stride(shape))


def block_rows(shape: tuple[int, int], block: int) -> range:
    """Return the contexts of block number `block`: that item of `block_ranges`, without the list."""
    stride = _block_stride(shape)
    return range(block * stride, min((block + 1) * stride, shape[0]))


def _block_stride(shape: tuple[int, int]) -> int:
    return max(DIGEST_BLOCK // shape[1], 1)


def block_digest(integers: Eighths) -> bytes:
    """Return the digest of a block."""
    return hashlib.blake2b(integers.astype("<i2", copy=False).tobytes(), digest_size=DIGEST_BYTES).digest()


def join_digests(digests: bytes) -> bytes:
    """Return the digest of a whole prior, 32 bytes, from those of its blocks in their order."""
    return hashlib.blake2b(digests, digest_size=32, person=b"fpld prior").digest()


@dataclass(frozen=True, eq=False, slots=True)
class ArrayPrior:
    """Hold a whole prior as an array [m, V] of int16.

    >>> ArrayPrior(np.zeros((2, 3), np.int16)).block(range(1, 2)).tolist()
    [[0, 0, 0]]
    """

    array: Eighths
    _digest: list[bytes] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        array = self.array
        if array.dtype != np.int16 or array.ndim != 2 or array.size == 0:
            raise InputError(f"prior must be int16 of shape (contexts, vocab), got {array.dtype} {array.shape}")
        if array.max() > 0 or array.min() < LEAST_PRIOR:
            raise InputError(f"prior must lie in {LEAST_PRIOR}..0, eighths of a nat, got {array.min()}..{array.max()}")

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape [m, V]."""
        contexts, vocab = self.array.shape
        return contexts, vocab

    @property
    def digest(self) -> bytes:
        """Return the digest of all integers; it is computed once."""
        if not self._digest:
            blocks = (block_digest(self.block(rows)) for rows in block_ranges(self.shape))
            self._digest.append(join_digests(b"".join(blocks)))
        return self._digest[0]

    def block(self, rows: range) -> Eighths:
        """Return the prediction of some contexts, as a view."""
        return self.array[rows.start : rows.stop]


def in_eighths(logits: Reals, grid: PriorGrid = FINE_GRID) -> Eighths:
    """Round the log-probabilities of a model's logits [m, V] to eighths of a nat.

    >>> in_eighths(np.log(np.array([[0.5, 0.25, 0.25]]))).tolist()
    [[-6, -11, -11]]
    """
    return grid.round(exact_eighths(logits))


def exact_eighths(logits: Reals) -> Floats:
    """Return log-probabilities in eighths of a nat, in double precision, with at most one temporary of that size."""
    exact: Floats = np.subtract(logits, np.max(logits, axis=-1, keepdims=True), dtype=np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    exact *= EIGHTHS_PER_NAT
    return exact


def make_prior(logits: Reals, grid: PriorGrid = FINE_GRID) -> ArrayPrior:
    """Turn a model's logits [m, V] into a prior."""
    return ArrayPrior(in_eighths(logits, grid))


def whole_prior(plan: Plan) -> Eighths | None:
    """Return all of the plan's prior, if it has one; raise `InputError` for one of another shape."""
    if plan.prior is None:
        return None
    if tuple(plan.prior.shape) != plan.shape:
        raise InputError(f"prior must have the plan's shape {plan.shape}, got {tuple(plan.prior.shape)}")
    return plan.prior.block(range(plan.contexts))
