"""The predictive codec with a strict budget for each context: no context borrows bits from another.

A context has its own slice of the payload, of the same length to a byte: a byte for its step, then its code, and
zeros where that is shorter. What the coder learns goes on from context to context; steps do not. Where links or
auditors want the same share for every context this is it; pooled bits (`predictive`) lose less.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs import companding, rangecoder
from fpld.codecs.coding import loss
from fpld.codecs.head import PRIOR, STEPS, Head
from fpld.codecs.prior import checked
from fpld.codecs.ratecontrol import finest
from fpld.codecs.symbols import class_order, first_models
from fpld.errors import FrameError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fpld.types import Plan, Reals

_NUMBERS, _NOTHING = 255, 255  # steps that a byte can name; the one that says that nothing is sent
_STRIDE = STEPS // _NUMBERS
_SAMPLE = 32  # contexts that the choice of a mode looks at


def slices(plan: Plan) -> list[int]:
    """Give the bytes where each context's slice begins, and the end; only the end if there is no room."""
    share, longer = divmod(plan.budget_bytes - 1, plan.contexts)
    if share < 2:
        return [0]
    return [1 + row * share + min(row, longer) for row in range(plan.contexts + 1)]


def encode(logits: Reals, plan: Plan) -> bytes:
    """Choose prior or head on the first contexts, then code each context into its slice."""
    checked(plan)
    places = slices(plan)
    if len(places) == 1:
        return b""
    modes = [PRIOR, 0] if plan.prior is not None else [0]
    few = places[: _SAMPLE + 1]

    def left(mode: int) -> float:
        payload = _encode(logits, plan, mode, few)
        return loss(logits[: len(few) - 1], np.concatenate([values for values, _ in _rows(payload, plan, few)]))

    return _encode(logits, plan, min(modes, key=left) if len(modes) > 1 else modes[0], places)


def blocks(payload: bytes | memoryview, plan: Plan) -> Iterator[companding.Pair]:
    """Decode context by context."""
    places = slices(plan)
    if len(payload) != places[-1] or (len(payload) and payload[0] not in (0, PRIOR)):
        raise FrameError(f"payload must be {places[-1]} bytes and begin with its mode, got {len(payload)}")
    if len(payload) == 0:
        prior = checked(plan)
        for row in range(plan.contexts):
            yield companding.unsent(None if prior is None else prior[row : row + 1], (1, plan.vocab))
    else:
        yield from _rows(payload, plan, places)


def check(payload: bytes | memoryview, plan: Plan) -> None:
    """Refuse an unsound payload."""
    for _ in blocks(payload, plan):
        pass


def _encode(logits: Reals, plan: Plan, mode: int, places: list[int]) -> bytes:
    out = bytearray(places[-1])
    out[0] = mode
    prior, models, guess = (plan.prior if mode & PRIOR else None), first_models(plan), None
    for row, (start, stop) in enumerate(pairwise(places)):
        own = None if prior is None else prior[row : row + 1]
        y = companding.compand(logits[row : row + 1], own)
        found = _best(y if own is None else y[:, class_order(own)[0]], mode, stop - start - 1, models, guess)
        if found is None:
            out[start] = _NOTHING
            continue
        guess, code, models = found
        out[start] = guess
        out[start + 1 : start + 1 + len(code)] = code
    return bytes(out)


def _best(
    y: npt.NDArray[np.float32], mode: int, room: int, models: rangecoder.Models, guess: int | None
) -> tuple[int, bytes, rangecoder.Models] | None:
    """Give the finest step whose code fits, the code, and what the coder has learnt then."""
    learnt = {}
    starts = np.array([[0, *[y.size] * rangecoder.CLASSES]])
    buffer = np.empty(2 * room + 16, np.uint8)

    def code(number: int) -> tuple[int, bytes]:
        head = Head(mode, _STRIDE * number)
        tails = np.empty(0 if mode & PRIOR else 1, np.int32)
        if tails.size:
            companding.tails(y, 1 / head.size, head.rounding, tails)
        learnt[number] = models.copy()
        size = rangecoder.encode(
            *(y.ravel(), np.empty(0, np.float32), starts, tails, np.array([0, 1])),
            *(1 / head.size, head.rounding, learnt[number], buffer),
        )
        found = rangecoder.trim(buffer, size)
        return (len(found), found) if size <= buffer.size else (2 * room, b"")

    best = finest(code, room, _NUMBERS, guess)
    return None if best is None else (*best, learnt[best[0]])


def _rows(payload: bytes | memoryview, plan: Plan, places: list[int]) -> Iterator[companding.Pair]:
    prior = checked(plan) if payload[0] & PRIOR else None
    if payload[0] & PRIOR and prior is None:
        raise FrameError("payload is coded against a prior, and the plan has none")
    models, totals = first_models(plan), np.zeros(rangecoder.CLASSES, np.int64)
    totals[0] = plan.vocab
    starts = np.array([0, *[plan.vocab] * rangecoder.CLASSES])
    at, symbols = np.empty(plan.vocab, np.int32), np.empty(plan.vocab, np.int32)
    for row, (start, stop) in enumerate(pairwise(places)):
        own = None if prior is None else prior[row : row + 1]
        if payload[start] == _NOTHING:
            yield companding.unsent(own, (1, plan.vocab))
            continue
        head, data = Head(payload[0], _STRIDE * payload[start]), np.frombuffer(payload[start + 1 : stop], np.uint8)
        state = rangecoder.new_decoder(totals)
        count = rangecoder.decode(data, state, starts, models, at, symbols)
        tail = np.full(1, -1, np.int32)
        sound = count >= 0
        if sound and own is None:
            sound = rangecoder.decode_tails(data, state, models, np.array([0 < count < plan.vocab]), tail)
        if not sound:
            raise FrameError(f"payload is not sound at context {row}")
        where = at[:count] if own is None else class_order(own)[0][at[:count]]
        yield companding.expand(where, symbols[:count], tail, own, head, (1, plan.vocab))
