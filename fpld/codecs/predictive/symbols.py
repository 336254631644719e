"""Symbols of a predictive payload: how coordinates are ordered for the coder, and how a payload is read back.

Contexts come in blocks of about 2^18 coordinates. Against a prior a block's coordinates are ordered by class; without
one they stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.dither import Dither
from fpld.codecs.predictive import ans, companding, small, tokens
from fpld.codecs.predictive.head import DITHER, GROUPS, PER_GROUP, PRIOR, Cells, Head, most_symbols, rounding, step_size
from fpld.codecs.prior import CLASS_OF, Eighths, whole_prior
from fpld.compiled import kernel
from fpld.errors import FrameError, InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.codecs.base import Learnt
    from fpld.codecs.predictive.companding import Floats32
    from fpld.types import Plan, Reals

BLOCK = 1 << 18
_SMALL = 2048  # bytes of budget up to which a code is small

Array = np.ndarray[Any, np.dtype[Any]]
Order = tuple["npt.NDArray[np.int32]", "npt.NDArray[np.int64]"]


def block_ranges(plan: Plan) -> list[range]:
    """Return the contexts of each block."""
    if plan.contexts * plan.vocab > tokens.MOST_COORDINATES:
        most = tokens.MOST_COORDINATES // plan.vocab
        raise InputError(f"the predictive codec takes at most {most} contexts of {plan.vocab} tokens at once")
    stride = max(BLOCK // plan.vocab, 1)
    return [range(at, min(at + stride, plan.contexts)) for at in range(0, plan.contexts, stride)]


def checked_learnt(plan: Plan) -> Array | None:
    """Return what the codec has learnt in the round before, if anything; refuse what it cannot have learnt."""
    found = plan.learnt
    size = tokens.CLASSES * tokens.TOKENS
    if found is not None and (found.shape != (size,) or found.dtype != np.uint16 or found.min() < 1):
        raise InputError(f"learnt must be {size} probabilities in 2^-16, uint16, none of them zero, got {found!r:.80}")
    return found


def is_small(plan: Plan) -> bool:
    """Return whether a plan's code is a small one."""
    return plan.budget_bytes <= _SMALL


def dither_of(plan: Plan, rows: range) -> Floats32:
    """Return the dither of a block, in steps."""
    return Dither.of(plan).block(rows, plan.vocab).astype(np.float32)


@kernel
def _count(prior: Any, class_of: Any, out: Any) -> None:
    """Count the coordinates of each class, in four tallies: one alone would wait for itself."""
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
def _arrange(prior: Any, class_of: Any, order: Any, starts: Any) -> None:
    """Sort coordinates by class, keeping their order within each; four parts at once, for the same reason."""
    part = prior.size // 4
    place = np.zeros((5, starts.size - 1), np.int64)
    for k in range(4):
        _count(prior[k * part : (k + 1) * part if k < 3 else prior.size], class_of, place[k])
    at = 0
    for c in range(starts.size - 1):
        starts[c] = at
        for k in range(4):
            count = place[k, c]
            place[k, c] = at
            at += count
    starts[-1] = at
    for i in range(part):
        for k in range(4):
            c = class_of[-prior[k * part + i]]
            order[place[k, c]] = k * part + i
            place[k, c] += 1
    for i in range(4 * part, prior.size):
        c = class_of[-prior[i]]
        order[place[3, c]] = i
        place[3, c] += 1


def class_order(prior: Eighths) -> Order:
    """Order a block's coordinates by class; return them, and where each class starts."""
    order, starts = np.empty(prior.size, np.int32), np.zeros(tokens.CLASSES + 1, np.int64)
    _arrange(prior.ravel(), CLASS_OF, order, starts)
    return order, starts


def class_counts(prior: Eighths | None, plan: Plan) -> npt.NDArray[np.int64]:
    """Count the coordinates of each class in each block, [blocks, CLASSES]."""
    blocks = block_ranges(plan)
    counts = np.zeros((len(blocks), tokens.CLASSES), np.int64)
    for b, rows in enumerate(blocks):
        if prior is None:
            counts[b, 0] = len(rows) * plan.vocab
        else:
            _count(prior[rows.start : rows.stop].ravel(), CLASS_OF, counts[b])
    return counts


@kernel
def _arrange_used(prior: Any, class_of: Any, used: Any, place: Any, order: Any) -> None:
    for i in range(prior.size):
        c = class_of[-prior[i]]
        if used[c]:
            order[place[c]] = i
            place[c] += 1


