"""Encode logits into a predictive payload: choose a mode, search the finest step that fits, write the code.

The mode is tried on some contexts and judged by the KL that is left. The length of a code falls as the step grows, and
the payload is that of the finest step whose code fits. `SymbolCandidates` holds what of y may become a symbol for any
step of the search, so that a trial touches no other coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.predictive import companding, tokens
from fpld.codecs.predictive.ans import write_ans
from fpld.codecs.predictive.compact_ans import write_compact_ans
from fpld.codecs.predictive.decoder import (
    block_dither,
    checked_learnt,
    coder_blocks,
    decode_blocks,
    has_compact_code,
)
from fpld.codecs.predictive.header import (
    DITHER,
    GROUPS,
    MEASURED,
    PER_GROUP,
    PRIOR,
    START_BYTES,
    STEPS,
    Cells,
    PredictiveHeader,
    cell_bytes,
    largest_symbol,
    quantizer_step,
    rounding_offset,
)
from fpld.codecs.prior import CLASS_OF, ArrayPrior, whole_prior
from fpld.codecs.rate_control import finest_fitting_step, largest_fitting
from fpld.kernels import kernel

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.types import Array, Floats, Floats32, Ints, Plan, Reals

SAMPLE_COORDINATES = 1 << 17  # that the choice of a mode looks at
_DITHER_GAIN = 0.8  # what dither must win if all nodes agree: it loses where they do not
_NEIGHBOURS = 4  # nodes that a node takes to be like itself when it judges the gain
_CHUNK_COORDINATES = 1 << 15  # that stay in the cache
_ESTIMATED_BYTES = 1 << 14  # of room, from which on a code is write_code only once
_TIED_FILL = 0.99  # of the room: what fills less is held back by ties
_SLOPE_STEPS = 16  # over which the slope is measured
_MARGIN_STEPS = 128  # that all contexts may get finer than the sampled ones
_MIN_PAYLOAD_RATIO = 8  # of a payload to what was measured of its cells, which is sent from there on


def encode_logits(logits: Reals, plan: Plan) -> bytes:
    """Choose the mode on some contexts, then find the finest step whose payload fits the budget."""
    whole_prior(plan)  # raises, if it does not fit the plan
    sample, sample_plan = _sample(logits, plan)
    trials = [_trial(sample, sample_plan, mode) for mode in _modes(plan)]
    best = min(trials, key=lambda trial: trial.loss)
    return best.payload if sample_plan.contexts == plan.contexts else _encode_all(logits, plan, best)


class _Trial(NamedTuple):
    """A mode that was tried on some contexts: its loss, the step that fits, and what was coded.

    `slope` is that of the logarithm of the code's length, by step.
    """

    loss: float
    mode: int
    step: int
    candidates: SymbolCandidates
    payload: bytes
    slope: float


def _trial(logits: Reals, plan: Plan, mode: int) -> _Trial:
    """Encode with a mode; the loss is the KL that is left, or with dither that of a mean over several nodes."""
    candidates = SymbolCandidates.prepare(logits, plan, mode)
    step, payload = _fill_budget(candidates, plan, None)
    # The slope of log(length) by step, for the search on all contexts.
    next_step = min(step + _SLOPE_STEPS, STEPS)
    here, there = (candidates.records(each, plan, 4 * plan.budget_bytes)[0] for each in (step, next_step))
    slope = max(math.log(max(here, 1) / max(there, 1)) / _SLOPE_STEPS, 1e-4)
    if mode & DITHER and payload:
        loss = _mean_kl(logits, _mean_of_slots(logits, plan, PredictiveHeader(mode, step))) / _DITHER_GAIN
    else:
        loss = _mean_kl(logits, np.concatenate([block.values for block in decode_blocks(payload, plan)]))
    return _Trial(loss, mode, step, candidates, payload, slope)


def _mean_of_slots(logits: Reals, plan: Plan, header: PredictiveHeader) -> Floats32:
    """Return the mean of what a few nodes with these logits would be decoded to: dither pays only in a mean."""
    prior = whole_prior(plan) if header.mode & PRIOR else None
    y = companding.compand(logits, prior) / np.float32(header.size)
    every = -(-plan.slots // _NEIGHBOURS)
    slots = range(plan.slot % every, plan.slots, every)
    total = np.zeros(plan.shape, np.float32)
    for slot in slots:
        dither = block_dither(replace(plan, slot=slot), range(plan.contexts))
        total += companding.expand_dithered(np.rint(y + dither).astype(np.int32), dither, prior, header)[0]
    total /= len(slots)
    return total


def _modes(plan: Plan) -> list[int]:
    """Return the modes that a plan allows."""
    modes = [PRIOR, 0] if plan.prior is not None else [0]
    return [*modes, *(mode | DITHER for mode in modes)] if plan.slots > 1 else modes


def _sample(logits: Reals, plan: Plan) -> tuple[Reals, Plan]:
    """Return evenly spaced contexts, about `SAMPLE_COORDINATES`, and their plan."""
    every = plan.contexts // max(SAMPLE_COORDINATES // plan.vocab, 8)
    if every < 2:
        return logits, plan
    sample = logits[::every]
    prior = whole_prior(plan)
    return sample, replace(plan, contexts=len(sample), prior=None if prior is None else ArrayPrior(prior[::every]))


def _encode_all(logits: Reals, plan: Plan, trial: _Trial) -> bytes:
    """Encode all contexts with the mode of a trial; values that no step of the search can send are not held."""
    step = trial.step
    while True:
        finest = max(step - _MARGIN_STEPS, 0)
        candidates = SymbolCandidates.prepare(logits, plan, trial.mode, finest)
        step, payload = _fill_budget(candidates, plan, trial._replace(step=step))
        # If the step is the finest of all, the contexts of the trial were much harder than the others: search on.
        if step > finest or step == 0:
            return payload


class _Fitting(NamedTuple):
    """The last code of a search that fits: its length in bytes, and itself, or else its bits and records."""

    size: int
    code: bytes | tuple[float, Array]


def _fill_budget(candidates: SymbolCandidates, plan: Plan, trial: _Trial | None) -> tuple[int, bytes]:
    """Encode with the finest step that fits; return the step and the payload, empty if nothing fits.

    `trial` is what some contexts have shown; without it the candidates are those of a trial.
    """
    mode = candidates.mode
    extra = cell_bytes(candidates.groups)
    # With dither the error follows from the step, and need not be measured.
    if not mode & DITHER and plan.budget_bytes >= _MIN_PAYLOAD_RATIO * extra:
        mode |= MEASURED
    room = plan.budget_bytes - START_BYTES - (extra if mode & MEASURED else 0)
    if room <= 0:
        return STEPS - 1, b""
    limit = 2 * room + 64  # bytes from which on a code's exact length does not matter
    best = _Fitting(0, b"")

    def length(step: int, cut: int | None = None) -> int:
        nonlocal best
        bits, records = candidates.records(step, plan, limit, cut)
        if room >= _ESTIMATED_BYTES:
            # An upper bound that is nearly exact: writing the code would take as long again.
            size = int(bits / 8) + 9
            if size <= room:
                best = _Fitting(size, (bits, records))
        else:
            code = write_code(bits, records, plan, limit)
            size = len(code) or limit + 1
            if size <= room:
                best = _Fitting(size, code)
        return size

    steps = range(candidates.finest, STEPS)
    guess = None if trial is None else trial.step
    step = finest_fitting_step(length, room, steps, guess, *(() if trial is None else (trial.slope,)))
    if step is None:
        return STEPS - 1, b""
    if best.size < _TIED_FILL * room and step > steps.start:
        # Equal values cross a step together: some of them are coded with the next finer step.
        untied = best
        if largest_fitting(partial(length, step - 1), room, candidates.y.size) is not None and best.size > untied.size:
            step -= 1
        else:
            best = untied
    code = best.code if isinstance(best.code, bytes) else write_code(*best.code, plan, room)
    measured = candidates if trial is None else trial.candidates
    header = PredictiveHeader(mode, step, measured.measure(step)) if mode & MEASURED else PredictiveHeader(mode, step)
    return step, header.to_bytes() + code


def _mean_kl(logits: Reals, decoded: Floats32) -> float:
    """Return KL(softmax(logits) || softmax(decoded)), averaged over contexts, a chunk at a time."""
    total = 0.0
    stride = max(_CHUNK_COORDINATES // logits.shape[1], 1)
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


class _Sifted(NamedTuple):
    """Room for what `_sift` finds in a block.

    `places` and `ranks` say where values lie in the block and in their class, `classes` which class that is, and
    `order` sorts them by class.
    """

    places: Array
    classes: Array
    ranks: Array
    order: Array


@kernel
def _sift(y: Any, prior: Any, class_of: Any, least: float, seen: Any, starts: Any, sifted: Any) -> int:
    """Find the values of a block of at least `least`; return how many.

    `seen` counts the coordinates of each class up to here; `starts` [CLASSES + 1] takes where each class begins.
    """
    places, classes, ranks, order = sifted
    n = 0
    for i in range(y.size):
        c = class_of[-prior[i]] if prior.size else 0
        at = seen[c]
        seen[c] = at + 1
        if abs(y[i]) >= least:
            places[n] = i
            classes[n] = c
            ranks[n] = at
            starts[c + 1] += 1
            n += 1
    for c in range(starts.size - 1):
        starts[c + 1] += starts[c]
    place = starts.copy()
    for k in range(n):
        at = place[classes[k]]
        place[classes[k]] = at + 1
        order[at] = k
    return n


@kernel
def _mass_below(y: Any, least: float, out: Any) -> None:
    """Sum up each context's mass below `least`."""
    for row in range(y.shape[0]):
        mass = 0.0
        for v in range(y.shape[1]):
            if y[row, v] < least:
                mass += y[row, v] * y[row, v]
        out[row] = mass


