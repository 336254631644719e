"""How the predictive codec codes: the choice of a mode, the search for the step, and the way back."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.predictive import companding
from fpld.codecs.predictive.head import DITHER, MEASURED, PRIOR, START_BYTES, STEPS, Head, cell_bytes
from fpld.codecs.predictive.ratecontrol import finest, most
from fpld.codecs.predictive.symbols import Material, SymbolReader, block_ranges, dither_of, written
from fpld.codecs.prior import ArrayPrior, whole_prior
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fpld.codecs.base import Learnt
    from fpld.types import Plan, Reals

    Array = np.ndarray[Any, np.dtype[Any]]

SAMPLE = 1 << 17  # coordinates that the choice of a mode looks at
_DITHER_GAIN = 0.8  # what dither must win if all nodes agree: it loses where they do not
_NEIGHBOURS = 4  # nodes that a node takes to be like itself when it judges the gain
_CHUNK = 1 << 15  # coordinates at a time that stay in the cache
_ESTIMATE = 1 << 14  # bytes from which on a code is written only once
_TIED = 0.99  # of the room: what fills less is held back by ties
_NEAR = 16  # steps over which the slope is measured
_MARGIN = 128  # steps: so much finer than on some contexts it may get on all
_WORTH = 8  # times its length: payloads for which what was measured is worth its place


def encode(logits: Reals, plan: Plan) -> bytes:
    """Choose how to code on some contexts, then find the finest step whose payload fits the budget."""
    whole_prior(plan)
    some, few = _sample(logits, plan)
    trials = [_trial(some, few, mode) for mode in _modes(plan)]
    best = min(trials, key=lambda trial: trial.loss)
    return best.payload if few.contexts == plan.contexts else _encode(logits, plan, best)


def check(payload: bytes | memoryview, plan: Plan) -> Learnt | None:
    """Refuse an unsound payload, without the cost of reconstruction; return what the coder has learnt from it."""
    if len(payload) == 0:
        return None
    reader = SymbolReader(payload, plan)
    for rows in block_ranges(plan):
        reader.tails(reader.next()[0], len(rows))
    reader.end()
    return reader.learnt


class _Trial(NamedTuple):
    """A mode that was tried on some contexts: the loss to be expected of it, the step, and what it was tried on."""

    loss: float
    mode: int
    step: int
    material: Material
    payload: bytes
    slope: float  # of the logarithm of its length, by step


def _trial(logits: Reals, plan: Plan, mode: int) -> _Trial:
    """Code with a mode; return the loss that is to be expected of it."""
    material = Material.prepare(logits, plan, mode)
    step, payload = _fill(material, plan, None)
    here, there = (material.records(near, plan, 4 * plan.budget_bytes)[0] for near in (step, min(step + _NEAR, STEPS)))
    slope = max(math.log(max(here, 1) / max(there, 1)) / _NEAR, 1e-4)
    if mode & DITHER and payload:
        found = loss(logits, _mean_of_slots(logits, plan, Head(mode, step))) / _DITHER_GAIN
    else:
        found = loss(logits, np.concatenate([block.values for block in blocks(payload, plan)]))
    return _Trial(found, mode, step, material, payload, slope)


def _mean_of_slots(logits: Reals, plan: Plan, head: Head) -> npt.NDArray[np.float32]:
    """Return what a few nodes with these very logits would be decoded to, on average: dither pays by the others."""
    prior = whole_prior(plan) if head.mode & PRIOR else None
    y = companding.compand(logits, prior) / np.float32(head.size)
    every = -(-plan.slots // _NEIGHBOURS)
    slots = range(plan.slot % every, plan.slots, every)
    total = np.zeros(plan.shape, np.float32)
    for slot in slots:
        dither = dither_of(replace(plan, slot=slot), range(plan.contexts))
        total += companding.expand_dithered(np.rint(y + dither).astype(np.int32), dither, prior, head)[0]
    total /= len(slots)
    return total


def _modes(plan: Plan) -> list[int]:
    """Return the modes that a plan allows."""
    modes = [PRIOR, 0] if plan.prior is not None else [0]
    return [*modes, *(mode | DITHER for mode in modes)] if plan.slots > 1 else modes


def _sample(logits: Reals, plan: Plan) -> tuple[Reals, Plan]:
    """Take contexts from everywhere, so many that they tell."""
    every = plan.contexts // max(SAMPLE // plan.vocab, 8)
    if every < 2:
        return logits, plan
    few = logits[::every]
    prior = whole_prior(plan)
    return few, replace(plan, contexts=len(few), prior=None if prior is None else ArrayPrior(prior[::every]))


def _encode(logits: Reals, plan: Plan, trial: _Trial) -> bytes:
    """Code all contexts, in the way that was tried on some; only what may be more than zero is kept meanwhile."""
    step = trial.step
    while True:
        least = max(step - _MARGIN, 0)
        material = Material.prepare(logits, plan, trial.mode, least)
        step, payload = _fill(material, plan, trial._replace(step=step))
        if step > least or step == 0:
            return payload  # otherwise the contexts that were tried were much harder than the others


def _fill(material: Material, plan: Plan, trial: _Trial | None) -> tuple[int, bytes]:
    """Code with the finest step that fits; return the step and the payload, empty if nothing fits.

    `trial` is what some contexts have shown; without it these are they.
    """
    mode, extra = material.mode, cell_bytes(material.groups)
    # Under dither the error is known without measuring.
    if not mode & DITHER and plan.budget_bytes >= _WORTH * extra:
        mode |= MEASURED
    room = plan.budget_bytes - START_BYTES - (extra if mode & MEASURED else 0)
    if room <= 0:
        return STEPS - 1, b""
    wide = 2 * room + 64
    kept: list[tuple[int, bytes | tuple[float, Array]]] = [(0, b"")]  # what fits, and its length

    def length(step: int, cut: int | None = None) -> int:
        bits, records = material.records(step, plan, wide, cut)  # beyond that they are not all
        if room >= _ESTIMATE:  # nearly, and never less: writing it would take as long again
            size = int(bits / 8) + 9
            if size <= room:
                kept[0] = size, (bits, records)
        else:
            found = written(bits, records, plan, wide)
            size = len(found) or wide + 1
            if size <= room:
                kept[0] = size, found
        return size

    steps, guess = range(material.finest, STEPS), None if trial is None else trial.step
    step = finest(length, room, steps, guess, *(() if trial is None else (trial.slope,)))
    if step is None:
        return STEPS - 1, b""
    if kept[0][0] < _TIED * room and step > steps.start:
        # Equal values cross a step together: some are to be coded with the next finer one.
        size, code = kept[0]
        if most(partial(length, step - 1), room, material.y.size) is not None and kept[0][0] > size:
            step -= 1
        else:
            kept[0] = size, code
    _, code = kept[0]
    code = code if isinstance(code, bytes) else written(*code, plan, room)
    measured = material if trial is None else trial.material
    head = Head(mode, step, measured.measure(step)) if mode & MEASURED else Head(mode, step)
    return step, head.to_bytes() + code


def loss(logits: Reals, decoded: npt.NDArray[np.float32]) -> float:
    """Return KL(node's own distribution || what is decoded), averaged over contexts."""
    total, stride = 0.0, max(_CHUNK // logits.shape[1], 1)
    for start in range(0, len(logits), stride):
        true, other = (x[start : start + stride].astype(np.float64) for x in (logits, decoded))
        true -= true.max(axis=1, keepdims=True)
        other -= other.max(axis=1, keepdims=True)
        p = np.exp(true)
        true -= other
        mass = p.sum(axis=1)
        gap = np.log(np.exp(other, out=other).sum(axis=1) / mass)
        total += float((np.einsum("ij,ij->i", p, true) / mass + gap).sum())
    return total / len(logits)


def blocks(payload: bytes | memoryview, plan: Plan) -> Iterator[Decoded]:
    """Decode the payload's own blocks, one after the other."""
    reader = SymbolReader(payload, plan) if len(payload) else None
    for rows in block_ranges(plan):
        values, variance = expanded(None if reader is None else reader.block(rows), reader, plan, rows)
        bias = companding.NO_BIAS if reader is None else companding.bias(variance, reader.head)
        yield Decoded(values, variance, bias)


def expanded(
    block: tuple[Array, Array, Array] | None, reader: SymbolReader | None, plan: Plan, rows: range
) -> companding.Pair:
    """Return log-probabilities and variances of a block; of nothing the prior, or the same for all tokens."""
    shape = (len(rows), plan.vocab)
    if block is None or reader is None:
        prior = whole_prior(plan)
        return companding.unsent(None if prior is None else prior[rows.start : rows.stop], shape)
    prior = None if reader.prior is None else reader.prior[rows.start : rows.stop]
    places, symbols, tails = block
    if not reader.head.mode & DITHER:
        return companding.expand(places, symbols, tails, prior, reader.head, shape)
    dense = np.zeros(shape, np.int32)
    dense.flat[places] = symbols
    return companding.expand_dithered(dense, dither_of(plan, rows), prior, reader.head)
