"""The contract of a codec: logits to payload bytes within a budget, and back, block by block.

A codec is a pair of pure functions under a `Plan` that both ends hold: `encode` takes blocks of logits as they come,
and `reader` returns a `Reader` that decodes a payload in ranges of contexts. What a codec needs and can do stands in
its `CodecTraits`, so callers never ask for its type. `joined`, `recut` and `SeekReader` help to write one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fpld import validation
from fpld.errors import InputError
from fpld.numerics import split
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from fpld.types import Array, Plan, Reals

Learnt = np.ndarray[Any, np.dtype[np.uint16]]

# The largest absolute value of a decoded logit, but for the rounding of a range: larger ones are refused.
MAX_LOGIT = 2.0**15


@dataclass(frozen=True, slots=True)
class CodecTraits:
    """State what a codec needs and can do.

    Attributes
    ----------
    prior:
        It codes against `Plan.prior`.
    dither:
        It takes part in stratified dither (`Plan.slot`, `Plan.slots`).
    seeks:
        A reader may start at any context at no cost, and several threads may read from it.
    refines:
        It codes any real numbers, and so also residuals to an earlier reconstruction.
    sparse:
        What it decodes is the prior plus a change in a few coordinates.
    """

    prior: bool = False
    dither: bool = False
    seeks: bool = False
    refines: bool = True
    sparse: bool = False


class Codec(Protocol):
    """Code logits [m, V] under a plan; both ends hold the same plan.

    `code` names the codec on the wire: a number from 1 to 65535, never a type name. Codecs from outside the
    package take one from 32768 up.
    """

    @property
    def code(self) -> int:
        """Return the codec's number in the frame header."""
        ...

    @property
    def traits(self) -> CodecTraits:
        """Return what the codec needs and can do."""
        ...

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget, in bits per probe context, that the codec works with under this plan."""
        ...

    def encode(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Encode consecutive blocks of contexts into one payload of at most `plan.budget_bytes`, whatever the logits.

        NaN and infinities are refused. How the contexts are cut into blocks does not change the bytes.
        """
        ...

    def reader(self, payload: bytes | memoryview, plan: Plan) -> Reader:
        """Return a reader of a payload, which never trusts the bytes."""
        ...


class Reader(Protocol):
    """Decode one payload; `Codec.reader`, `check` and `blocks` raise `FrameError` for bytes that no encoder writes."""

    @property
    def learnt(self) -> Learnt | None:
        """Return what the codec has learnt from the payload, for the next round's `Plan.learnt`; call `check` first."""
        ...

    def check(self) -> None:
        """Raise `FrameError` for an unsound payload, for less than decoding costs; `blocks` then cannot fail."""
        ...

    def blocks(self, ranges: Sequence[range] | None = None) -> Iterator[Decoded]:
        """Decode consecutive ranges of contexts, or all contexts in blocks of the codec's own.

        The first range begins with the first context, unless the codec seeks. The caller owns the decoded arrays.
        """
        ...


def encode(codec: Codec, logits: Reals, plan: Plan) -> bytes:
    """Encode an array [m, V] of logits."""
    return codec.encode([validation.logits_array(logits, plan.shape)], plan)


def decode(
    codec: Codec,
    payload: bytes | memoryview,
    plan: Plan,
    rows: range | None = None,
    dtype: npt.DTypeLike = np.float32,
) -> Decoded:
    """Decode the contexts in `rows` (all by default) as one block; a codec that cannot seek decodes all of them.

    `dtype` is that of `values`, `variance` and `bias` in the result.
    """
    rows = range(plan.contexts) if rows is None else validation.block_range(rows, plan.contexts)
    before = [] if codec.traits.seeks or rows.start == 0 else [range(rows.start)]
    after = [] if codec.traits.seeks or rows.stop == plan.contexts else [range(rows.stop, plan.contexts)]
    decoded = list(codec.reader(payload, plan).blocks([*before, rows, *after]))[len(before)]
    values, variance, bias = (part.astype(dtype, copy=False) for part in decoded[:3])
    return decoded._replace(values=values, variance=variance, bias=bias)


