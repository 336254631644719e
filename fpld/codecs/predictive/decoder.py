"""Read predictive payloads: the order of coordinates that both ends share, the symbols, and what they decode to.

Contexts come in blocks of about 2^18 coordinates. Against a prior a block's coordinates are ordered by class; without
one they stay as they are. The coder is sequential, so blocks are read one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.dither import Dither
from fpld.codecs.predictive import companding, tokens
from fpld.codecs.predictive.ans import AnsDecoder
from fpld.codecs.predictive.compact_ans import CompactAnsDecoder
from fpld.codecs.predictive.header import DITHER, PRIOR, PredictiveHeader, largest_symbol
from fpld.codecs.prior import CLASS_OF, Eighths, whole_prior
from fpld.errors import FrameError, InputError
from fpld.kernels import kernel
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fpld.codecs.base import Learnt
    from fpld.types import Array, Floats32, Ints, Plan

BLOCK_COORDINATES = 1 << 18
_COMPACT_BYTES = 2048  # of budget, up to which a code is a compact one


class CodedBlock(NamedTuple):
    """A block's symbols that are not zero: their places, the symbols, and the tail of each context, -1 for none."""

    places: Array
    symbols: Array
    tails: Array


def coder_blocks(plan: Plan) -> list[range]:
    """Return the contexts of each block."""
    if plan.contexts * plan.vocab > tokens.MAX_COORDINATES:
        largest = tokens.MAX_COORDINATES // plan.vocab
        raise InputError(f"the predictive codec takes at most {largest} contexts of {plan.vocab} tokens at once")
    stride = max(BLOCK_COORDINATES // plan.vocab, 1)
    return [range(at, min(at + stride, plan.contexts)) for at in range(0, plan.contexts, stride)]


def checked_learnt(plan: Plan) -> Array | None:
    """Return what the coder has learnt in the round before, if anything; raise `InputError` if it is no such table."""
    learnt = plan.learnt
    size = tokens.CLASSES * tokens.TOKENS
    if learnt is not None and (learnt.shape != (size,) or learnt.dtype != np.uint16 or learnt.min() < 1):
        raise InputError(f"learnt must be {size} probabilities in 2^-16, uint16, none of them zero, got {learnt!r:.80}")
    return learnt


def has_compact_code(plan: Plan) -> bool:
    """Return whether a plan's budget is so small that its code is a compact one."""
    return plan.budget_bytes <= _COMPACT_BYTES


def block_dither(plan: Plan, rows: range) -> Floats32:
    """Return the dither of a block, in steps."""
    return Dither.of(plan).block(rows, plan.vocab).astype(np.float32)


@kernel
def _count_classes(prior: Any, class_of: Any, out: Any) -> None:
    """Count the coordinates of each class, in four tallies: increments of one alone would wait for each other."""
    tally = np.zeros((4, out.size), np.int64)
    whole = prior.size // 4 * 4
    for i in range(0, whole, 4):
        for k in range(4):
            tally[k, class_of[-prior[i + k]]] += 1
    for i in range(whole, prior.size):
        tally[0, class_of[-prior[i]]] += 1
    for k in range(4):
        out += tally[k]


@kernel
def _order_by_class(prior: Any, class_of: Any, classes: int, order: Any) -> None:
    """Sort coordinates by class, keeping their order within each; four parts at once, for the same reason."""
    part = prior.size // 4
    place = np.zeros((4, classes), np.int64)
    for k in range(4):
        _count_classes(prior[k * part : (k + 1) * part if k < 3 else prior.size], class_of, place[k])
    at = 0
    for c in range(classes):
        for k in range(4):
            count = place[k, c]
            place[k, c] = at
            at += count
    for i in range(part):
        for k in range(4):
            c = class_of[-prior[k * part + i]]
            order[place[k, c]] = k * part + i
            place[k, c] += 1
    for i in range(4 * part, prior.size):
        c = class_of[-prior[i]]
        order[place[3, c]] = i
        place[3, c] += 1


def class_order(prior: Eighths) -> npt.NDArray[np.int32]:
    """Return a block's coordinates ordered by class."""
    order = np.empty(prior.size, np.int32)
    _order_by_class(prior.ravel(), CLASS_OF, tokens.CLASSES, order)
    return order


def class_counts(prior: Eighths | None, plan: Plan) -> Ints:
    """Count the coordinates of each class in each block, [blocks, CLASSES]."""
    blocks = coder_blocks(plan)
    counts = np.zeros((len(blocks), tokens.CLASSES), np.int64)
    for b, rows in enumerate(blocks):
        if prior is None:
            counts[b, 0] = len(rows) * plan.vocab
        else:
            _count_classes(prior[rows.start : rows.stop].ravel(), CLASS_OF, counts[b])
    return counts


@kernel
def _order_used_classes(prior: Any, class_of: Any, used: Any, place: Any, order: Any) -> None:
    for i in range(prior.size):
        c = class_of[-prior[i]]
        if used[c]:
            order[place[c]] = i
            place[c] += 1


def used_order(prior: Eighths, counts: Ints, listed: list[Array]) -> npt.NDArray[np.int32]:
    """Order a block's coordinates by class, but only those of classes that `listed` places, in that order, lie in."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    used = np.zeros(counts.size, np.bool_)
    for places in listed:
        used |= np.diff(np.searchsorted(places, starts)) > 0
    order = np.empty(prior.size, np.int32)
    _order_used_classes(prior.ravel(), CLASS_OF, used, starts[:-1].copy(), order)
    return order


class SymbolReader:
    """Read the symbols of a payload block by block; `counts` are `class_counts` of its prior, if they are known."""

    def __init__(self, payload: bytes | memoryview, plan: Plan, counts: Ints | None = None) -> None:
        if not 0 < len(payload) <= plan.budget_bytes:
            raise FrameError(f"payload must have at most {plan.budget_bytes} bytes, got {len(payload)}")
        self.plan = plan
        self.header, length = PredictiveHeader.from_bytes(payload)
        self.prior = whole_prior(plan) if self.header.mode & PRIOR else None
        if self.header.mode & PRIOR and self.prior is None:
            raise FrameError("payload is coded against a prior, and the plan has none")
        if counts is None or self.prior is None:
            counts = class_counts(self.prior, plan)
        self._counts = counts
        totals = counts.sum(axis=0)
        self.header.check_groups(totals)
        data = np.frombuffer(payload, np.uint8, offset=length)
        kind = CompactAnsDecoder if has_compact_code(plan) else AnsDecoder
        self._coder = kind(data, totals, largest_symbol(self.header.step), checked_learnt(plan))
        self._number = 0
        if not self._coder.sound:
            raise FrameError("payload's code does not begin as any does: it is cut, or has bytes too many")

    @property
    def learnt(self) -> Learnt:
        """Return what the coder has learnt, for the next round to begin with."""
        return tokens.learnt_token_probabilities(self._coder.models)

    def read(self, rows: range) -> CodedBlock:
        """Return the next block, which holds the contexts `rows`, with places in the coder's order.

        Raise `FrameError` for an unsound code, and with the last block for one that does not end there.
        """
        starts = np.concatenate([[0], np.cumsum(self._counts[self._number])])
        self._number += 1
        places = np.empty(starts[-1], np.int32)
        symbols = np.empty(starts[-1], np.int32)
        count = self._coder.block(starts, places, symbols)
        if count < 0:
            raise FrameError("payload holds a gap beyond its last coordinate")
        tails = np.full(len(rows), -1, np.int32)
        if not self.header.mode & (PRIOR | DITHER):
            # A context has a tail if it has both zeros and other symbols.
            counts = np.bincount(places[:count] // self.plan.vocab, minlength=len(rows))
            if not self._coder.tails((counts > 0) & (counts < self.plan.vocab), tails):
                raise FrameError("payload states the mass of a tail that cannot be")
        if rows.stop == self.plan.contexts and not self._coder.ended():
            raise FrameError("payload does not end with its last symbol")
        return CodedBlock(places[:count], symbols[:count], tails)

    def block(self, rows: range) -> CodedBlock:
        """Return the next block, which holds the contexts `rows`, with places in the block."""
        block = self.read(rows)
        if self.prior is None:
            return block
        return block._replace(places=class_order(self.prior[rows.start : rows.stop])[block.places])


def check_payload(payload: bytes | memoryview, plan: Plan) -> Learnt | None:
    """Raise `FrameError` for an unsound payload; return what the coder has learnt. Nothing is reconstructed."""
    if len(payload) == 0:
        return None
    reader = SymbolReader(payload, plan)
    for rows in coder_blocks(plan):
        reader.read(rows)
    return reader.learnt


def decode_blocks(payload: bytes | memoryview, plan: Plan) -> Iterator[Decoded]:
    """Decode a payload block by block."""
    reader = SymbolReader(payload, plan) if len(payload) else None
    for rows in coder_blocks(plan):
        values, variance = expand_block(None if reader is None else reader.block(rows), reader, plan, rows)
        bias = companding.NO_BIAS if reader is None else companding.dither_bias(variance, reader.header)
        yield Decoded(values, variance, bias)


def expand_block(block: CodedBlock | None, reader: SymbolReader | None, plan: Plan, rows: range) -> companding.Pair:
    """Return log-probabilities and variances of a block; without one, the prior or equal probabilities."""
    shape = (len(rows), plan.vocab)
    if block is None or reader is None:
        prior = whole_prior(plan)
        return companding.unsent_values(None if prior is None else prior[rows.start : rows.stop], shape)
    prior = None if reader.prior is None else reader.prior[rows.start : rows.stop]
    if not reader.header.mode & DITHER:
        return companding.expand_symbols(*block, prior, reader.header, shape)
    dense = np.zeros(shape, np.int32)
    dense.flat[block.places] = block.symbols
    return companding.expand_dithered(dense, block_dither(plan, rows), prior, reader.header)
