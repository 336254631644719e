"""The encoder of sampled labels: a search for the finest step whose code fits the budget.

For a trial step the collected symbols are coded, which gives the exact length. `rate_control` finds the finest step
that fits in a few trials. The first guess of the step comes from a few contexts. The search runs on the contexts that
are held in memory (`HELD`). If there are more, the others are then collected for steps near the one found, and the
search ends on all contexts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld import validation
from fpld.codecs.rate_control import MIN_FILL, finest_fitting_step, largest_fitting
from fpld.codecs.samples.collector import LogitBlock, SymbolCollector
from fpld.codecs.samples.probabilities import prior_block, prior_probabilities
from fpld.codecs.samples.steps import FINER_BYTES, HEADER_BYTES, STEP_COUNT, STEPS_PER_OCTAVE, LabelHeader, tau_to_step
from fpld.numerics import softmax, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fpld.codecs.prior import Eighths
    from fpld.types import Plan, Reals

BLOCK = 1 << 18  # coordinates that are collected at a time
HELD = 1 << 21  # coordinates that are held in memory until the step is roughly known
_GUESS_COORDINATES = 1 << 16  # that the first guess of the step is made from
_BITS_PER_SYMBOL = 4.0  # roughly, of a nonzero symbol
_LENGTH_SLOPE = 1 / 320  # by which the logarithm of the length falls from step to step, roughly
_FINER_THAN_GUESS = 2 * STEPS_PER_OCTAVE  # steps that are in question below a guess
_FINER_THAN_HELD = 5 * STEPS_PER_OCTAVE // 4  # steps that are in question below the one found on the held contexts
# Two steps are tried if more than this share of the budget, and more than these bytes, are unused.
_MIN_UNUSED_SHARE = 0.01
_MIN_UNUSED_BYTES = 16


class _Trials:
    """Code with different steps, and keep the payload of the last one that fitted into `capacity` bytes of code."""

    def __init__(self, collector: SymbolCollector, capacity: int, payload: bytes = b"") -> None:
        self._collector = collector
        self._capacity = capacity
        self.payload = payload

    def length(self, step: int, finer: int = 0) -> int:
        """Return the length of a code in bytes; of one that is far too long, a bound."""
        limit = 2 * self._capacity + 64
        data, variance = self._collector.encode(step, limit, finer)
        if 0 < len(data) <= self._capacity:
            contexts = len(self._collector.collected().counts)
            self.payload = LabelHeader(step, variance / contexts, finer).to_bytes() + data
        return len(data) or limit + 1


def encode_labels(blocks: Iterable[Reals], plan: Plan) -> bytes:
    """Encode consecutive blocks of contexts into the payload of the finest step that fits; each is read once."""
    pieces = _pieces(blocks, plan)
    held = min(_held_contexts(plan), plan.contexts)
    step, collector, payload = _search(_hold(pieces, held), plan)
    if held < plan.contexts:
        collector.coarsen(max(step - _FINER_THAN_HELD, collector.finest))
        for piece in pieces:
            collector.add(piece)
        step, payload = _fill(collector, plan.budget_bytes, step)
    for _ in pieces:  # one context too many raises an error
        pass
    return _fill_with_two_steps(collector, plan.budget_bytes, step, payload)


def _held_contexts(plan: Plan) -> int:
    return max(HELD // plan.vocab, 1)


def _pieces(blocks: Iterable[Reals], plan: Plan) -> Iterator[LogitBlock]:
    """Return pieces that stay in the cache, cut after the held contexts; logits are valid until the next piece."""
    start = 0
    held = _held_contexts(plan)
    for block in blocks:
        logits = validation.logits_block(block, plan.shape, start)
        cuts = [held - start] if start < held < start + len(logits) else []
        for part in np.split(logits, cuts):
            for piece in split(len(part), plan.vocab, BLOCK):
                rows = range(start + piece.start, start + piece.stop)
                yield LogitBlock(rows, part[piece.start : piece.stop], prior_block(plan, rows))
            start += len(part)
    validation.row_count(start, plan.contexts)


def _hold(pieces: Iterator[LogitBlock], contexts: int) -> list[LogitBlock]:
    """Copy the logits of the first contexts into one array, since large arrays get large memory pages."""
    held: list[LogitBlock] = []
    while not held or held[-1].rows.stop < contexts:
        piece = next(pieces)
        if not held:
            copy = np.empty((contexts, piece.logits.shape[1]), piece.logits.dtype)
        part = copy[piece.rows.start : piece.rows.stop]
        part[:] = piece.logits
        held.append(piece._replace(logits=part))
    return held


def _guess_step(logits: Reals, prior: Eighths, bits: float) -> int:
    """Return roughly the step for a budget in bits per context, from some contexts."""
    distance = np.abs(softmax(logits, np.float32) - prior_probabilities(prior)).sum(axis=1).mean(dtype=np.float64)
    return tau_to_step(max(float(distance), 1e-9) * _BITS_PER_SYMBOL / bits)


def _search(held: list[LogitBlock], plan: Plan) -> tuple[int, SymbolCollector, bytes]:
    """Find the step that fills the held contexts' share of the budget; return it with its collector and payload."""
    contexts = sum(len(piece.rows) for piece in held)
    budget = plan.budget_bytes * contexts // plan.contexts
    first = held[0]
    some = slice(max(_GUESS_COORDINATES // plan.vocab, 1))
    validation.finite(first.logits, first.rows.start)
    guess = _guess_step(first.logits[some], first.prior[some], plan.bits)
    least = guess
    while True:
        least = max(least - _FINER_THAN_GUESS, 0)
        collector = SymbolCollector(plan, least)
        for piece in held:
            collector.add(piece)
        step, payload = _fill(collector, budget, guess)
        if step > least or least == 0 or len(payload) >= MIN_FILL * budget:
            return step, collector, payload
        guess = least


def _fill(collector: SymbolCollector, budget: int, guess: int) -> tuple[int, bytes]:
    """Code with the finest step that fits; return the step and the payload, empty if nothing fits."""
    capacity = budget - HEADER_BYTES
    if capacity <= 0:
        return STEP_COUNT - 1, b""
    trials = _Trials(collector, capacity)
    step = finest_fitting_step(trials.length, capacity, range(collector.finest, STEP_COUNT), guess, _LENGTH_SLOPE)
    return (STEP_COUNT - 1 if step is None else step), trials.payload


def _fill_with_two_steps(collector: SymbolCollector, budget: int, step: int, payload: bytes) -> bytes:
    """Code as many contexts as fit with the next finer step, where one step for all leaves much unused."""
    capacity = budget - HEADER_BYTES - FINER_BYTES
    trials = _Trials(collector, capacity, payload)
    unused = budget - len(payload)
    if payload and step > collector.finest and unused > max(_MIN_UNUSED_SHARE * budget, _MIN_UNUSED_BYTES):
        largest_fitting(lambda finer: trials.length(step, finer), capacity, collector.plan.contexts - 1)
    return trials.payload
