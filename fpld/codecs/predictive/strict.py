"""The predictive codec with a strict budget for each context: no context borrows bits from another.

A context has its own slice of the payload, of the same length to a byte: a byte for its step, zeros, and its code.
The coder skips the zeros by itself. What the coder learns goes on from context to context; steps do not. Where links or
auditors want the same share for every context this is it; pooled bits (`predictive`) lose less.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.codecs.predictive import companding, small, tokens
from fpld.codecs.predictive.coding import loss
from fpld.codecs.predictive.head import PRIOR, STEPS, Head, most_symbols
from fpld.codecs.predictive.ratecontrol import finest
from fpld.codecs.predictive.symbols import class_order
from fpld.codecs.prior import CLASSES, Eighths, whole_prior
from fpld.errors import FrameError
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fpld.types import Plan, Reals

_NUMBERS, _NOTHING = 255, 255  # steps that a byte can name; the one that says that nothing is sent
_STRIDE = STEPS // _NUMBERS
_BITS_A_CLASS = 64  # of a context
_SLOPE = 0.06  # small trials: tables that have learnt one step find others far from it longer than they are
_SAMPLE = 32  # contexts that the choice of a mode looks at


def slices(plan: Plan) -> list[int]:
    """Return the bytes where each context's slice begins, and the end; only the end if there is no room."""
    share, longer = divmod(plan.budget_bytes - 1, plan.contexts)
    if share < 2:
        return [0]
    return [1 + row * share + min(row, longer) for row in range(plan.contexts + 1)]


def encode(logits: Reals, plan: Plan) -> bytes:
    """Choose prior or head on the first contexts, then code each context into its slice."""
    whole_prior(plan)
    places = slices(plan)
    if len(places) == 1:
        return b""
    modes = [PRIOR, 0] if plan.prior is not None else [0]
    few = places[: _SAMPLE + 1]

    def left(mode: int) -> float:
        payload = _encode(logits, plan, mode, few)
        return loss(logits[: len(few) - 1], np.concatenate([values for values, _ in _rows(payload, plan, few)]))

    return _encode(logits, plan, min(modes, key=left) if len(modes) > 1 else modes[0], places)


def blocks(payload: bytes | memoryview, plan: Plan) -> Iterator[Decoded]:
    """Decode context by context; without dither nothing is biased."""
    for values, variance in _pairs(payload, plan):
        yield Decoded(values, variance, companding.NO_BIAS)


def _pairs(payload: bytes | memoryview, plan: Plan) -> Iterator[companding.Pair]:
    places = slices(plan)
    if len(payload) != places[-1] or (len(payload) and payload[0] not in (0, PRIOR)):
        raise FrameError(f"payload must be {places[-1]} bytes and begin with its mode, got {len(payload)}")
    if len(payload) == 0:
        prior = whole_prior(plan)
        for row in range(plan.contexts):
            yield companding.unsent(None if prior is None else prior[row : row + 1], (1, plan.vocab))
    else:
        yield from _rows(payload, plan, places)


def check(payload: bytes | memoryview, plan: Plan) -> None:
    """Refuse an unsound payload."""
    for _ in _pairs(payload, plan):
        pass


class _Layout(NamedTuple):
    """A context's coordinates in the coder's order, where each class starts, and how many it has."""

    order: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    totals: npt.NDArray[np.int64]

    @property
    def rank(self) -> npt.NDArray[np.uint32]:
        """Return where in its class each coordinate lies."""
        within = np.arange(self.order.size) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return within.astype(np.uint32)


