"""Stochastic rounding to equal levels in each row's own range.

After D. Alistarh, D. Grubic, J. Li, R. Tomioka and M. Vojnovic, *QSGD: communication-efficient SGD via gradient
quantization and encoding*, NeurIPS 2017; with a range for each row in place of a norm, which suits logits better. A
value between two levels goes to the upper one with a probability that makes it right on average. The decoder does
not know the draw, so the error has up to twice the variance of a subtractive dither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import Bytes, Floats32, RowCodec, read_half, write_half_up
from fpld.codecs.dither import Dither
from fpld.codecs.uniform.codec import uniform_error_bias
from fpld.codecs.uniform.layout import make_layout, pack_symbols, unpack_symbols
from fpld.types import Decoded

if TYPE_CHECKING:
    from fpld.types import Ints, Plan, Reals

HEADER = 2  # the range of a row, float16
MOST_BITS = 16


@dataclass(frozen=True)
class StochasticCodec(RowCodec):
    """Round at random between levels 0, step, 2 step, ... of the row's range; symbols are packed as in `uniform`."""

    code: int = 32801

    def least_bytes(self, vocab: int) -> int:
        """Return the bytes of a header and a bit for each coordinate."""
        return HEADER + -(-vocab // 8)

    def most_bytes(self, vocab: int) -> int:
        """Return the bytes at 16 bits for each coordinate."""
        return HEADER + vocab * MOST_BITS // 8

    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """State the range, then the levels."""
        low = x.min(axis=1, keepdims=True)
        header = write_half_up(x.max(axis=1, keepdims=True) - low)
        span = read_half(header)
        place = np.divide(x - low, span, out=np.zeros_like(x), where=span > 0)
        layout = make_layout(plan.vocab, size - HEADER)
        symbols = np.clip(self.round(place, layout.levels(), plan, rows), 0, layout.levels() - 1)
        return np.concatenate([header, pack_symbols(symbols, layout)], axis=1)

    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> Decoded:
        """Return the level of each coordinate, the middle of the range at zero."""
        span = read_half(data[:, :HEADER], least=0.0)
        layout = make_layout(plan.vocab, data.shape[1] - HEADER)
        place, step = self.place(unpack_symbols(data[:, HEADER:], layout), layout.levels(), plan, rows)
        # y (1 - y) step^2 at the place y within a cell, which the decoder does not know: a sixth on average.
        variance = np.square(step * span) / 6
        return Decoded((place - 0.5) * span, variance, uniform_error_bias(variance))

    def round(self, place: Floats32, levels: Ints, plan: Plan, rows: range) -> Ints:
        """Round places in [0, 1] to one of `levels` levels, without bias."""
        draw = Dither.derive(plan.run_key, round=plan.round, node=plan.node).block(rows, plan.vocab) + 0.5
        return np.floor(place * (levels - 1) + draw).astype(np.int64)

    def place(self, symbols: Ints, levels: Ints, plan: Plan, rows: range) -> tuple[Reals, Reals]:
        """Return the place in [0, 1] of each level, and the step."""
        step = 1.0 / (levels - 1)
        return symbols * step, step
