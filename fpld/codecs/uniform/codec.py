"""The uniform codec: the paper's channel on the wire, with honest symbols and fractional bits.

Each context takes the same share of the payload (to a byte). With a clip, all of it codes coordinates. Without
one, a context first states its own centre and half-range (two float16 numbers, 32 bits of its share): on
logits of real models that is worth about a bit per coordinate. `fpld.codecs.uniform.channel` is the arithmetic,
`fpld.codecs.uniform.radix` the layout; where there is numba, `fpld.codecs.uniform.kernels` does both at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fpld import _check, compiled
from fpld.codecs.base import Traits
from fpld.codecs.blocks import SeekReader, checked_blocks, stacked
from fpld.codecs.dither import Dither
from fpld.codecs.uniform import channel, radix, shares
from fpld.codecs.uniform.shares import MAX_BITS, RANGE_BYTES
from fpld.errors import InputError
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    import numpy.typing as npt

    from fpld.codecs.base import Reader
    from fpld.types import Floats, Plan, Reals

    _Bytes = npt.NDArray[np.uint8]
    _Floats32 = npt.NDArray[np.float32]

__all__ = ["MAX_BITS", "RANGE_BYTES", "UNIFORM", "UniformCodec"]

_LIMIT = float(np.finfo(np.float16).max) / 2  # of logits whose ranges are stated in float16


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
    traits: ClassVar[Traits] = Traits(dither=True, seeks=True)

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget in bits per probe context: a bit per coordinate, and a context's own range."""
        return shares.least_bits(plan)

    def payload_bytes(self, plan: Plan) -> int:
        """Return the exact length of a payload: the whole bytes of the budget, less what could be of no use."""
        return shares.payload_bytes(plan)

    def encode(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Clip (or range), dither, quantize and pack blocks of contexts as they come: no more than a block is held."""
        size = shares.payload_bytes(plan)
        buffer = BytesIO(bytes(size))  # one piece of memory: written in place, and given away without a copy
        payload = np.frombuffer(buffer.getbuffer(), np.uint8)
        for rows, logits in checked_blocks(blocks, plan):
            self._encode(logits, rows, plan, payload)
        del payload
        return buffer.getvalue()

    def reader(self, payload: bytes | memoryview, plan: Plan) -> Reader:
        """Return a reader; any bytes of the right length and with sound ranges can be decoded."""
        shares.check_size(payload, plan)

        def check() -> None:
            shares.read_ranges(payload, plan, range(plan.contexts))

        return SeekReader(plan, lambda rows: self._decode(payload, plan, rows), check)

    def _fast(self) -> ModuleType | None:
        """Import the kernels when they are first used, since they bring numba along."""
        if self.reference or not compiled.available():
            return None
        from fpld.codecs.uniform import fast

        return fast

    def _encode(self, logits: Reals, block: range, plan: Plan, payload: _Bytes) -> None:
        """Encode a block of contexts into its place in the payload."""
        shared, fast, dither = shares.shares_of(plan, payload.size), self._fast(), Dither.of(plan)
        keys = dither.keys(block)
        for layout, rows in shared.blocks(block):
            within = slice(rows.start - block.start, rows.stop - block.start)
            part = np.ascontiguousarray(logits[within], np.float32)
            first = shared.at(rows.start)
            out = payload[first : first + len(rows) * layout.size].reshape(len(rows), layout.size)
            pairs = None
            if fast:
                pairs = fast.encode(part, layout, plan.clip, _LIMIT, keys[within], dither, out)
            if pairs is None:
                pairs = _ranges(part, rows, plan)  # says what is wrong, if something is
                units = dither.units(rows, plan.vocab)
                ranges = pairs[:, 0].astype(np.float64), pairs[:, 1].astype(np.float64)
                out[:] = radix.pack(channel.quantize(part, *ranges, layout.levels(), units), layout)
            if shared.side:
                place = slice(RANGE_BYTES * rows.start, RANGE_BYTES * rows.stop)
                payload[place] = np.frombuffer(pairs.astype("<f2").tobytes(), np.uint8)

    def _decode(self, payload: bytes | memoryview, plan: Plan, rows: range) -> Decoded:
        """Unpack and dequantize a block of contexts."""
        centres, halves = shares.read_ranges(payload, plan, rows)
        shared, fast = shares.shares_of(plan, len(payload)), self._fast()
        values = np.zeros((len(rows), plan.vocab), np.float32)
        parts, counts = [], []
        for layout, block in shared.blocks(rows):
            out = slice(block.start - rows.start, block.stop - rows.start)
            parts.append(channel.errors(halves[out], radix.runs(layout)))
            counts.append(len(block))
            if fast:
                fast.add([payload], [plan], block, values[out])
            else:
                data = np.frombuffer(payload, np.uint8, len(block) * layout.size, shared.at(block.start))
                symbols = radix.unpack(data.reshape(len(block), layout.size), layout)
                units = Dither.of(plan).units(block, plan.vocab)
                values[out] = channel.dequantize(symbols, centres[out], halves[out], layout.levels(), units)
        return Decoded(values, *(stacked(each, counts) for each in zip(*parts, strict=True)))


def _ranges(part: _Floats32, rows: range, plan: Plan) -> Floats:
    """Check logits; return centre and half-range of each context, as float16 numbers, the range rounded up."""
    _check.finite(part, rows.start)
    if plan.clip is not None:
        return np.broadcast_to(np.array([0.0, plan.clip]), (len(part), 2))
    bottom, top = part.min(axis=1).astype(np.float64), part.max(axis=1).astype(np.float64)
    if max(top.max(), -bottom.min()) > _LIMIT:
        worst = rows.start + int(np.maximum(top, -bottom).argmax())
        raise InputError(f"logits must lie within ±{_LIMIT:g} without a clip, got more at context {worst}; set clip")
    centre = ((top + bottom) / 2).astype(np.float16)
    reach = np.maximum(top - centre, centre - bottom)
    half = reach.astype(np.float16)
    half = np.where(half < reach, np.nextafter(half, np.float16(np.inf)), half)
    return np.stack([centre, half], axis=1).astype(np.float64)


UNIFORM = UniformCodec()
