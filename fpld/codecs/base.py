"""The contract of a codec: logits to payload bytes within a budget, and back, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from fpld.types import Decoded, Plan, Reals


class Codec(Protocol):
    """Code logits [m, V] under a plan; both ends hold the same plan.

    `code` names the codec on the wire: a number from 1 to 65535, never a type name. Codecs from outside the
    package take one from 32768 up.
    """

    @property
    def code(self) -> int:
        """Give the codec's number in the frame header."""
        ...

    def least_bits(self, plan: Plan) -> float:
        """Give the least budget, in bits per probe context, that the codec works with under this plan."""
        ...

    def encode(self, logits: Reals, plan: Plan) -> bytes:
        """Give a payload of at most `plan.budget_bytes`, whatever the logits; refuse NaN and infinities."""
        ...

    def decode(
        self, payload: bytes | memoryview, plan: Plan, rows: range | None = None, dtype: npt.DTypeLike = np.float32
    ) -> Decoded:
        """Give values and variance of the contexts in `rows` (all by default); never trust the bytes."""
        ...


@runtime_checkable
class Sequential(Protocol):
    """A codec that can only decode from the start: it gives consecutive blocks in one pass."""

    def stream(
        self, payload: bytes | memoryview, plan: Plan, blocks: Sequence[range], dtype: npt.DTypeLike = np.float32
    ) -> Iterator[Decoded]:
        """Decode blocks that follow each other, from the first context on."""
        ...


@runtime_checkable
class Learning(Protocol):
    """A codec that learns as it goes, and can begin the next round with what it has learnt (`Plan.tables`)."""

    def check(self, payload: bytes | memoryview, plan: Plan) -> npt.NDArray[np.int32] | None:
        """Refuse an unsound payload, for less than decoding costs; give the tables that it ends with, if any."""
        ...


def check(codec: Codec, payload: bytes | memoryview, plan: Plan, blocks: Sequence[range]) -> Any:
    """Refuse an unsound payload: after this nothing in it can fail; give what the codec has learnt from it."""
    if isinstance(codec, Learning):
        return codec.check(payload, plan)
    for _ in decode_blocks(codec, payload, plan, blocks):
        pass
    return None


def decode_blocks(codec: Codec, payload: bytes | memoryview, plan: Plan, blocks: Sequence[range]) -> Iterator[Decoded]:
    """Decode all contexts block by block, in the way that suits the codec; the cost is that of one pass."""
    if isinstance(codec, Sequential):
        return codec.stream(payload, plan, blocks)
    return (codec.decode(payload, plan, rows) for rows in blocks)
