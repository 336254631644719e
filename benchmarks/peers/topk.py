"""Top-k: the largest logits of a row as indices and float16 values, all others at a floor.

What most users of distillation do to store a teacher's logits. The floor, stated in the row, is the log of the
others' mean weight: the constant that has the least KL. Indices are a list, or a bitmap where that is shorter.
Biased, and the error of different nodes does not cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import (
    Bytes,
    Floats32,
    RowCodec,
    from_bits,
    index_bits,
    pad,
    read_half,
    to_bits,
    write_half,
)
from fpld.codecs import CodecTraits
from fpld.errors import FrameError
from fpld.types import Decoded

if TYPE_CHECKING:
    from fpld.types import Ints, Plan

HEADER = 2  # the floor of a row, float16
VALUE = 2


@dataclass(frozen=True)
class TopKCodec(RowCodec):
    """Send as many of a row's largest logits as the budget holds."""

    code: int = 32804
    traits = CodecTraits(
        seeks=True, refines=False
    )  # a floor for tokens that are not sent has a meaning for logits only

    def least_bytes(self, vocab: int) -> int:
        """Return the bytes of a floor, one index and one value."""
        return HEADER + VALUE + -(-index_bits(vocab) // 8)

    def most_bytes(self, vocab: int) -> int:
        """Return the bytes of a bitmap and every value."""
        return HEADER + -(-vocab // 8) + VALUE * vocab

    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """State the floor, the k values and where they stand, in the order of the vocabulary."""
        count, as_map = _count(plan.vocab, size)
        top = np.sort(largest(x, count), axis=1)
        x = x - x.max(axis=1, keepdims=True)  # float16 is finest near zero, where the weight is
        values = np.take_along_axis(x, top, axis=1)
        if as_map:
            where = np.zeros(x.shape, np.uint8)
            np.put_along_axis(where, top, np.uint8(1), axis=1)
        else:
            where = to_bits(top, index_bits(plan.vocab))
        parts = [write_half(floor(x, top)), write_half(values), np.packbits(where, axis=1)]
        return pad(np.concatenate(parts, axis=1), size)

    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> Decoded:
        """Put the values where they belong and the floor elsewhere."""
        count, as_map = _count(plan.vocab, data.shape[1])
        numbers = read_half(data[:, : HEADER + VALUE * count])
        where = np.unpackbits(data[:, HEADER + VALUE * count :], axis=1)
        if as_map:
            if (where[:, : plan.vocab].sum(axis=1, dtype=np.int64) != count).any():
                raise FrameError(f"payload must mark {count} tokens of each context")
            top = np.nonzero(where[:, : plan.vocab])[1].reshape(len(data), count)
        else:
            top = from_bits(where[:, : count * index_bits(plan.vocab)], index_bits(plan.vocab))
        return fill(numbers[:, :1], numbers[:, 1:], top, plan.vocab)


def largest(x: Floats32, count: int) -> Ints:
    """Return the indices [n, k] of the k largest values of each row, in no order."""
    vocab = x.shape[1]
    return np.argpartition(x, vocab - count, axis=1)[:, vocab - count :]


def floor(x: Floats32, top: Ints) -> Floats32:
    """Return the log of the mean weight of all tokens but those in `top`, [n, 1]; zero if there are no others."""
    others = x.shape[1] - top.shape[1]
    if others == 0:
        return np.zeros((len(x), 1), np.float32)
    rest = x.copy()
    np.put_along_axis(rest, top, np.float32(-np.inf), axis=1)
    most = rest.max(axis=1, keepdims=True)
    mean = np.exp(rest - most).sum(axis=1, keepdims=True) / np.float32(others)
    result: Floats32 = most + np.log(mean)
    return result


def fill(rest: Floats32, values: Floats32, top: Ints, vocab: int) -> Decoded:
    """Return rows with `values` at `top` and `rest` elsewhere, and a variance.

    The error of an unsent logit is not known; its square is put at that of the step from floor to the least value. The
    floor is the log of a mean weight: as a probability it has no bias.
    """
    if (top >= vocab).any():
        raise FrameError(f"payload names a token beyond the {vocab} of the vocabulary")
    out = np.repeat(rest, vocab, axis=1)
    np.put_along_axis(out, top, values, axis=1)
    variance = np.repeat(np.square(values.min(axis=1, keepdims=True) - rest), vocab, axis=1)
    np.put_along_axis(variance, top, np.float32(0), axis=1)
    return Decoded(out, variance, np.zeros((1, 1), np.float32))


def _count(vocab: int, size: int) -> tuple[int, bool]:
    """Return k, and whether the indices are a bitmap."""
    room = size - HEADER
    in_list = 8 * room // (8 * VALUE + index_bits(vocab))
    while VALUE * in_list + -(-in_list * index_bits(vocab) // 8) > room:
        in_list -= 1
    in_map = (room - -(-vocab // 8)) // VALUE
    return (min(in_map, vocab), True) if in_map >= in_list else (in_list, False)
