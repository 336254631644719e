"""Top-k with a polynomial tail: indices in order of rank, a few exact values, the others a curve over the rank.

After the logit compression of DistillKit (Arcee AI), with the terms 1, r, r^2 and sqrt(r) and sixteen exact
values, without its optional residuals. A token costs its index only, so about twice as many fit as in plain top-k; the
curve misses their values by as much as they scatter around it. Unsent tokens share one floor, as in `topk`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import Bytes, Floats32, RowCodec, from_bits, index_bits, pad, read_half, to_bits, write_half
from benchmarks.peers.topk import fill, floor, largest
from fpld.errors import FrameError

if TYPE_CHECKING:
    from fpld.types import Plan, Reals

EXACT = 16
TERMS = 4
HEADER = 2 + 2 * EXACT + 4 * TERMS  # floor and exact values as float16, terms as float32
CURVED = 8  # tokens on the curve at least: fewer do not fix it
LIMIT = 1e6  # no curve of ours is larger


@dataclass(frozen=True)
class PolynomialCodec(RowCodec):
    """Send the ranking of as many tokens as the budget holds, and a curve for their logits."""

    code: int = 32805

    def least_bytes(self, vocab: int) -> int:
        """Give the bytes of a header and the indices of the shortest curve."""
        return HEADER + -(-min(EXACT + CURVED, vocab) * index_bits(vocab) // 8)

    def most_bytes(self, vocab: int) -> int:
        """Give the bytes of all indices."""
        return HEADER + -(-vocab * index_bits(vocab) // 8)

    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """State the floor, the exact values, the curve's terms and the tokens in order of rank."""
        count = _count(plan.vocab, size)
        top = largest(x, count)
        x = x - x.max(axis=1, keepdims=True)
        values = np.take_along_axis(x, top, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        top, values = np.take_along_axis(top, order, axis=1), np.take_along_axis(values, order, axis=1)
        exact = np.zeros((len(x), EXACT), np.float32)
        exact[:, :count] = values[:, :EXACT]
        terms = np.zeros((len(x), TERMS), "<f4")
        if count > EXACT:
            terms[:] = values[:, EXACT:] @ _fit(count - EXACT)
        indices = np.packbits(to_bits(top, index_bits(plan.vocab)), axis=1)
        parts = [write_half(floor(x, top)), write_half(exact), terms.view(np.uint8), indices]
        return pad(np.concatenate(parts, axis=1), size)

    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> tuple[Reals, Reals]:
        """Evaluate the curve at every rank."""
        count = _count(plan.vocab, data.shape[1])
        numbers = read_half(data[:, : 2 + 2 * EXACT])
        terms = np.ascontiguousarray(data[:, 2 + 2 * EXACT : HEADER]).view("<f4").astype(np.float64)
        if not (np.abs(terms) < LIMIT).all():
            raise FrameError("payload holds a curve that no encoder writes")
        bits = np.unpackbits(data[:, HEADER:], axis=1)[:, : count * index_bits(plan.vocab)]
        curve = terms @ _powers(max(count - EXACT, 1)).T
        values = np.concatenate([numbers[:, 1:], curve.astype(np.float32)], axis=1)[:, :count]
        return fill(numbers[:, :1], values, from_bits(bits, index_bits(plan.vocab)), plan.vocab)


def _count(vocab: int, size: int) -> int:
    return min(8 * (size - HEADER) // index_bits(vocab), vocab)


def _powers(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Give the terms at each rank, [count, TERMS]; ranks run from 0 to 1."""
    rank = np.arange(count) / count
    return np.stack([np.ones(count), rank, rank**2, np.sqrt(rank)], axis=1)


@lru_cache(maxsize=16)
def _fit(count: int) -> Floats32:
    """Give the matrix [count, TERMS] that takes values to the terms of least squares."""
    inverse: Floats32 = np.linalg.pinv(_powers(count)).T.astype(np.float32)
    return inverse
