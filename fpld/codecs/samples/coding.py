"""From blocks of logits to a payload: the finest step whose code fits the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.codecs.predictive.ratecontrol import FULL, finest, most
from fpld.codecs.samples.chances import prior_chances
from fpld.codecs.samples.grid import OCTAVE, STEPS, step_number
from fpld.codecs.samples.head import FINER_BYTES, HEAD_BYTES, Head
from fpld.codecs.samples.material import Material
from fpld.codecs.samples.reading import prior_block
from fpld.codecs.samples.writing import write
from fpld.numerics import softmax, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fpld.codecs.prior import Eighths
    from fpld.types import Plan, Reals

    Piece = tuple[range, Reals, Eighths]

BLOCK = 1 << 18  # coordinates that are worked on at a time
HELD = 1 << 21  # coordinates that are held till the step is known about
_SOME = 1 << 16  # coordinates that a first guess goes by
_BITS = 4.0  # of a symbol that is not zero, about
_SLOPE = 1 / 320  # by which the logarithm of a length falls from step to step, about
_UNUSED, _WORTH = 0.01, 16  # of the budget, and bytes: with so much left two steps are tried
_FINER = 2 * OCTAVE  # than a guess: steps that are in question
_MARGIN = 5 * OCTAVE // 4  # than on the contexts that are held


def encode(blocks: Iterable[Reals], plan: Plan) -> bytes:
    """Encode consecutive blocks of contexts, each looked at once; what is kept of them is what may be coded."""
    pieces = _pieces(blocks, plan)
    few = min(max(HELD // plan.vocab, 1), plan.contexts)
    step, material, payload = _search(_hold(pieces, few), plan)
    if few < plan.contexts:
        material.coarsen(max(step - _MARGIN, material.finest))
        for piece in pieces:
            material.add(*piece)
        step, payload = _fill(material, plan.budget_bytes, step)
    for _ in pieces:  # whatever comes too much is refused
        pass
    return _mix(material, plan.budget_bytes, step, payload)


def _hold(pieces: Iterator[Piece], few: int) -> list[Piece]:
    """Take the first contexts and copy their logits: into one array, as large ones get large pages, which cost less."""
    held: list[Piece] = []
    while not held or held[-1][0].stop < few:
        rows, logits, prior = next(pieces)
        if not held:
            kept = np.empty((few, logits.shape[1]), logits.dtype)
        kept[rows.start : rows.stop] = logits
        held.append((rows, kept[rows.start : rows.stop], prior))
    return held


def _pieces(blocks: Iterable[Reals], plan: Plan) -> Iterator[Piece]:
    """Return contexts, their logits (until the next are asked for) and their prior: so many as stay in the cache."""
    start, few = 0, max(HELD // plan.vocab, 1)
    for block in blocks:
        part = _check.block(block, plan.shape, start)
        cuts = [few - start] if start < few < start + len(part) else []
        for own in np.split(part, cuts):
            for piece in split(len(own), plan.vocab, BLOCK):
                rows = range(start + piece.start, start + piece.stop)
                yield rows, own[piece.start : piece.stop], prior_block(plan, rows)
            start += len(own)
    _check.all_rows(start, plan.contexts)


def _guess(logits: Reals, prior: Eighths, bits: float) -> int:
    """Return about the step for so many bits per context, from some contexts."""
    apart = np.abs(softmax(logits, np.float32) - prior_chances(prior)).sum(axis=1).mean(dtype=np.float64)
    return step_number(max(float(apart), 1e-9) * _BITS / bits)


def _search(held: list[Piece], plan: Plan) -> tuple[int, Material, bytes]:
    """Find the step that fills the share of the budget that contexts have which are held."""
    contexts = sum(len(rows) for rows, *_ in held)
    budget = plan.budget_bytes * contexts // plan.contexts
    some = slice(max(_SOME // plan.vocab, 1))
    rows, logits, prior = held[0]
    _check.finite(logits, rows.start)
    least = guess = _guess(logits[some], prior[some], plan.bits)
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
    room, kept = budget - HEAD_BYTES, [b""]
    if room <= 0:
        return STEPS - 1, b""

    def length(step: int) -> int:
        return _coded(material, step, 0, room, kept)

    step = finest(length, room, range(material.finest, STEPS), guess, _SLOPE)
    return (STEPS - 1 if step is None else step), kept[0]


def _mix(material: Material, budget: int, step: int, payload: bytes) -> bytes:
    """Code as many contexts as fit with the next finer step, where one step for all leaves much room."""
    room, kept = budget - HEAD_BYTES - FINER_BYTES, [payload]
    unused = budget - len(payload)
    if payload and step > material.finest and unused > max(_UNUSED * budget, _WORTH):
        most(lambda finer: _coded(material, step, finer, room, kept), room, material.plan.contexts - 1)
    return kept[0]


def _coded(material: Material, step: int, finer: int, room: int, kept: list[bytes]) -> int:
    """Return the length of a code; if it fits, keep the payload."""
    data, variance = write(material, step, 2 * room + 64, finer)
    if 0 < len(data) <= room:
        kept[0] = Head(step, variance / len(material.arrays()[-1]), finer).to_bytes() + data
    return len(data) or 2 * room + 65
