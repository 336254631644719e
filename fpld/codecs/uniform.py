"""The uniform codec: the paper's channel on the wire, with honest symbols and fractional bits.

Each context takes the same share of the payload (to a bit). With a clip, all of it codes coordinates. Without
one, a context first states its own centre and half-range (two float16 numbers, 32 bits of its share): on
logits of real models that is worth about a bit per coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld import _check
from fpld.codecs import radix
from fpld.dither import Dither
from fpld.errors import BudgetError, FrameError, InputError
from fpld.quantize import wire_quantizer
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fpld.types import Floats, Plan, Reals

MAX_BITS = 16  # per coordinate: beyond this a float32 logit has little more to say
RANGE_BYTES = 4  # centre and half-range of a context
_BLOCK = 1 << 19  # coordinates at a time

_Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class _Span(NamedTuple):
    """A run of contexts with the same layout, and the bit where it starts."""

    rows: range
    layout: radix.Layout
    start: int

    def bit(self, row: int) -> int:
        return self.start + (row - self.rows.start) * self.layout.bits


@dataclass(frozen=True, slots=True)
class UniformCodec:
    """Code every coordinate with the same number of bits, fractional if need be, from one bit up.

    >>> from fpld.types import Plan
    >>> plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=8, vocab=100, bits=237.0, clip=2.0)
    >>> logits = np.linspace(-2, 2, 800).reshape(8, 100)
    >>> payload = UniformCodec().encode(logits, plan)
    >>> values, variance = UniformCodec().decode(payload, plan)
    >>> 8 * len(payload) <= 8 * 237, bool((abs(values - logits) <= np.sqrt(3 * variance) + 1e-6).all())
    (True, True)
    """

    code: int = 1

    def least_bits(self, plan: Plan) -> float:
        """Give the least budget in bits per probe context: a bit per coordinate, and a context's own range."""
        return float(plan.vocab if plan.clip is not None else plan.vocab + 8 * RANGE_BYTES + 8)

    def payload_bytes(self, plan: Plan) -> int:
        """Give the exact length of a payload: the whole bytes of the budget, less what could be of no use."""
        if plan.bits < plan.vocab:
            raise BudgetError(
                f"bits must be at least {plan.vocab} per probe context (one bit per coordinate) for the uniform "
                f"codec, got {plan.bits:g}"
            )
        side = 0 if plan.clip is not None else RANGE_BYTES * plan.contexts
        if side and (plan.budget_bytes - side) * 8 < plan.contexts * plan.vocab:
            raise BudgetError(
                f"bits must be at least {self.least_bits(plan):g} per probe context without a clip "
                f"(each context states its own range in {8 * RANGE_BYTES} bits), got {plan.bits:g}; "
                "raise bits, or set clip"
            )
        return min(plan.budget_bytes, side + math.ceil(plan.contexts * plan.vocab * MAX_BITS / 8))

    def encode(self, logits: Reals, plan: Plan) -> bytes:
        """Clip (or range), dither, quantize and pack logits [m, V]."""
        size = self.payload_bytes(plan)
        logits = _check.logits(logits, plan.shape)
        side = b"" if plan.clip is not None else _state_ranges(logits)
        spans = _spans(plan, size - len(side))
        centres, halves = _read_ranges(side, plan)
        bits = (self._encode_rows(logits, plan, span, rows, centres, halves) for span, rows in _blocks(spans))
        return side + _pack(bits)

    def decode(
        self, payload: bytes | memoryview, plan: Plan, rows: range | None = None, dtype: npt.DTypeLike = np.float32
    ) -> Decoded:
        """Unpack and dequantize a block of contexts; the cost is that of the block."""
        size = self.payload_bytes(plan)
        if len(payload) != size:
            raise FrameError(f"payload must be {size} bytes under this plan, got {len(payload)}")
        rows = range(plan.contexts) if rows is None else _check.rows(rows, plan.contexts)
        split = 0 if plan.clip is not None else RANGE_BYTES * plan.contexts
        centres, halves = _read_ranges(payload[:split], plan)
        body = np.frombuffer(payload, np.uint8, offset=split)
        values = np.empty((len(rows), plan.vocab), dtype)
        variance = np.empty((len(rows), plan.vocab), dtype)
        for span, block in _blocks(_spans(plan, size - split), rows):
            out = slice(block.start - rows.start, block.stop - rows.start)
            quantizer = wire_quantizer(halves[block.start : block.stop], span.layout.levels())
            dither = Dither.of(plan).block(block, plan.vocab)
            symbols = radix.unpack(_read_bits(body, span, block), span.layout)
            values[out] = quantizer.decode(symbols, dither) + centres[block.start : block.stop]
            variance[out] = quantizer.variance
        return Decoded(values, variance)

    def _encode_rows(
        self, logits: Reals, plan: Plan, span: _Span, rows: range, centres: Floats, halves: Floats
    ) -> _Bytes:
        block = slice(rows.start, rows.stop)
        quantizer = wire_quantizer(halves[block], span.layout.levels())
        dither = Dither.of(plan).block(rows, plan.vocab)
        symbols = quantizer.encode(logits[block] - centres[block], dither)
        return radix.pack(symbols, span.layout).ravel()