@dataclass(frozen=True, eq=False, slots=True)
class SymbolCandidates:
    """Hold the values of y that may become symbols other than zero, in the coder's order, for steps from `finest` on.

    Class c of block b is y[starts[b, c] : starts[b, c + 1]], and `rank` says where in its class a value lies. `dither`
    is that of the values, or empty. `totals` are all coordinates of each class, `rows` [blocks + 1] the contexts of
    each block. `rest` is the mass of a context's other values, where tails are to be coded.
    """

    mode: int
    finest: int
    y: Floats32
    rank: npt.NDArray[np.uint32]
    dither: Floats32
    starts: Ints
    totals: Ints
    rows: Ints
    rest: Floats

    @classmethod
    def prepare(cls, logits: Reals, plan: Plan, mode: int, finest: int = 0) -> SymbolCandidates:
        """Compand and order logits [m, V]."""
        blocks = coder_blocks(plan)
        prior = whole_prior(plan) if mode & PRIOR else None
        least = 0.0 if mode & DITHER or finest == 0 else (1 - rounding_offset(mode, finest)) * quantizer_step(finest)
        starts = np.zeros((len(blocks), tokens.CLASSES + 1), np.int64)
        seen = np.zeros(tokens.CLASSES, np.int64)
        rest = np.zeros(0 if mode & (PRIOR | DITHER) else plan.contexts)
        width = len(blocks[0]) * plan.vocab
        sifted = _Sifted(
            np.empty(width, np.int32), np.empty(width, np.uint8), np.empty(width, np.uint32), np.empty(width, np.int32)
        )
        parts: list[tuple[Array, Array, Array]] = []
        for b, rows in enumerate(blocks):
            block_prior = None if prior is None else prior[rows.start : rows.stop]
            y = companding.compand(logits[rows.start : rows.stop], block_prior)
            flat = np.empty(0, np.int16) if block_prior is None else block_prior.ravel()
            count = _sift(y.ravel(), flat, CLASS_OF, least, seen, starts[b], sifted)
            if rest.size:
                _mass_below(y, least, rest[rows.start : rows.stop])
            order = sifted.order[:count]
            places = sifted.places[order]
            dither = block_dither(plan, rows).ravel()[places] if mode & DITHER else np.empty(0, np.float32)
            parts.append((y.ravel()[places], sifted.ranks[order], dither))
        starts[1:] += np.cumsum(starts[:-1, -1])[:, None]
        y, rank, dither = (np.concatenate(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
        bounds = np.array([rows.start for rows in blocks] + [plan.contexts])
        return cls(mode, finest, y, rank, dither, starts, seen, bounds, rest)

    @property
    def groups(self) -> int:
        """Return the number of groups of classes in use."""
        used = self.totals[: GROUPS * PER_GROUP] > 0
        return int(used.reshape(GROUPS, PER_GROUP).any(axis=1).sum())

    def records(self, step: int, plan: Plan, max_bytes: int, cut: int | None = None) -> tuple[float, Array]:
        """Return the bits that a step takes and its tokens' records; beyond `max_bytes` both are cut short.

        From value number `cut` on, symbols are those of the next coarser step.
        """
        classes = tokens.CLASSES - 1
        scale = tokens.Scale(
            1 / quantizer_step(step),
            rounding_offset(self.mode, step),
            self.y.size if cut is None else cut,
            1 / quantizer_step(step + 1),
            rounding_offset(self.mode, step + 1),
        )
        symbols = tokens.SymbolList(
            np.empty(self.y.size, np.int32),
            np.empty(self.y.size + classes, np.int64),
            np.empty((len(self.starts), classes), np.int64),
        )
        count = tokens.collect_symbols(self.y, self.rank, self.dither, self.starts, self.totals, scale, symbols)
        tails = np.empty(self.rest.size, np.int32)
        if self.rest.size:
            companding.tail_masses(self.y, self.rank, plan.vocab, scale, self.rest, tails)
        records = np.empty(2 * count + tokens.CLASSES + len(self.rest), np.int64)
        models = tokens.new_models(self.totals, largest_symbol(step), checked_learnt(plan), decoder=False)
        bits, used = tokens.model_tokens(
            symbols, self.totals, tails, self.rows, models, records, 8.0 * max_bytes, tokens.COST
        )
        return bits, records[:used]

    def measure(self, step: int) -> Cells:
        """Measure what the cells of a step hold; the candidates must be all values."""
        size = quantizer_step(step)
        return companding.measure_cells(self.y, self.starts, self.mode, size, rounding_offset(self.mode, step))


def write_code(bits: float, records: Array, plan: Plan, room: int) -> bytes:
    """Return the code of records, or no bytes if it does not fit into `room` bytes."""
    if bits > 8 * room:
        return b""
    out = np.empty(room, np.uint8)
    if has_compact_code(plan):
        length = write_compact_ans(records, out)
        return out[room - length :].tobytes() if length >= 0 else b""
    front, back = write_ans(records, out)
    return out[:front].tobytes() + out[room - back :].tobytes() if front >= 0 else b""