def _layout(own: Eighths | None, plan: Plan) -> _Layout:
    """Order a context: against a prior by class, and in as many classes as its bits pay for."""
    if own is None:
        order, starts = np.arange(plan.vocab, dtype=np.int32), np.array([0, plan.vocab])
    else:
        order, all_starts = class_order(own)
        starts = all_starts[np.minimum(np.arange(_classes(plan) + 1) * CLASSES // _classes(plan), CLASSES)]
    return _Layout(order, starts, np.append(np.diff(starts), 0))


def _classes(plan: Plan) -> int:
    """Return how many classes a context's bits pay for: each costs a few bits in every context."""
    return int(min(max(plan.bits // _BITS_A_CLASS, 1), 16))


def _models(plan: Plan, mode: int, decoder: bool) -> tokens.Models:
    """Make models that go on from context to context: any class may hold all coordinates."""
    totals = np.full((_classes(plan) if mode & PRIOR else 1) + 1, plan.vocab)
    return tokens.new_models(totals, 1, None, decoder)


def _limit(models: tokens.Models, step: int) -> None:
    for c in range(len(models.tables) - 1):
        tokens.limit_sizes(most_symbols(step), *models, c)


def _encode(logits: Reals, plan: Plan, mode: int, places: list[int]) -> bytes:
    out = bytearray(places[-1])
    out[0] = mode
    prior, guess = (whole_prior(plan) if mode & PRIOR else None), None
    models = _models(plan, mode, decoder=False)
    for row, (start, stop) in enumerate(pairwise(places)):
        own = None if prior is None else prior[row : row + 1]
        y, layout = companding.compand(logits[row : row + 1], own), _layout(own, plan)
        found = _best(y[0, layout.order], layout, mode, stop - start - 1, models, guess)
        if found is None:
            out[start] = _NOTHING
            continue
        guess, code, models = found
        out[start] = guess
        out[start + 1 : stop] = code
    return bytes(out)


def _best(
    y: npt.NDArray[np.float32], layout: _Layout, mode: int, room: int, models: tokens.Models, guess: int | None
) -> tuple[int, bytes, tokens.Models] | None:
    """Return the finest step whose code fits, the code, and what the coder has learnt then."""
    found: dict[int, tuple[bytes, tokens.Models]] = {}
    totals, rank, rows = layout.totals, layout.rank, np.array([0, 1])
    symbols, gaps = np.empty(y.size, np.int32), np.empty(y.size + totals.size, np.int64)
    ends, none = np.empty((1, totals.size - 1), np.int64), np.empty(0, np.float32)
    records, buffer = np.empty(2 * (y.size + totals.size), np.int64), np.empty(2 * room + 16, np.uint8)

    def length(number: int) -> int:
        head, tails = Head(mode, _STRIDE * number), np.empty(0 if mode & PRIOR else 1, np.int32)
        scale = 1 / head.size, head.rounding, y.size, 0.0, 0.0
        if tails.size:
            companding.tails(y, rank, y.size, *scale, np.zeros(1), tails)
        learnt = tokens.Models(*(part.copy() for part in models))
        _limit(learnt, head.step)
        tokens.collect(y, rank, none, layout.starts[None], totals, *scale, symbols, gaps, ends)
        most = 8.0 * buffer.size
        bits, used = tokens.model(symbols, gaps, ends, totals, tails, rows, *learnt, records, most, tokens.COST)
        size = small.write(records[:used], buffer) if bits <= most else -1
        if 0 <= size <= room:
            found[number] = (bytes(room - size) + buffer[buffer.size - size :].tobytes(), learnt)
        return size if size >= 0 else 3 * room

    best = finest(length, room, range(_NUMBERS), guess, _SLOPE)
    return None if best is None else (best, *found[best])


def _rows(payload: bytes | memoryview, plan: Plan, places: list[int]) -> Iterator[companding.Pair]:
    prior = whole_prior(plan) if payload[0] & PRIOR else None
    if payload[0] & PRIOR and prior is None:
        raise FrameError("payload is coded against a prior, and the plan has none")
    models = _models(plan, payload[0], decoder=True)
    at, symbols = np.empty(plan.vocab, np.int32), np.empty(plan.vocab, np.int32)
    for row, (start, stop) in enumerate(pairwise(places)):
        own = None if prior is None else prior[row : row + 1]
        if payload[start] == _NOTHING:
            yield companding.unsent(own, (1, plan.vocab))
            continue
        head, data = Head(payload[0], _STRIDE * payload[start]), np.frombuffer(payload[start + 1 : stop], np.uint8)
        layout = _layout(own, plan)
        _limit(models, head.step)
        decoder, tail = small.Decoder(data, layout.totals, 0, None, models), np.full(1, -1, np.int32)
        count = decoder.block(layout.starts, at, symbols) if decoder.sound else -1
        sound = count >= 0
        if sound and own is None:
            sound = decoder.tails(np.array([0 < count < plan.vocab]), tail)
        if not sound or not decoder.ended():
            raise FrameError(f"payload is not sound at context {row}")
        yield companding.expand(layout.order[at[:count]], symbols[:count], tail, own, head, (1, plan.vocab))