def _spans(plan: Plan, size: int) -> list[_Span]:
    """Share `size` bytes out to the contexts: the first ones take a bit more, so that no bit is lost."""
    share, longer = divmod(8 * size, plan.contexts)
    spans = []
    if longer:
        spans.append(_Span(range(longer), radix.layout(plan.vocab, share + 1), 0))
    spans.append(_Span(range(longer, plan.contexts), radix.layout(plan.vocab, share), longer * (share + 1)))
    return spans


def _blocks(spans: list[_Span], rows: range | None = None) -> Iterator[tuple[_Span, range]]:
    """Cut the wanted rows into blocks that lie in one span and are small enough to work on."""
    for span in spans:
        first, last = span.rows.start, span.rows.stop
        if rows is not None:
            first, last = max(first, rows.start), min(last, rows.stop)
        stride = max(_BLOCK // span.layout.vocab, 1)
        for start in range(first, last, stride):
            yield span, range(start, min(start + stride, last))


def _pack(blocks: Iterator[_Bytes]) -> bytes:
    """Pack bits as they come: unpacked they take eight times the payload. What fills no byte waits for the next."""
    out, rest = bytearray(), np.empty(0, np.uint8)
    for block in blocks:
        bits = np.concatenate([rest, block])
        whole = len(bits) // 8 * 8
        out += np.packbits(bits[:whole]).tobytes()
        rest = bits[whole:]
    return bytes(out) + np.packbits(rest).tobytes()


def _read_bits(body: _Bytes, span: _Span, rows: range) -> _Bytes:
    first, last = span.bit(rows.start), span.bit(rows.stop)
    bits = np.unpackbits(body[first // 8 : -(-last // 8)])
    return bits[first % 8 : first % 8 + last - first].reshape(len(rows), span.layout.bits)


def _state_ranges(logits: Reals) -> bytes:
    """Write centre and half-range of each context as little-endian float16, the range rounded up."""
    top, bottom = logits.max(axis=1).astype(np.float64), logits.min(axis=1).astype(np.float64)
    limit = float(np.finfo(np.float16).max) / 2
    if max(top.max(), -bottom.min()) > limit:
        worst = int(np.maximum(top, -bottom).argmax())
        raise InputError(f"logits must lie within ±{limit:g} without a clip, got more at context {worst}; set clip")
    centre = ((top + bottom) / 2).astype("<f2")
    reach = np.maximum(top - centre, centre - bottom)
    half = reach.astype("<f2")
    half = np.where(half < reach, np.nextafter(half, np.float16(np.inf)), half)
    return np.stack([centre, half], axis=1).astype("<f2").tobytes()


def _read_ranges(side: bytes | memoryview, plan: Plan) -> tuple[Floats, Floats]:
    """Give centre and half-range of each context, [m, 1]; with a clip, zero and the clip."""
    if plan.clip is not None:
        return np.zeros((plan.contexts, 1)), np.full((plan.contexts, 1), plan.clip)
    pairs = np.frombuffer(side, "<f2").reshape(plan.contexts, 2).astype(np.float64)
    if not np.isfinite(pairs).all() or (pairs[:, 1] < 0).any():
        raise FrameError("payload states a range that is not a finite, non-negative number")
    return pairs[:, :1], pairs[:, 1:]
