"""What the peers share: rows of equal size in bytes, checks at the border, bit packing.

Every context takes the same whole number of bytes, so a block of contexts is a slice of the payload. Rows are
centred before a peer sees them (softmax does not see the constant, and no peer pays for it), and every header and
scale is part of the row: the bits of a peer are eight times the bytes that it makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import validation
from fpld.codecs import CodecTraits, SeekReader
from fpld.codecs.base import checked_blocks, stacked
from fpld.errors import BudgetError, FrameError, InputError
from fpld.numerics import split
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from fpld.codecs import Reader
    from fpld.types import Ints, Plan, Reals

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Floats32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

LIMIT = 32752.0  # so that a row's range is a float16
_BLOCK = 1 << 19  # coordinates at a time


class RowCodec(ABC):
    """Meet the contract of a codec, given how one block of centred rows becomes rows of bytes and back."""

    code: int
    traits = CodecTraits(seeks=True)

    @abstractmethod
    def least_bytes(self, vocab: int) -> int:
        """Return the fewest bytes of a row that the peer works with."""

    @abstractmethod
    def most_bytes(self, vocab: int) -> int:
        """Return the bytes of a row beyond which more are of no use."""

    @abstractmethod
    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """Code centred rows [n, V] as bytes [n, size]."""

    @abstractmethod
    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> Decoded:
        """Decode rows of bytes."""

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget in bits per probe context."""
        return 8.0 * self.least_bytes(plan.vocab)

    def row_bytes(self, plan: Plan) -> int:
        """Return the bytes of every row: the whole bytes of its share, less what is of no use."""
        share = plan.budget_bytes // plan.contexts
        if share < self.least_bytes(plan.vocab):
            raise BudgetError(f"bits must be at least {self.least_bits(plan):g} per probe context, got {plan.bits:g}")
        return min(share, self.most_bytes(plan.vocab))

    def encode(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Return the payload: all rows, one after the other."""
        size = self.row_bytes(plan)
        parts = []
        for block, logits in checked_blocks(blocks, plan):
            validation.finite(logits, block.start)
            if np.abs(logits).max(initial=0) > LIMIT:
                raise InputError(f"logits must lie within ±{LIMIT:g}, got {np.abs(logits).max():g}")
            for rows in split(len(logits), plan.vocab, _BLOCK):
                x = logits[rows.start : rows.stop].astype(np.float32)
                x -= x.mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
                parts.append(self.encode_rows(x, plan, _moved(rows, block.start), size))
        return np.concatenate(parts).tobytes()

    def reader(self, payload: bytes | memoryview, plan: Plan) -> Reader:
        """Return a reader of any block of contexts; values are those of centred rows."""
        size = self.row_bytes(plan)
        if len(payload) != size * plan.contexts:
            raise FrameError(f"payload must be {size * plan.contexts} bytes under this plan, got {len(payload)}")
        data = np.frombuffer(payload, np.uint8).reshape(plan.contexts, size)

        def decode(rows: range) -> Decoded:
            blocks = [_moved(block, rows.start) for block in split(len(rows), plan.vocab, _BLOCK)]
            parts = [self.decode_rows(data[block.start : block.stop], plan, block)[:3] for block in blocks]
            counts = [len(block) for block in blocks]
            return Decoded(*(stacked(each, counts).astype(np.float32) for each in zip(*parts, strict=True)))

        return SeekReader(plan, decode)


def _moved(rows: range, start: int) -> range:
    return range(start + rows.start, start + rows.stop)


def write_half(numbers: npt.NDArray[Any]) -> Bytes:
    """Write numbers [n, k] as little-endian float16 bytes [n, 2k]."""
    return np.ascontiguousarray(numbers.astype("<f2")).view(np.uint8).reshape(len(numbers), -1)


def write_half_up(numbers: npt.NDArray[Any]) -> Bytes:
    """Write numbers [n, 1] as float16 that are not smaller: a range must hold what lies in it."""
    half = numbers.astype(np.float16)
    return write_half(np.where(half < numbers, np.nextafter(half, np.float16(np.inf)), half))


def read_half(data: Bytes, *, least: float = -np.inf) -> Floats32:
    """Read float16 bytes [n, 2k] as numbers [n, k]; one that is not finite, or below `least`, is refused."""
    numbers = np.ascontiguousarray(data).view("<f2").astype(np.float32)
    if not np.isfinite(numbers).all() or (numbers < least).any():
        raise FrameError("payload holds a number that no encoder writes")
    return numbers


def to_bits(numbers: Ints, width: int) -> Bytes:
    """Write non-negative integers [n, k] as bits [n, k * width], most significant first, one byte a bit."""
    whole = 8 * -(-width // 8)
    octets = np.stack([(numbers >> shift).astype(np.uint8) for shift in range(whole - 8, -8, -8)], axis=-1)
    return np.unpackbits(octets, axis=-1)[..., whole - width :].reshape(len(numbers), -1)


def from_bits(bits: Bytes, width: int) -> Ints:
    """Read integers [n, k] from bits [n, k * width]."""
    whole = 8 * -(-width // 8)
    padded = np.zeros((len(bits), bits.shape[1] // width, whole), np.uint8)
    padded[..., whole - width :] = bits.reshape(len(bits), -1, width)
    numbers = np.zeros(padded.shape[:2], np.int64)
    for octet in np.moveaxis(np.packbits(padded, axis=-1), -1, 0):
        numbers = (numbers << 8) | octet
    return numbers


def pad(data: Bytes, size: int) -> Bytes:
    """Fill rows of bytes with zeros up to `size`."""
    return np.pad(data, ((0, 0), (0, size - data.shape[1])))


def index_bits(vocab: int) -> int:
    """Return the bits of a token's index."""
    return (vocab - 1).bit_length()
