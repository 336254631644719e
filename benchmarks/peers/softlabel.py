"""Soft-label quantization: probabilities in equal steps of 1 / (2^b - 1).

After F. Sattler, A. Marban, R. Rischke and W. Samek, *CFD: communication-efficient federated distillation via
soft-label quantization and delta coding*, 2021; one round, so without the delta. A row states how many
steps each token's probability has; the most likely token always has one, so one bit is the hard label. Most tokens have
none: a row lists those that have some, or all if that is shorter (where the paper has an entropy coder), with the
largest b that fits. Tokens without a step share a floor, as in `topk`: a mean of logits cannot take log 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import Bytes, Floats32, RowCodec, from_bits, index_bits, read_half, to_bits, write_half
from fpld.codecs import CodecTraits
from fpld.errors import FrameError
from fpld.types import Decoded

if TYPE_CHECKING:
    from fpld.types import Ints, Plan

HEADER = 6  # floor (float16), b, number of tokens listed (24 bits; all ones: every token)
MOST_BITS = 24
ALL = 2**24 - 1


@dataclass(frozen=True)
class SoftLabelCodec(RowCodec):
    """Send quantized probabilities, as fine as the budget holds."""

    code: int = 32806
    traits = CodecTraits(seeks=True, refines=False)  # codes probabilities

    def least_bytes(self, vocab: int) -> int:
        """Return the bytes of a header and a hard label (or, at one bit, two tokens of just a half each)."""
        return HEADER + -(-2 * (index_bits(vocab) + 1) // 8)

    def most_bytes(self, vocab: int) -> int:
        """Return the bytes of all probabilities at 24 bits."""
        return HEADER + vocab * MOST_BITS // 8

    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """State the floor, b and the tokens with their steps, row by row."""
        log_p = x.astype(np.float64) - x.max(axis=1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
        p = np.exp(log_p)
        out = np.zeros((len(x), size), np.uint8)
        for row, depth in enumerate(_depths(p, 8 * (size - HEADER))):
            counts = np.floor(p[row] * (2**depth - 1) + 0.5).astype(np.int64)
            counts[p[row].argmax()] = max(counts.max(), 1)
            tokens = np.nonzero(counts)[0]
            rest = log_p[row][counts == 0]
            floor = rest.max() + np.log(np.exp(rest - rest.max()).mean()) if rest.size else 0.0
            listed = tokens.size * (index_bits(plan.vocab) + depth) <= plan.vocab * depth
            body = _list(tokens, counts, plan.vocab, depth) if listed else to_bits(counts[None], depth)[0]
            head = [depth, *int(tokens.size if listed else ALL).to_bytes(3, "little")]
            out[row, :2] = write_half(np.array([[max(floor, -6e4)]]))[0]
            out[row, 2:HEADER] = head
            out[row, HEADER : HEADER + -(-body.size // 8)] = np.packbits(body)
        return out

    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> Decoded:
        """Return the logarithm of the probabilities."""
        rest = read_half(data[:, :2])
        values = np.repeat(rest, plan.vocab, axis=1)
        variance = np.empty_like(values)
        for row in range(len(data)):
            depth, tokens, counts = _read(data[row], plan.vocab)
            step = 1.0 / (2**depth - 1)
            values[row, tokens] = np.log(counts * step)
            variance[row] = np.square(np.log(step / 2) - rest[row])
            variance[row, tokens] = 1 / (12.0 * counts**2)  # of log p, for a step that is uniform
        unbiased = np.zeros((1, 1), np.float32)  # probabilities are rounded, not their logarithms
        return Decoded(values, variance, unbiased)


def _depths(p: np.ndarray[tuple[int, ...], np.dtype[np.float64]], room: int) -> Ints:
    """Return the largest b of each row whose steps fit into `room` bits."""
    vocab = p.shape[1]
    depths = np.ones(len(p), np.int64)
    for depth in range(2, MOST_BITS + 1):
        tokens = np.maximum((p >= 0.5 / (2**depth - 1)).sum(axis=1), 1)
        # One token more than counted: the threshold and the rounding may differ in the last bit of a float.
        fits = np.minimum((tokens + 1) * (index_bits(vocab) + depth), vocab * depth) <= room
        depths = np.where(fits, depth, depths)
    return depths


def _list(tokens: Ints, counts: Ints, vocab: int, depth: int) -> Bytes:
    parts = [to_bits(tokens[None], index_bits(vocab)), to_bits(counts[tokens][None], depth)]
    bits: Bytes = np.concatenate(parts, axis=1)[0]
    return bits


def _read(data: Bytes, vocab: int) -> tuple[int, Ints, Ints]:
    """Return b, the tokens that have steps and how many of them; a row that no encoder writes is refused."""
    depth = int(data[2])
    listed = int.from_bytes(data[3:HEADER].tobytes(), "little")
    bits = np.unpackbits(data[None, HEADER:], axis=1)
    width = index_bits(vocab)
    used = vocab * depth if listed == ALL else listed * (width + depth)
    if not 1 <= depth <= MOST_BITS or listed == 0 or used > bits.size:
        raise FrameError("payload states more tokens or bits than it holds")
    if listed == ALL:
        counts = from_bits(bits[:, :used], depth)[0]
        tokens = np.nonzero(counts)[0]
        return depth, tokens, counts[tokens]
    tokens = from_bits(bits[:, : listed * width], width)[0]
    counts = from_bits(bits[:, listed * width : used], depth)[0]
    if (tokens >= vocab).any() or (counts == 0).any():
        raise FrameError(f"payload names a token beyond the {vocab} of the vocabulary, or one without a probability")
    return depth, tokens, counts