def used_order(prior: Eighths, counts: npt.NDArray[np.int64], found: list[Array]) -> npt.NDArray[np.int32]:
    """Order a block's coordinates by class, but only classes where something was found, at `found` in that order."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    used = np.zeros(counts.size, np.bool_)
    for places in found:
        used |= np.diff(np.searchsorted(places, starts)) > 0
    order = np.empty(prior.size, np.int32)
    _arrange_used(prior.ravel(), CLASS_OF, used, starts[:-1].copy(), order)
    return order


@kernel
def _sift(
    y: Any,
    prior: Any,
    class_of: Any,
    least: float,
    seen: Any,
    starts: Any,
    places: Any,
    kinds: Any,
    ranks: Any,
    order: Any,
) -> int:
    """Find the values of a block of at least `least`; return how many.

    `seen` counts the coordinates of each class up to here. Of those found, `places` and `ranks` say where they lie
    in the block and in their class; `order` sorts them by class, and `starts` [CLASSES + 1] takes where each begins.
    """
    n = 0
    for i in range(y.size):
        c = class_of[-prior[i]] if prior.size else 0
        at = seen[c]
        seen[c] = at + 1
        if abs(y[i]) >= least:
            places[n], kinds[n], ranks[n] = i, c, at
            starts[c + 1] += 1
            n += 1
    for c in range(starts.size - 1):
        starts[c + 1] += starts[c]
    place = starts.copy()
    for k in range(n):
        at = place[kinds[k]]
        place[kinds[k]] = at + 1
        order[at] = k
    return n


@kernel
def _rest(y: Any, least: float, out: Any) -> None:
    """Sum up each context's mass below `least`."""
    for row in range(y.shape[0]):
        mass = 0.0
        for v in range(y.shape[1]):
            if y[row, v] < least:
                mass += y[row, v] * y[row, v]
        out[row] = mass


