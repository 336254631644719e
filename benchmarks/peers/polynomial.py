"""Top-k with a polynomial tail: indices in order of rank, a few exact values, the others a curve over the rank.

After the logit compression of DistillKit (Arcee AI): terms 1, r, r^2 and sqrt(r), one value in eight exact, without
its optional residuals. A token costs little more than its index, so nearly twice as many fit as in plain top-k; the
curve misses their values by as much as they scatter around it. Unsent tokens share one floor, as in `topk`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import Bytes, Floats32, RowCodec, from_bits, index_bits, pad, read_half, to_bits, write_half
from benchmarks.peers.topk import fill, floor, largest
from fpld.codecs import CodecTraits
from fpld.errors import FrameError

if TYPE_CHECKING:
    from fpld.types import Decoded, Plan

SHARE = 8  # one value in so many is exact
TERMS = 4
HEADER = 2 + 4 * TERMS  # the floor as float16, terms as float32
LEAST = 16  # tokens
LIMIT = 1e6  # no curve of ours is larger


@dataclass(frozen=True)
class PolynomialCodec(RowCodec):
    """Send the ranking of as many tokens as the budget holds, and a curve for their logits."""

    code: int = 32805
    traits = CodecTraits(
        seeks=True, refines=False
    )  # a floor for tokens that are not sent has a meaning for logits only

    def least_bytes(self, vocab: int) -> int:
        """Return the bytes of a header and a few tokens."""
        return _size(vocab, min(LEAST, vocab))

    def most_bytes(self, vocab: int) -> int:
        """Return the bytes of all tokens."""
        return _size(vocab, vocab)

    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """State the floor, the exact values, the curve's terms and the tokens in order of rank."""
        count = _count(plan.vocab, size)
        top = largest(x, count)
        x = x - x.max(axis=1, keepdims=True)
        values = np.take_along_axis(x, top, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        top = np.take_along_axis(top, order, axis=1)
        values = np.take_along_axis(values, order, axis=1)
        exact = _exact(count)
        terms = np.einsum("ij,jk->ik", values[:, exact:], _fit(count - exact)).astype("<f4")  # the same for any block
        indices = np.packbits(to_bits(top, index_bits(plan.vocab)), axis=1)
        parts = [write_half(floor(x, top)), terms.view(np.uint8), write_half(values[:, :exact]), indices]
        return pad(np.concatenate(parts, axis=1), size)

    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> Decoded:
        """Evaluate the curve at every rank."""
        count = _count(plan.vocab, data.shape[1])
        exact = _exact(count)
        width = index_bits(plan.vocab)
        stated = np.ascontiguousarray(data[:, 2:HEADER]).view("<f4")
        if not (np.abs(stated) < LIMIT).all():
            raise FrameError("payload holds a curve that no encoder writes")
        terms = stated.astype(np.float64)
        head = read_half(data[:, HEADER : HEADER + 2 * exact])
        curve = (terms @ _powers(count - exact).T).astype(np.float32)
        bits = np.unpackbits(data[:, HEADER + 2 * exact :], axis=1)[:, : count * width]
        return fill(read_half(data[:, :2]), np.concatenate([head, curve], axis=1), from_bits(bits, width), plan.vocab)


def _exact(count: int) -> int:
    return max(count // SHARE, 1)


def _size(vocab: int, count: int) -> int:
    return HEADER + 2 * _exact(count) + -(-count * index_bits(vocab) // 8)


def _count(vocab: int, size: int) -> int:
    """Return the most tokens that fit into a row of `size` bytes."""
    count = min(8 * (size - HEADER) // index_bits(vocab), vocab)
    while _size(vocab, count) > size:
        count -= max((_size(vocab, count) - size) * 8 // (index_bits(vocab) + 16), 1)
    return count


def _powers(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the terms at each rank, [count, TERMS]; ranks run from 0 to 1."""
    rank = np.arange(count) / count
    return np.stack([np.ones(count), rank, rank**2, np.sqrt(rank)], axis=1)


@lru_cache(maxsize=16)
def _fit(count: int) -> Floats32:
    """Return the matrix [count, TERMS] that takes values to the terms of least squares."""
    inverse: Floats32 = np.linalg.pinv(_powers(count)).T.astype(np.float32)
    return inverse
