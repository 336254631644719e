"""The uniform codec: the paper's channel on the wire, with honest symbols and fractional bits.

Each context takes the same share of the payload (to a byte). With a clip, all of it codes coordinates. Without
one, a context first states its own centre and half-range (two float16 numbers, 32 bits of its share): on
logits of real models that is worth about a bit per coordinate. `fpld.codecs.uniform.channel` is the arithmetic,
`fpld.codecs.uniform.radix` the layout; where there is numba, `fpld.codecs.uniform.kernels` does both at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import _check, compiled
from fpld.codecs.base import add_decoded
from fpld.codecs.dither import Dither
from fpld.codecs.uniform import channel, radix
from fpld.errors import BudgetError, FrameError, InputError
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

    import numpy.typing as npt

    from fpld.types import Floats, Ints, Plan, Reals

    _Bytes = npt.NDArray[np.uint8]
    _Floats32 = npt.NDArray[np.float32]

MAX_BITS = 15  # per coordinate: beyond this a float32 logit has little more to say
RANGE_BYTES = 4  # centre and half-range of a context
_BLOCK = 1 << 20  # coordinates at a time
_LIMIT = float(np.finfo(np.float16).max) / 2  # of logits whose ranges are stated in float16


class _Shares(NamedTuple):
    """How the payload is shared out: the first `longer` contexts have the first layout, the others the second."""

    side: int
    longer: int
    layouts: tuple[radix.Layout, radix.Layout]

    def at(self, row: int) -> int:
        """Return the byte where a context begins."""
        size = self.layouts[1].size
        return self.side + row * size + min(row, self.longer)

    def blocks(self, rows: range) -> Iterator[tuple[radix.Layout, range]]:
        """Cut rows into blocks of one layout that are small enough to work on."""
        for plan, first, last in ((self.layouts[0], 0, self.longer), (self.layouts[1], self.longer, rows.stop)):
            stride = max(_BLOCK // plan.vocab, 1)
            for start in range(max(first, rows.start), min(last, rows.stop), stride):
                yield plan, range(start, min(start + stride, last, rows.stop))


@dataclass(frozen=True, slots=True)
class UniformCodec:
    """Code every coordinate with the same number of bits, fractional if need be, from one bit up.

    `reference` leaves the kernels out: the same bytes and values, slowly.

    >>> from fpld.types import Plan
    >>> plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=8, vocab=100, bits=237.0, clip=2.0)
    >>> logits = np.linspace(-2, 2, 800).reshape(8, 100)
    >>> payload = UniformCodec().encode(logits, plan)
    >>> values, variance = UniformCodec().decode(payload, plan)
    >>> 8 * len(payload) <= 8 * 237, bool((abs(values - logits) <= np.sqrt(3 * variance) + 1e-6).all())
    (True, True)
    """

    code: int = 1
    reference: bool = False

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget in bits per probe context: a bit per coordinate, and a context's own range."""
        return float(plan.vocab if plan.clip is not None else plan.vocab + 8 * RANGE_BYTES + 8)

    def payload_bytes(self, plan: Plan) -> int:
        """Return the exact length of a payload: the whole bytes of the budget, less what could be of no use."""
        if plan.bits < plan.vocab:
            raise BudgetError(
                f"bits must be at least {plan.vocab} per probe context (one bit per coordinate) for the uniform "
                f"codec, got {plan.bits:g}"
            )
        side = _side(plan)
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
        return self._encode([_check.shape(logits, plan.shape)], plan, size)

    def encode_blocks(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Encode logits as they come, by blocks of contexts in order: no more than a block is held."""
        return self._encode(blocks, plan, self.payload_bytes(plan))

    def decode(
        self, payload: bytes | memoryview, plan: Plan, rows: range | None = None, dtype: npt.DTypeLike = np.float32
    ) -> Decoded:
        """Unpack and dequantize a block of contexts; the cost is that of the block."""
        rows = range(plan.contexts) if rows is None else _check.rows(rows, plan.contexts)
        centres, halves = self._ranges(payload, plan, rows)
        shares = _shares(plan.contexts, plan.vocab, _side(plan), len(payload))
        values = np.zeros((len(rows), plan.vocab), np.float32)
        parts = []
        for layout, block in shares.blocks(rows):
            out = slice(block.start - rows.start, block.stop - rows.start)
            parts.append(channel.variance(halves[out], layout.levels()))
            if kernels := self._kernels():
                _add(kernels, [payload], [plan], block, values[out], None, None)
            else:
                data = np.frombuffer(payload, np.uint8, len(block) * layout.size, shares.at(block.start))
                symbols = radix.unpack(data.reshape(len(block), layout.size), layout)
                units = Dither.of(plan).units(block, plan.vocab)
                values[out] = channel.dequantize(symbols, centres[out], halves[out], layout.levels(), units)
        widest = max((part.shape[1] for part in parts), default=1)
        same = [np.broadcast_to(part, (len(part), widest)) for part in parts] or [np.zeros((0, 1), np.float32)]
        variance = same[0] if len(same) == 1 else np.concatenate(same)
        return Decoded(values.astype(dtype, copy=False), variance.astype(dtype, copy=False))

    def check(self, payload: bytes | memoryview, plan: Plan) -> None:
        """Refuse a payload that cannot be decoded: any other bytes of the right length and with sound ranges can."""
        self._ranges(payload, plan, range(plan.contexts))

    def add(
        self,
        payloads: Sequence[bytes | memoryview],
        plans: Sequence[Plan],
        rows: range,
        total: _Floats32,
        noise: Floats | None = None,
        weights: Floats | None = None,
    ) -> Floats:
        """Decode a block of contexts of several nodes and add them up, in order; see `fpld.codecs.base.Adding`."""
        kernels = self._kernels()
        if kernels is None:
            return add_decoded(self, payloads, plans, rows, total, noise, weights)
        for payload, plan in zip(payloads, plans, strict=True):
            _check.rows(rows, plan.contexts)
            self._ranges(payload, plan, rows)
        return _add(kernels, payloads, plans, rows, total, noise, weights)

    def _kernels(self) -> ModuleType | None:
        """Import the kernels when they are first used, since they bring numba along."""
        if self.reference or not compiled.available():
            return None
        from fpld.codecs.uniform import kernels

        return kernels

    def _encode(self, blocks: Iterable[Reals], plan: Plan, size: int) -> bytes:
        shares = _shares(plan.contexts, plan.vocab, _side(plan), size)
        kernels, dither, start = self._kernels(), Dither.of(plan), 0
        buffer = BytesIO(bytes(size))  # one piece of memory: written in place, and given away without a copy
        payload = np.frombuffer(buffer.getbuffer(), np.uint8)
        for block in blocks:
            logits = _check.block(block, plan.shape, start)
            keys = dither.keys(range(start, start + len(logits)))
            for layout, rows in shares.blocks(range(start, start + len(logits))):
                within = slice(rows.start - start, rows.stop - start)
                part = np.ascontiguousarray(logits[within], np.float32)
                first = shares.at(rows.start)
                out = payload[first : first + len(rows) * layout.size].reshape(len(rows), layout.size)
                if kernels:
                    pairs = _encode(kernels, part, layout, rows, plan, keys[within], dither, out)
                else:
                    pairs = _range(part, rows, plan)
                    units = dither.units(rows, plan.vocab)
                    ranges = pairs[:, 0].astype(np.float64), pairs[:, 1].astype(np.float64)
                    out[:] = radix.pack(channel.quantize(part, *ranges, layout.levels(), units), layout)
                if shares.side:
                    place = slice(RANGE_BYTES * rows.start, RANGE_BYTES * rows.stop)
                    payload[place] = np.frombuffer(pairs.astype("<f2").tobytes(), np.uint8)
            start += len(logits)
        _check.all_rows(start, plan.contexts)
        del payload, out
        return buffer.getvalue()

    def _ranges(self, payload: bytes | memoryview, plan: Plan, rows: range) -> tuple[Floats, Floats]:
        """Return centre and half-range of each context; refuse what no encoder writes."""
        size = self.payload_bytes(plan)
        if len(payload) != size:
            raise FrameError(f"payload must be {size} bytes under this plan, got {len(payload)}")
        return _read_ranges(payload, plan, rows)


def _side(plan: Plan) -> int:
    return 0 if plan.clip is not None else RANGE_BYTES * plan.contexts


@lru_cache(maxsize=1024)
def _shares(contexts: int, vocab: int, side: int, size: int) -> _Shares:
    """Share a payload of `size` bytes out to the contexts: the first ones take a byte more, so that none is lost."""
    share, longer = divmod(size - side, contexts)
    return _Shares(side, longer, (radix.layout(vocab, share + bool(longer)), radix.layout(vocab, share)))


def _range(part: _Floats32, rows: range, plan: Plan) -> Floats:
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


def _read_ranges(payload: bytes | memoryview, plan: Plan, rows: range) -> tuple[Floats, Floats]:
    if plan.clip is not None:
        return np.zeros(len(rows)), np.full(len(rows), plan.clip)
    pairs = np.frombuffer(payload, "<f2", 2 * len(rows), RANGE_BYTES * rows.start).reshape(-1, 2).astype(np.float64)
    if not np.isfinite(pairs).all() or (pairs[:, 1] < 0).any():
        raise FrameError("payload states a range that is not a finite, non-negative number")
    return pairs[:, 0], pairs[:, 1]


# What the kernels take: layouts as tables of integers, dither as keys and phases.


class _Tables(NamedTuple):
    groups: Ints
    radices: Ints
    planes: Ints


@lru_cache(maxsize=256)
def _tables(layout: radix.Layout) -> _Tables:
    """Return a layout's groups (start, lanes, width, first digit, digits, byte), all radices, and planes."""
    groups: list[tuple[int, ...]] = []
    digits: list[int] = []
    for g in layout.groups:
        if g.radices:
            groups.append((g.start, g.lanes, g.width, len(digits), len(g.radices), g.at))
            digits += g.radices
    planes = [(p.width, p.place, p.at, p.length) for p in layout.planes]
    return _Tables(
        np.array(groups, np.int64), np.array(digits, np.int64), np.array(planes, np.int64).reshape(len(planes), 4)
    )


def _phases(dither: Dither, lanes: int) -> npt.NDArray[np.uint16]:
    """Return a slot's phases, repeated so that a run of lanes can begin at any of them."""
    return np.resize(dither.phases() if dither.slots > 1 else np.zeros(1, np.uint16), 256 + lanes)


def _scratch(vocab: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """Return room for a context's dither words, and the same memory as 16-bit numbers."""
    words = np.empty(-(-vocab // 2), np.uint32)
    return words, words.view(np.uint16)


def _encode(
    kernels: ModuleType,
    part: _Floats32,
    layout: radix.Layout,
    rows: range,
    plan: Plan,
    keys: npt.NDArray[np.uint32],
    dither: Dither,
    out: _Bytes,
) -> Floats:
    """Let the kernel encode some contexts; return their centres and half-ranges."""
    ranges, floats = np.zeros((len(rows), 2)), np.zeros(2, np.float32)
    scratch = ~_phases(dither, kernels.LANES), *_scratch(plan.vocab), floats, floats.view(np.uint32)
    limits = plan.clip or 0.0, _LIMIT
    bad = kernels.encode(part, part.view(np.uint32), *limits, layout.low, *_tables(layout), keys, *scratch, ranges, out)
    if bad >= 0:
        _range(part, rows, plan)  # says what is wrong
    return ranges


def _add(
    kernels: ModuleType,
    payloads: Sequence[bytes | memoryview],
    plans: Sequence[Plan],
    rows: range,
    total: _Floats32,
    noise: Floats | None,
    weights: Floats | None,
) -> Floats:
    """Let the kernel add up nodes, a few at a time, so that what they add to stays in the cache."""
    vocab = total.shape[1]
    edges = [np.zeros((0 if asked is None else len(asked), vocab + 1)) for asked in (noise, weights)]
    noise_of = np.zeros(len(plans))
    scratch = _scratch(vocab)
    for first in range(0, len(plans), kernels.BATCH):
        batch = slice(first, first + kernels.BATCH)
        arguments = _arguments(kernels, payloads[batch], plans[batch], rows)
        kernels.add(*arguments, rows.start, total, weights is not None, *edges, noise_of[batch], *scratch)
    for asked, edge in zip((noise, weights), edges, strict=True):
        if asked is not None:
            asked += np.cumsum(edge, axis=1, out=edge)[:, :-1]
    return noise_of


def _arguments(
    kernels: ModuleType, payloads: Sequence[bytes | memoryview], plans: Sequence[Plan], rows: range
) -> tuple[Any, ...]:
    """Return what the kernel needs of a batch of nodes."""
    shares = [_shares(p.contexts, p.vocab, _side(p), len(data)) for p, data in zip(plans, payloads, strict=True)]
    layouts = list(dict.fromkeys(layout for share in shares for layout in share.layouts))
    tables = [_tables(layout) for layout in layouts]
    starts = np.cumsum([[0, 0, 0], *((len(t.groups), len(t.radices), len(t.planes)) for t in tables)], axis=0)
    groups = [t.groups + np.array([0, 0, 0, start, 0, 0]) for t, start in zip(tables, starts[:-1, 1], strict=True)]
    bounds = np.stack([starts[:-1, 0], starts[1:, 0], starts[:-1, 2], starts[1:, 2]], axis=1)
    dithers = [Dither.of(plan) for plan in plans]
    streams = list(dict.fromkeys((dither.key, dither.stream) for dither in dithers))
    ranges = [_read_ranges(data, plan, rows) for data, plan in zip(payloads, plans, strict=True)]
    arrays = [_readonly(data) for data in payloads]
    return (
        tuple(arrays + [arrays[0]] * (kernels.BATCH - len(arrays))),
        np.array([share.side for share in shares]),
        np.array([[layout.size for layout in share.layouts] for share in shares]),
        np.array([share.longer for share in shares]),
        np.array([[layouts.index(layout) for layout in share.layouts] for share in shares]),
        bounds,
        np.concatenate(groups),
        np.concatenate([t.radices for t in tables]),
        np.concatenate([t.planes for t in tables]),
        np.array([layout.low for layout in layouts]),
        np.stack([centres for centres, _ in ranges]),
        np.stack([halves for _, halves in ranges]),
        np.array([streams.index((dither.key, dither.stream)) for dither in dithers]),
        np.stack([Dither(*stream).keys(rows) for stream in streams]),
        np.stack([_phases(dither, kernels.LANES) for dither in dithers]),
    )


def _readonly(data: bytes | memoryview) -> _Bytes:
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array


UNIFORM = UniformCodec()
