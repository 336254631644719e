"""The uniform codec: the paper's channel on the wire, with honest symbols and fractional bits.

Each context takes the same share of the payload (to a byte). With a clip, all of it codes coordinates. Without
one, a context first states its own centre and half-range (two float16 numbers, 32 bits of its share): on
logits of real models that is worth about a bit per coordinate.

**The channel** is float32 and integers, operation by operation, so that every machine decodes the same values. With N
levels on the half-range h around c, the step is 2h / (N - 1). The dither y is a 16-bit number; a value is placed on a
grid of 2^16 points a step, i = (x - c) 2^16 / step + (N - 1) 2^15 to the nearest integer, and its symbol is

    k = (i + 65535 - y) >> 16,    so that    z = 2^16 k + y    lies in i .. i + 65535, each equally likely.

The decoder takes z less its mean distance to i. The error is at most half a step, uniform, and its mean is zero.

`fpld.codecs.uniform.layout` says where the symbols lie. Here is the arithmetic on arrays, the reference; where there is
numba, `fpld.codecs.uniform.fast` computes the same bytes and values in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fpld import kernels, validation
from fpld.codecs.base import MAX_LOGIT, CodecTraits, SeekReader, checked_blocks, stacked
from fpld.codecs.dither import Dither
from fpld.codecs.uniform import layout as layouts
from fpld.codecs.uniform.layout import MAX_BITS, RANGE_BYTES, level_runs, pack_symbols, payload_layout, unpack_symbols
from fpld.errors import InputError
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    from fpld.codecs.base import Reader
    from fpld.codecs.dither import Units
    from fpld.types import Bytes, Floats, Floats32, Ints, Plan, Reals

__all__ = ["MAX_BITS", "RANGE_BYTES", "UNIFORM", "UniformCodec"]

MAX_RANGED_LOGIT = MAX_LOGIT / 2  # in a stated range: with two levels a decoded value may lie as far beyond it again
_GRID_POINTS = 65536.0  # of a step


@dataclass(frozen=True, slots=True)
class UniformCodec:
    """Code every coordinate with the same number of bits, fractional if need be, from one bit up.

    `reference` leaves the kernels out: the same bytes and values, slowly.

    >>> from fpld.codecs import decode, encode
    >>> from fpld.types import Plan
    >>> plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=8, vocab=100, bits=237.0, clip=2.0)
    >>> logits = np.linspace(-2, 2, 800).reshape(8, 100)
    >>> payload = encode(UniformCodec(), logits, plan)
    >>> decoded = decode(UniformCodec(), payload, plan)
    >>> error = abs(decoded.values - logits)
    >>> 8 * len(payload) <= 8 * 237, bool((error <= np.sqrt(3 * decoded.variance) + 1e-6).all())
    (True, True)
    """

    code: int = 1
    reference: bool = False
    traits: ClassVar[CodecTraits] = CodecTraits(dither=True, seeks=True)

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget in bits per probe context: a bit per coordinate, and a context's own range."""
        return layouts.least_bits(plan)

    def payload_bytes(self, plan: Plan) -> int:
        """Return the exact length of a payload: the whole bytes of the budget, less what could be of no use."""
        return layouts.payload_bytes(plan)

    def encode(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Clip (or range), dither, quantize and pack blocks of contexts as they come: no more than a block is held."""
        size = layouts.payload_bytes(plan)
        buffer = BytesIO(bytes(size))  # one piece of memory: written in place, and given away without a copy
        payload = np.frombuffer(buffer.getbuffer(), np.uint8)
        for rows, logits in checked_blocks(blocks, plan):
            self._encode(logits, rows, plan, payload)
        del payload
        return buffer.getvalue()

    def reader(self, payload: bytes | memoryview, plan: Plan) -> Reader:
        """Return a reader; any bytes of the right length and with sound ranges can be decoded."""
        layouts.check_payload_size(payload, plan)

        def check() -> None:
            layouts.read_ranges(payload, plan, range(plan.contexts))

        return SeekReader(plan, lambda rows: self._decode(payload, plan, rows), check)

    def _fast(self) -> ModuleType | None:
        """Import the kernels when they are first used, since they bring numba along."""
        if self.reference or not kernels.numba_available():
            return None
        from fpld.codecs.uniform import fast

        return fast

    def _encode(self, logits: Reals, block: range, plan: Plan, payload: Bytes) -> None:
        """Encode a block of contexts into its place in the payload."""
        shares = payload_layout(plan, payload.size)
        fast = self._fast()
        dither = Dither.of(plan)
        keys = dither.keys(block)
        for layout, rows in shares.blocks(block):
            within = slice(rows.start - block.start, rows.stop - block.start)
            part = np.ascontiguousarray(logits[within], np.float32)
            first = shares.offset(rows.start)
            out = payload[first : first + len(rows) * layout.size].reshape(len(rows), layout.size)
            pairs = None
            if fast:
                pairs = fast.encode_block(part, layout, plan.clip, MAX_RANGED_LOGIT, keys[within], dither, out)
            if pairs is None:
                pairs = _ranges(part, rows, plan)  # says what is wrong, if something is
                units = dither.units(rows, plan.vocab)
                ranges = pairs[:, 0].astype(np.float64), pairs[:, 1].astype(np.float64)
                out[:] = pack_symbols(quantize(part, *ranges, layout.levels(), units), layout)
            if shares.range_bytes:
                place = slice(RANGE_BYTES * rows.start, RANGE_BYTES * rows.stop)
                payload[place] = np.frombuffer(pairs.astype("<f2").tobytes(), np.uint8)

    def _decode(self, payload: bytes | memoryview, plan: Plan, rows: range) -> Decoded:
        """Unpack and dequantize a block of contexts."""
        centres, halves = layouts.read_ranges(payload, plan, rows)
        shares = payload_layout(plan, len(payload))
        fast = self._fast()
        values = np.zeros((len(rows), plan.vocab), np.float32)
        parts = []
        counts = []
        for layout, block in shares.blocks(rows):
            out = slice(block.start - rows.start, block.stop - rows.start)
            parts.append(error_moments(halves[out], level_runs(layout)))
            counts.append(len(block))
            if fast:
                fast.add_nodes([payload], [plan], block, values[out])
            else:
                data = np.frombuffer(payload, np.uint8, len(block) * layout.size, shares.offset(block.start))
                symbols = unpack_symbols(data.reshape(len(block), layout.size), layout)
                units = Dither.of(plan).units(block, plan.vocab)
                values[out] = dequantize(symbols, centres[out], halves[out], layout.levels(), units)
        return Decoded(values, *(stacked(each, counts) for each in zip(*parts, strict=True)))


def _ranges(part: Floats32, rows: range, plan: Plan) -> Floats:
    """Check logits; return centre and half-range of each context, as float16 numbers, the range rounded up."""
    validation.finite(part, rows.start)
    if plan.clip is not None:
        return np.broadcast_to(np.array([0.0, plan.clip]), (len(part), 2))
    bottom = part.min(axis=1).astype(np.float64)
    top = part.max(axis=1).astype(np.float64)
    if max(top.max(), -bottom.min()) > MAX_RANGED_LOGIT:
        worst = rows.start + int(np.maximum(top, -bottom).argmax())
        raise InputError(
            f"logits must lie within ±{MAX_RANGED_LOGIT:g} without a clip, got more at context {worst}; set clip"
        )
    centre = ((top + bottom) / 2).astype(np.float16)
    reach = np.maximum(top - centre, centre - bottom)
    half = reach.astype(np.float16)
    half = np.where(half < reach, np.nextafter(half, np.float16(np.inf)), half)
    return np.stack([centre, half], axis=1).astype(np.float64)


def step_sizes(halves: Floats, levels: Ints) -> Floats:
    """Return the step of each coordinate, [rows, V]; one level has none."""
    return np.where(levels == 1, 0.0, 2.0 * halves[:, None] / np.maximum(levels - 1, 1))


def quantize(values: Floats32, centres: Floats, halves: Floats, levels: Ints, units: Units) -> Ints:
    """Return the symbols of values [rows, V]; what lies outside the range is clipped."""
    with np.errstate(divide="ignore"):
        slope = np.where(halves[:, None] == 0, 0.0, _GRID_POINTS * (levels - 1) / (2.0 * halves[:, None])).astype(
            np.float32
        )
    offset = ((levels - 1) * 32768.0 + 0.5).astype(np.float32)
    top = ((levels - 1) * _GRID_POINTS).astype(np.float32)
    place = (values - centres[:, None].astype(np.float32)) * slope + offset
    index = np.minimum(np.maximum(place, np.float32(0)), top).astype(np.int64)
    symbols: Ints = index + (65535 - units.astype(np.int64)) >> 16
    return symbols


def dequantize(symbols: Ints, centres: Floats, halves: Floats, levels: Ints, units: Units) -> Floats32:
    """Return the values of symbols [rows, V]."""
    step = step_sizes(halves, levels)
    base = np.where(levels == 1, centres[:, None], centres[:, None] - step * (levels / 2.0 - 2.0**-17))
    z = ((symbols << 16) | units).astype(np.float32)
    values: Floats32 = z * (step / _GRID_POINTS).astype(np.float32) + base.astype(np.float32)
    return values


def error_moments(halves: Floats, runs: Sequence[tuple[int, int]]) -> tuple[Floats32, Floats32]:
    """Return the error's variance and its bias, see `fpld.types.Decoded`: each [rows or 1, V or 1].

    `runs` of coordinates have the same number of levels (`fpld.codecs.uniform.layout.level_runs`). The variance is
    step^2 / 12; that of a value which is not sent is its largest square.
    """
    if (halves == halves[:1]).all():
        halves = halves[:1]  # one clip for all contexts
    kinds, counts = np.array(runs).T
    step = step_sizes(halves, kinds)
    variance = np.where(kinds == 1, halves[:, None] ** 2, step * step / 12.0)
    bias = uniform_error_bias(variance).astype(np.float32)
    variance = variance.astype(np.float32)
    if len(runs) == 1:
        return variance, bias
    return np.repeat(variance, counts, axis=1), np.repeat(bias, counts, axis=1)


def uniform_error_bias(variance: Floats) -> Floats:
    """Return log E[exp(error)] of an error that is uniform over a step: log(sinh(h) / h) for half a step h.

    >>> uniform_error_bias(np.array([0.0, 3.0])).round(4).tolist()  # sinh(3) / 3 is 3.3393
    [0.0, 1.2058]
    """
    half = np.sqrt(3 * variance)
    safe = np.maximum(half, 1e-3)  # below, there would be 0 / 0
    result: Floats = np.where(half < 1e-3, half**2 / 6, safe + np.log(-np.expm1(-2 * safe) / (2 * safe)))
    return result


UNIFORM = UniformCodec()
