"""The contract of a codec: logits to payload bytes within a budget, and back, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fpld import _check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from fpld.types import Decoded, Floats, Plan, Reals


class Codec(Protocol):
    """Code logits [m, V] under a plan; both ends hold the same plan.

    `code` names the codec on the wire: a number from 1 to 65535, never a type name. Codecs from outside the
    package take one from 32768 up.
    """

    @property
    def code(self) -> int:
        """Return the codec's number in the frame header."""
        ...

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget, in bits per probe context, that the codec works with under this plan."""
        ...

    def encode(self, logits: Reals, plan: Plan) -> bytes:
        """Return a payload of at most `plan.budget_bytes`, whatever the logits; refuse NaN and infinities."""
        ...

    def decode(
        self, payload: bytes | memoryview, plan: Plan, rows: range | None = None, dtype: npt.DTypeLike = np.float32
    ) -> Decoded:
        """Return values and variance of the contexts in `rows` (all by default); never trust the bytes."""
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
class Streaming(Protocol):
    """A codec that can encode logits block by block, as a model makes them."""

    def encode_blocks(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Return the payload of blocks that hold all contexts in order."""
        ...


@runtime_checkable
class Adding(Protocol):
    """A codec that can decode several nodes and add them up in one pass."""

    def add(
        self,
        payloads: Sequence[bytes | memoryview],
        plans: Sequence[Plan],
        rows: range,
        total: npt.NDArray[np.float32],
        noise: Floats | None = None,
        weights: Floats | None = None,
    ) -> Floats:
        """Add every node's values of the contexts in `rows` to `total` [n, V], in order; return their summed variances.

        `noise` [k, V] takes the sum of the variances of the first k contexts. With `weights` [n, V], a value counts by
        the inverse of its variance, and `weights` takes the sum of those.
        """
        ...


class Sum(NamedTuple):
    """A block of contexts: the nodes' values (or probabilities) added up, each node's summed variance, and a sample.

    The sample is every node's values and variances [K, n, V] on the block's first n contexts.
    """

    rows: range
    total: npt.NDArray[np.floating[Any]]
    noise: Floats
    values: npt.NDArray[np.float32]
    variance: npt.NDArray[np.float32]


@runtime_checkable
class Summing(Protocol):
    """A codec that can only decode from the start, but adds up nodes that share a prior faster than it decodes them."""

    def sums(
        self,
        payloads: Sequence[bytes | memoryview],
        plans: Sequence[Plan],
        *,
        sample: int = 0,
        mixture: bool = False,
        threads: int = 1,
    ) -> Iterator[Sum]:
        """Add up all nodes' values, or for a mixture their probabilities, block by block, in the order of the nodes.

        About `sample` coordinates of every node are given as well.
        """
        ...


_LEAST_VARIANCE = 1e-30  # what has less counts as exact


def add_decoded(
    codec: Codec,
    payloads: Sequence[bytes | memoryview],
    plans: Sequence[Plan],
    rows: range,
    total: npt.NDArray[np.float32],
    noise: Floats | None = None,
    weights: Floats | None = None,
) -> Floats:
    """Do as `Adding.add` with any codec, by decoding node by node."""
    noise_of = np.zeros(len(plans))
    for k, (payload, plan) in enumerate(zip(payloads, plans, strict=True)):
        values, variance = codec.decode(payload, plan, rows)
        variance = np.asarray(variance, np.float64)
        noise_of[k] = float(np.broadcast_to(variance, values.shape).sum())
        if noise is not None:
            noise += np.broadcast_to(variance, values.shape)[: len(noise)]
        if weights is None:
            total += values
        else:
            weight = 1.0 / np.maximum(variance, _LEAST_VARIANCE)
            weights += weight
            total += values * weight
    return noise_of


def encode_blocks(codec: Codec, blocks: Iterable[Reals], plan: Plan) -> bytes:
    """Encode logits that come block by block; a codec that needs all of them at once gets them in float32."""
    if isinstance(codec, Streaming):
        return codec.encode_blocks(blocks, plan)
    whole, start = np.empty(plan.shape, np.float32), 0
    for block in blocks:
        part = _check.block(block, plan.shape, start)
        whole[start : start + len(part)] = part
        start += len(part)
    _check.all_rows(start, plan.contexts)
    return codec.encode(whole, plan)


@runtime_checkable
class Learning(Protocol):
    """A codec that learns as it goes, and can begin the next round with what it has learnt (`Plan.tables`)."""

    def check(self, payload: bytes | memoryview, plan: Plan) -> npt.NDArray[np.uint16] | None:
        """Refuse an unsound payload, for less than decoding costs; return the tables that it ends with, if any."""
        ...


def check(codec: Codec, payload: bytes | memoryview, plan: Plan, blocks: Sequence[range]) -> Any:
    """Refuse an unsound payload: after this nothing in it can fail; return what the codec has learnt from it."""
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