@dataclass(frozen=True, eq=False, slots=True)
class Material:
    """Hold what of y may become a symbol that is not zero, in the coder's order: for steps from `finest` on.

    Class c of block b is y[starts[b, c] : starts[b, c + 1]], and `rank` says where in its class a value lies. `rest` is
    what a context has besides, as mass, where tails are to be coded.
    """

    mode: int
    finest: int
    y: Floats32
    rank: npt.NDArray[np.uint32]
    shift: Floats32
    starts: npt.NDArray[np.int64]
    totals: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    rest: npt.NDArray[np.float64]

    @classmethod
    def prepare(cls, logits: Reals, plan: Plan, mode: int, finest: int = 0) -> Material:
        """Compand and order logits [m, V]."""
        blocks = block_ranges(plan)
        prior = whole_prior(plan) if mode & PRIOR else None
        least = 0.0 if mode & DITHER or finest == 0 else (1 - rounding(mode, finest)) * step_size(finest)
        starts = np.zeros((len(blocks), tokens.CLASSES + 1), np.int64)
        seen, rest = np.zeros(tokens.CLASSES, np.int64), np.zeros(0 if mode & (PRIOR | DITHER) else plan.contexts)
        width = len(blocks[0]) * plan.vocab
        found, kinds, ranks = np.empty(width, np.int32), np.empty(width, np.uint8), np.empty(width, np.uint32)
        order, none = np.empty(width, np.int32), np.empty(0, np.int16)
        parts: list[tuple[Array, Array, Array]] = []
        for b, rows in enumerate(blocks):
            own = None if prior is None else prior[rows.start : rows.stop]
            y = companding.compand(logits[rows.start : rows.stop], own)
            flat = none if own is None else own.ravel()
            count = _sift(y.ravel(), flat, CLASS_OF, least, seen, starts[b], found, kinds, ranks, order)
            if rest.size:
                _rest(y, least, rest[rows.start : rows.stop])
            places = found[order[:count]]
            shift = dither_of(plan, rows).ravel()[places] if mode & DITHER else np.empty(0, np.float32)
            parts.append((y.ravel()[places], ranks[order[:count]], shift))
        starts[1:] += np.cumsum(starts[:-1, -1])[:, None]
        joined = [np.concatenate(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]
        bounds = np.array([rows.start for rows in blocks] + [plan.contexts])
        y, rank, shift = joined
        return cls(mode, finest, y, rank, shift, starts, seen, bounds, rest)

    @property
    def groups(self) -> int:
        """Return the number of groups of classes in use."""
        used = self.totals[: GROUPS * PER_GROUP] > 0
        return int(used.reshape(GROUPS, PER_GROUP).any(axis=1).sum())

    def records(self, step: int, plan: Plan, most: int, cut: int | None = None) -> tuple[float, Array]:
        """Return the bits that a step takes and its tokens' records, or no more than that it is beyond `most` bytes.

        From value number `cut` on, symbols are those of the next coarser step.
        """
        classes, none = tokens.CLASSES - 1, np.empty(0, np.int32)
        scale = (
            *(1 / step_size(step), rounding(self.mode, step), self.y.size if cut is None else cut),
            *(1 / step_size(step + 1), rounding(self.mode, step + 1)),
        )
        symbols, gaps = np.empty(self.y.size, np.int32), np.empty(self.y.size + classes, np.int64)
        ends, tails = np.empty((len(self.starts), classes), np.int64), none
        order = self.y, self.rank, self.shift, self.starts, self.totals
        count = tokens.collect(*order, *scale, symbols, gaps, ends)
        if self.rest.size:
            tails = np.empty(self.rest.size, np.int32)
            companding.tails(self.y, self.rank, plan.vocab, *scale, self.rest, tails)
        records = np.empty(2 * count + tokens.CLASSES + len(self.rest), np.int64)
        models = tokens.new_models(self.totals, most_symbols(step), checked_learnt(plan), decoder=False)
        arguments = symbols, gaps, ends, self.totals, tails, self.rows
        bits, used = tokens.model(*arguments, *models, records, 8.0 * most, tokens.COST)
        return bits, records[:used]

    def measure(self, step: int) -> Cells:
        """Measure what the cells of a step hold; this must hold all values."""
        return companding.measure(self.y, self.starts, self.mode, step_size(step), rounding(self.mode, step))


def written(bits: float, records: Array, plan: Plan, room: int) -> bytes:
    """Write records as a code; nothing, if that does not fit into `room` bytes."""
    if bits > 8 * room:
        return b""
    out = np.empty(room, np.uint8)
    if is_small(plan):
        length = small.write(records, out)
        return out[room - length :].tobytes() if length >= 0 else b""
    front, back = ans.write(records, out)
    return out[:front].tobytes() + out[room - back :].tobytes() if front >= 0 else b""


class SymbolReader:
    """Read the symbols of a payload block by block; `counts` are `class_counts` of its prior, if they are known."""

    def __init__(self, payload: bytes | memoryview, plan: Plan, counts: npt.NDArray[np.int64] | None = None) -> None:
        if not 0 < len(payload) <= plan.budget_bytes:
            raise FrameError(f"payload must have at most {plan.budget_bytes} bytes, got {len(payload)}")
        self.plan = plan
        self.head, length = Head.from_bytes(payload)
        self.prior = whole_prior(plan) if self.head.mode & PRIOR else None
        if self.head.mode & PRIOR and self.prior is None:
            raise FrameError("payload is coded against a prior, and the plan has none")
        if counts is None or self.prior is None:
            counts = class_counts(self.prior, plan)
        self.counts, totals = counts, counts.sum(axis=0)
        data, kind = np.frombuffer(payload, np.uint8, offset=length), small.Decoder if is_small(plan) else ans.Decoder
        self.decoder = kind(data, totals, most_symbols(self.head.step), checked_learnt(plan))
        self.number = 0
        if not self.decoder.sound:
            raise FrameError("payload's code does not begin as any does: it is cut, or has bytes too many")

    @property
    def learnt(self) -> Learnt:
        """Return what the coder has learnt, for the next round to begin with."""
        return tokens.learnt_by(self.decoder.models)

    def next(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return where in the coder's order the symbols of the next block that are not zero lie, and what they are."""
        counts = self.counts[self.number]
        self.number += 1
        starts = np.concatenate([[0], np.cumsum(counts)])
        places, symbols = np.empty(starts[-1], np.int32), np.empty(starts[-1], np.int32)
        count = self.decoder.block(starts, places, symbols)
        if count < 0:
            raise FrameError("payload holds a gap beyond its last coordinate")
        return places[:count], symbols[:count]

    def tails(self, places: npt.NDArray[np.int32], contexts: int) -> npt.NDArray[np.int32]:
        """Return the masses of the block's tails, -1 where there is none; after its symbols, which lie at `places`."""
        tails = np.full(contexts, -1, np.int32)
        if not self.head.mode & (PRIOR | DITHER):
            counts = np.bincount(places // self.plan.vocab, minlength=contexts)
            wanted = (counts > 0) & (counts < self.plan.vocab)
            if not self.decoder.tails(wanted, tails):
                raise FrameError("payload states the mass of a tail that cannot be")
        return tails

    def end(self) -> None:
        """Refuse a payload that does not end where its last symbol does."""
        if not self.decoder.ended():
            raise FrameError("payload does not end with its last symbol")

    def read(self, rows: range) -> tuple[Array, Array, Array]:
        """Return where in the coder's order the next block's symbols lie, the symbols, and the contexts' tails."""
        places, symbols = self.next()
        tails = self.tails(places, len(rows))
        if rows.stop == self.plan.contexts:
            self.end()
        return places, symbols, tails

    def block(self, rows: range) -> tuple[Array, Array, Array]:
        """Return the coordinates of the next block that are not zero, their symbols, and the contexts' tails."""
        places, symbols, tails = self.read(rows)
        if self.prior is not None:
            places = class_order(self.prior[rows.start : rows.stop])[0][places]
        return places, symbols, tails
