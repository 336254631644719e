"""Plain casts: float16, and int8 with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import Bytes, Floats32, RowCodec, read_half, write_half, write_half_up
from fpld.codecs.uniform.codec import uniform_error_bias
from fpld.types import Decoded

if TYPE_CHECKING:
    from fpld.types import Plan


@dataclass(frozen=True)
class Float16Codec(RowCodec):
    """Send each logit as a little-endian float16."""

    code: int = 32807

    def least_bytes(self, vocab: int) -> int:
        """Return two bytes for each logit."""
        return 2 * vocab

    def most_bytes(self, vocab: int) -> int:
        """Return two bytes for each logit."""
        return 2 * vocab

    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """Cast."""
        return write_half(np.clip(x, -65504, 65504))

    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> Decoded:
        """Cast back; a float16 has eleven bits of precision."""
        values = read_half(data)
        variance = np.square(np.spacing(values.astype(np.float16)).astype(np.float32)) / 12
        return Decoded(values, variance, uniform_error_bias(variance))


@dataclass(frozen=True)
class Int8Codec(RowCodec):
    """Send each logit as one of 255 levels, symmetric around the middle of the row's range; the scale is a float16."""

    code: int = 32808

    def least_bytes(self, vocab: int) -> int:
        """Return a scale and a byte for each logit."""
        return 2 + vocab

    def most_bytes(self, vocab: int) -> int:
        """Return a scale and a byte for each logit."""
        return 2 + vocab

    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """State the range, then the nearest level of each logit."""
        low = x.min(axis=1, keepdims=True)
        high = x.max(axis=1, keepdims=True)
        header = write_half_up((high - low) / 2)
        half = read_half(header)
        levels = np.rint(np.divide(x - (high + low) / 2, half, out=np.zeros_like(x), where=half > 0) * 127)
        return np.concatenate([header, np.clip(levels, -127, 127).astype(np.int8).view(np.uint8)], axis=1)

    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> Decoded:
        """Multiply by the scale."""
        step = read_half(data[:, :2], least=0.0) / np.float32(127)
        variance = np.square(step) / 12
        return Decoded(data[:, 2:].view(np.int8) * step, variance, uniform_error_bias(variance))
