"""The contract of a codec: logits to payload bytes within a budget, and back, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fpld import _check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from fpld.types import Decoded, Plan, Reals

Learnt = np.ndarray[Any, np.dtype[np.uint16]]


LARGEST = 2.0**15
"""What no decoded logit exceeds, but for the rounding of a range: encoders and readers refuse larger ones."""


@dataclass(frozen=True, slots=True)
class Traits:
    """State what a codec is and needs.

    `prior`: it codes against `Plan.prior`. `dither`: it takes part in stratified dither (`Plan.slot`, `Plan.slots`).
    `seeks`: a reader may begin at any context at no cost, and several threads may read from it. `refines`: it codes any
    real numbers, so residuals to an earlier reconstruction too. `sparse`: what it decodes is the prior plus a change in
    a few coordinates.
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
    def traits(self) -> Traits:
        """Return what the codec is and needs."""
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
        """Return what reads a payload back; it never trusts the bytes."""
        ...


class Reader(Protocol):
    """Read one payload; `Codec.reader`, `check` and `blocks` raise `FrameError` for bytes that no encoder writes."""

    @property
    def learnt(self) -> Learnt | None:
        """Return what the codec has learnt from the payload, for `Plan.learnt` of the next round; after `check`."""
        ...

    def check(self) -> None:
        """Refuse an unsound payload, for less than decoding costs: after this nothing in it can fail."""
        ...

    def blocks(self, ranges: Sequence[range] | None = None) -> Iterator[Decoded]:
        """Decode consecutive ranges of contexts, or all contexts in blocks of the codec's own.

        The first range begins with the first context, unless the codec seeks. What is decoded is the caller's to keep.
        """
        ...


def encode(codec: Codec, logits: Reals, plan: Plan) -> bytes:
    """Encode an array [m, V] of logits."""
    return codec.encode([_check.shape(logits, plan.shape)], plan)


def decode(
    codec: Codec,
    payload: bytes | memoryview,
    plan: Plan,
    rows: range | None = None,
    dtype: npt.DTypeLike = np.float32,
) -> Decoded:
    """Decode the contexts in `rows` (all by default) as one block, whose first fields have `dtype`.

    A codec that cannot seek decodes all contexts for it.
    """
    rows = range(plan.contexts) if rows is None else _check.rows(rows, plan.contexts)
    before = [] if codec.traits.seeks or rows.start == 0 else [range(rows.start)]
    after = [] if codec.traits.seeks or rows.stop == plan.contexts else [range(rows.stop, plan.contexts)]
    decoded = list(codec.reader(payload, plan).blocks([*before, rows, *after]))[len(before)]
    values, variance, bias = (part.astype(dtype, copy=False) for part in decoded[:3])
    return decoded._replace(values=values, variance=variance, bias=bias)