def checked_blocks(blocks: Iterable[Reals], plan: Plan) -> Iterator[tuple[range, Array]]:
    """Return blocks of logits with their contexts; raise `InputError` if they are not all contexts of the plan."""
    start = 0
    for block in blocks:
        part = validation.logits_block(block, plan.shape, start)
        yield range(start, start + len(part)), part
        start += len(part)
    validation.row_count(start, plan.contexts)


def joined(blocks: Iterable[Reals], plan: Plan) -> Array:
    """Join all contexts in one array, for a codec that needs them at once: float64 if the logits are, else float32."""
    whole: Array = np.empty((0, plan.vocab))
    for rows, part in checked_blocks(blocks, plan):
        validation.finite(part, rows.start)
        dtype = np.float64 if part.dtype == np.float64 else np.float32
        if len(rows) == plan.contexts:
            whole = part.astype(dtype, copy=False)
        elif rows:
            whole = whole if rows.start else np.empty(plan.shape, dtype)
            whole[rows.start : rows.stop] = part
    return whole


def recut(blocks: Iterable[Decoded], ranges: Sequence[range], contexts: int) -> Iterator[Decoded]:
    """Cut consecutive decoded blocks into other ranges, which follow each other from the first context on.

    Each field has two axes, the first as long as that of `values`, or 1.
    """
    source = iter(blocks)
    start = 0
    waiting: list[Decoded] = []
    for rows in ranges:
        if validation.block_range(rows, contexts).start != start:
            raise InputError(f"rows must follow each other from the first context on, got {rows} where {start} is next")
        start = rows.stop
        while not waiting or sum(len(block.values) for block in waiting) < len(rows):
            waiting.append(next(source))
        whole = _concatenated([block for block in waiting if len(block.values)] or waiting[:1])
        yield _part(whole, slice(0, len(rows)))
        waiting = [_part(whole, slice(len(rows), None))]


def _part(block: Decoded, rows: slice) -> Decoded:
    """Return some contexts of a block; a field with one row for all of them stays as it is."""
    count = len(block.values)

    def cut(field: Reals) -> Reals:
        return field[rows] if len(field) == count else field

    chances = None if block.probabilities is None else cut(block.probabilities)
    return Decoded(cut(block.values), cut(block.variance), cut(block.bias), chances)


def _concatenated(blocks: Sequence[Decoded]) -> Decoded:
    if len(blocks) == 1:
        return blocks[0]
    counts = [len(block.values) for block in blocks]
    probabilities = [block.probabilities for block in blocks if block.probabilities is not None]
    return Decoded(
        stacked([block.values for block in blocks], counts),
        stacked([block.variance for block in blocks], counts),
        stacked([block.bias for block in blocks], counts),
        stacked(probabilities, counts) if probabilities else None,
    )


def stacked(parts: Sequence[Reals], counts: Sequence[int]) -> Reals:
    """Stack a field of blocks with `counts` contexts each; of a single block, one row for all contexts stays so."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    whole: Reals = np.concatenate(
        [np.broadcast_to(part, (count, width)) for part, count in zip(parts, counts, strict=True)]
    )
    return whole


class SeekReader:
    """Read with a function that decodes any range of one or more contexts.

    `check` is a function that raises `FrameError` for an unsound payload; without one, all of it is decoded.
    """

    learnt = None

    def __init__(self, plan: Plan, decode: Callable[[range], Decoded], check: Callable[[], None] | None = None) -> None:
        self._plan = plan
        self._decode = decode
        self._check = check

    def check(self) -> None:
        """Raise `FrameError` for an unsound payload."""
        if self._check is not None:
            self._check()
            return
        for _ in self.blocks():
            pass

    def blocks(self, ranges: Sequence[range] | None = None) -> Iterator[Decoded]:
        """Decode ranges of contexts."""
        empty = np.zeros((0, self._plan.vocab), np.float32)
        for rows in split(*self._plan.shape) if ranges is None else ranges:
            if validation.block_range(rows, self._plan.contexts):
                yield self._decode(rows)
            else:
                yield Decoded(empty, empty, empty)
