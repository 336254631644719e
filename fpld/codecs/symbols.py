"""Symbols of a predictive payload: how coordinates are ordered for the coder, and how a payload is read back.

Contexts come in blocks of about 2^18 coordinates. Against a prior a block's coordinates are ordered by class; without
one they stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs import companding, rangecoder
from fpld.codecs.head import DITHER, GROUPS, PER_GROUP, PRIOR, Head, Table, rounding, step_size
from fpld.codecs.prior import CLASS_OF, Prior, checked
from fpld.dither import Dither
from fpld.errors import FrameError, InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.codecs.companding import Floats32
    from fpld.types import Plan, Reals

BLOCK = 1 << 18


def block_ranges(plan: Plan) -> list[range]:
    """Give the contexts of each block."""
    if plan.contexts * plan.vocab > rangecoder.MOST_COORDINATES:
        most = rangecoder.MOST_COORDINATES // plan.vocab
        raise InputError(f"the predictive codec takes at most {most} contexts of {plan.vocab} tokens at once")
    stride = max(BLOCK // plan.vocab, 1)
    return [range(at, min(at + stride, plan.contexts)) for at in range(0, plan.contexts, stride)]


def first_models(plan: Plan) -> rangecoder.Models:
    """Give the models that a payload begins with: those of the plan's tables, if it has any."""
    tables = plan.tables
    if tables is not None and (
        tables.shape != (rangecoder.MODELS,) or tables.dtype != np.int32 or tables.min() < 1 or tables.max() > 65535
    ):
        raise InputError(f"tables must be {rangecoder.MODELS} probabilities in 2^-16, int32, got {tables!r:.80}")
    return rangecoder.new_models(tables)


def dither_of(plan: Plan, rows: range) -> Floats32:
    """Give the dither of a block, in steps."""
    return Dither.of(plan).block(rows, plan.vocab).astype(np.float32)


def class_order(prior: Prior) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Order a block's coordinates by class; give them, and where each class starts."""
    classes = CLASS_OF[-prior.ravel()]
    order, starts = np.empty(classes.size, np.int32), np.zeros(rangecoder.CLASSES + 1, np.int64)
    rangecoder.arrange(classes, order, starts)
    return order, starts


def class_totals(prior: Prior) -> npt.NDArray[np.int64]:
    """Count the coordinates of each class."""
    return np.bincount(CLASS_OF, weights=np.bincount(-prior.ravel(), minlength=CLASS_OF.size)).astype(np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Material:
    """Hold y in the coder's order, and where blocks and classes lie."""

    mode: int
    y: Floats32
    dither: Floats32
    starts: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    @classmethod
    def prepare(cls, logits: Reals, plan: Plan, mode: int) -> Material:
        """Compand and order logits [m, V]."""
        blocks = block_ranges(plan)
        prior = checked(plan) if mode & PRIOR else None
        y = np.empty(plan.contexts * plan.vocab, np.float32)
        dither = np.empty_like(y) if mode & DITHER else np.empty(0, np.float32)
        starts = np.zeros((len(blocks), rangecoder.CLASSES + 1), np.int64)
        for b, rows in enumerate(blocks):
            part = slice(rows.start * plan.vocab, rows.stop * plan.vocab)
            rows_prior = None if prior is None else prior[rows.start : rows.stop]
            found = companding.compand(logits[rows.start : rows.stop], rows_prior).ravel()
            shift = dither_of(plan, rows).ravel() if mode & DITHER else dither
            if rows_prior is None:
                starts[b, 1:] = found.size
            else:
                order, starts[b] = class_order(rows_prior)
                found = found[order]
                shift = shift[order] if mode & DITHER else shift
            starts[b] += part.start
            y[part] = found
            if mode & DITHER:
                dither[part] = shift
        return cls(mode, y, dither, starts, np.array([rows.start for rows in blocks] + [plan.contexts]))

    @property
    def groups(self) -> int:
        """Give the number of groups of classes in use."""
        used = np.diff(self.starts, axis=1)[:, : GROUPS * PER_GROUP].any(axis=0)
        return int(used.reshape(GROUPS, PER_GROUP).any(axis=1).sum())

    def code(self, step: int, room: int, plan: Plan) -> tuple[int, bytes]:
        """Code with a step: give the length and the code; beyond a quarter more than `room` the length is a guess."""
        size, contexts = step_size(step), int(self.rows[-1])
        tails = np.empty(0, np.int32)
        if not self.mode & (PRIOR | DITHER):
            tails = np.empty(contexts, np.int32)
            companding.tails(self.y.reshape(contexts, -1), 1 / size, rounding(self.mode, step), tails)
        out = np.empty(room + room // 4 + 8, np.uint8)
        models = first_models(plan)
        written = rangecoder.encode(
            self.y, self.dither, self.starts, tails, self.rows, 1 / size, rounding(self.mode, step), models, out
        )
        if written > out.size:
            return 2 * room, b""
        code = rangecoder.trim(out, written)
        return len(code), code

    def measure(self, step: int) -> Table:
        """Measure what the cells of a step hold."""
        return companding.measure(self.y, self.starts, self.mode, step_size(step), rounding(self.mode, step))


class Reader:
    """Read a payload block by block."""

    def __init__(self, payload: bytes | memoryview, plan: Plan) -> None:
        if not 0 < len(payload) <= plan.budget_bytes:
            raise FrameError(f"payload must have at most {plan.budget_bytes} bytes, got {len(payload)}")
        self.plan = plan
        self.head, length = Head.from_bytes(payload)
        self.prior = checked(plan) if self.head.mode & PRIOR else None
        if self.head.mode & PRIOR and self.prior is None:
            raise FrameError("payload is coded against a prior, and the plan has none")
        self.data = np.frombuffer(payload, np.uint8, offset=length)
        totals = np.zeros(rangecoder.CLASSES, np.int64)
        if self.prior is None:
            totals[0] = plan.contexts * plan.vocab
        else:
            found = class_totals(self.prior)
            totals[: len(found)] = found
        self.models = first_models(plan)
        self.state = rangecoder.new_decoder(totals)

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """Give what the coder has learnt, for the next round to begin with."""
        return rangecoder.table_of(self.models)

    def block(
        self, rows: range, ordered: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]] | None = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Give the coordinates of the next block that are not zero, their symbols, and the contexts' tails."""
        size = len(rows) * self.plan.vocab
        order, starts = None, np.array([0, *[size] * rangecoder.CLASSES])
        if self.prior is not None:
            order, starts = ordered or class_order(self.prior[rows.start : rows.stop])
        places, symbols = np.empty(size, np.int32), np.empty(size, np.int32)
        count = rangecoder.decode(self.data, self.state, starts, self.models, places, symbols)
        if count < 0:
            raise FrameError("payload holds a gap beyond its last coordinate")
        places, symbols = places[:count], symbols[:count]
        tails = np.full(len(rows), -1, np.int32)
        if order is not None:
            places = order[places]
        elif not self.head.mode & DITHER:
            counts = np.bincount(places // self.plan.vocab, minlength=len(rows))
            wanted = (counts > 0) & (counts < self.plan.vocab)
            if not rangecoder.decode_tails(self.data, self.state, self.models, wanted, tails):
                raise FrameError("payload states the mass of a tail that cannot be")
        if rows.stop == self.plan.contexts and not rangecoder.ended(self.data, self.state):
            raise FrameError("payload does not end with its last symbol")
        return places, symbols, tails
