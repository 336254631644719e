"""From blocks of logits to a payload: the finest step whose code fits the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import _check
from fpld.codecs.predictive.ratecontrol import FULL, finest
from fpld.codecs.samples.grid import OCTAVE, STEPS, step_number
from fpld.codecs.samples.head import HEAD_BYTES, Head
from fpld.codecs.samples.material import Material, differences
from fpld.codecs.samples.reading import prior_block
from fpld.codecs.samples.writing import write
from fpld.numerics import split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fpld.codecs.prior import Eighths
    from fpld.types import Plan, Reals

    Array = np.ndarray[Any, np.dtype[Any]]
    Piece = tuple[range, np.ndarray[Any, np.dtype[np.float32]], Eighths]

BLOCK = 1 << 18  # coordinates that are worked on at a time
HELD = 1 << 22  # coordinates that are held till the step is known about
_BITS = 4.0  # of a symbol that is not zero, about
_SLOPE = 1 / 320  # by which the logarithm of a length falls from step to step, about
_FINER = 2 * OCTAVE  # than a guess: steps that are in question
_MARGIN = 3 * OCTAVE // 4  # than on the contexts that are held


def encode(blocks: Iterable[Reals], plan: Plan) -> bytes:
    """Encode consecutive blocks of contexts, each looked at once; what is kept of them is what may be coded."""
    pieces = _pieces(blocks, plan)
    few = min(max(HELD // plan.vocab, 1), plan.contexts)
    kept = np.empty((few, plan.vocab), np.float32)  # one array: large ones get large pages, which cost less
    held: list[Piece] = []
    total = 0.0
    while not held or held[-1][0].stop < few:
        rows, change, prior = next(pieces)
        total += float(np.abs(change).sum(dtype=np.float64))
        kept[rows.start : rows.stop] = change
        held.append((rows, kept[rows.start : rows.stop], prior))
    step, material, payload = _search(held, plan, _guess(total / few, plan.bits))
    if few < plan.contexts:
        material = Material(plan, max(step - _MARGIN, 0))
        for piece in held:
            material.add(*piece)
        held.clear()
        for piece in pieces:
            material.add(*piece)
        step, payload = _fill(material, plan.budget_bytes, step)
    for _ in pieces:  # whatever comes too much is refused
        pass
    return payload


def _pieces(blocks: Iterable[Reals], plan: Plan) -> Iterator[Piece]:
    """Return contexts, their d (until the next are asked for) and their prior: so many as stay in the cache."""
    start, few = 0, max(HELD // plan.vocab, 1)
    room = np.empty((2, max(BLOCK, plan.vocab)), np.float32)
    for block in blocks:
        part = _check.block(block, plan.shape, start)
        cuts = [few - start] if start < few < start + len(part) else []
        for own in np.split(part, cuts):
            for piece in split(len(own), plan.vocab, BLOCK):
                rows = range(start + piece.start, start + piece.stop)
                prior = prior_block(plan, rows)
                yield rows, differences(own[piece.start : piece.stop], prior, rows.start, room), prior
            start += len(own)
    _check.all_rows(start, plan.contexts)


def _guess(change: float, bits: float) -> int:
    """Return about the step for so many bits per context, whose |d| add up to `change`."""
    return step_number(max(change, 1e-9) * _BITS / bits)


def _search(held: list[Piece], plan: Plan, guess: int) -> tuple[int, Material, bytes]:
    """Find the step that fills the share of the budget that contexts have which are held."""
    contexts = sum(len(rows) for rows, *_ in held)
    budget = plan.budget_bytes * contexts // plan.contexts
    least = guess
    while True:
        least = max(least - _FINER, 0)
        material = Material(plan, least)
        for piece in held:
            material.add(*piece)
        step, payload = _fill(material, budget, guess)
        if step > least or least == 0 or len(payload) >= FULL * budget:
            return step, material, payload
        guess = least


def _fill(material: Material, budget: int, guess: int) -> tuple[int, bytes]:
    """Code with the finest step that fits; return the step and the payload, empty if nothing fits."""
    room = budget - HEAD_BYTES
    if room <= 0:
        return STEPS - 1, b""
    contexts = len(material.arrays()[-1])
    kept = [b""]

    def length(step: int) -> int:
        data, variance = write(material, step, 2 * room + 64)
        if 0 < len(data) <= room:
            kept[0] = Head(step, variance / contexts).to_bytes() + data
        return len(data) or 2 * room + 65

    step = finest(length, room, range(material.finest, STEPS), guess, _SLOPE)
    return (STEPS - 1 if step is None else step), kept[0]
