"""What an encoder keeps of logits, and the code of it with any step.

`SymbolCollector` reads the logits once, block by block, and keeps what may be coded with any step from the finest one
in question on. Of a candidate this is its level and the log indices of its two distances, 27 bits. Of a coordinate
whose symbol may be nonzero it is also the token, d = p - pi and the draw. Nothing is kept of all others.

To code with a step, the symbols floor(d / tau + u) are computed and written. Subtractive dither as in the textbook adds
u before rounding and subtracts it afterwards. Here nothing is subtracted: the label is unbiased as it is, and u tells
the decoder which symbols can be nonzero, so that all others cost next to nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import validation
from fpld.codecs import rangecoder
from fpld.codecs.rangecoder import FULL, finish
from fpld.codecs.samples.candidates import CHUNK_TOKENS, PrefilterScratch, prefilter, prefilter_bounds
from fpld.codecs.samples.draws import DRAW_RANGE, HALF_RANGE, draw_keys, log_index, token_draw
from fpld.codecs.samples.probabilities import (
    LEVEL_PROBABILITY,
    SUM_LANES,
    context_buffer,
    exponentials,
    lane_sum,
    prior_totals,
)
from fpld.codecs.samples.steps import (
    BIN_OFFSET,
    BIN_SHIFT,
    MAX_SYMBOLS_PER_BYTE,
    MINUS_BINS,
    PLUS_BINS,
    STEPS_PER_OCTAVE,
    log_ratios,
    ratio_bins,
    step_to_tau,
)
from fpld.codecs.samples.symbol_model import (
    code_escape,
    code_gap,
    code_symbol,
    initial_models,
    new_activity,
    reset_activity,
)
from fpld.kernels import borrowing_kernel, inlined

if TYPE_CHECKING:
    from fpld.codecs.prior import Eighths
    from fpld.codecs.rangecoder import Coder
    from fpld.codecs.samples.candidates import PrefilterBounds
    from fpld.types import Array, Plan, Reals

# The record of a candidate, 28 bits of an int32. From the lowest bit up: the log index of u, that of 1 - u, the level,
# 9 bits each, and a bit that says that the symbol may be nonzero.
_FIELD_BITS = 9
_FIELD_MASK = (1 << _FIELD_BITS) - 1
_CHANGES_SHIFT = 3 * _FIELD_BITS


@inlined
def pack_record(changes: Any, level: Any, upper: Any, lower: Any) -> Any:
    """Return the record of a candidate."""
    return changes << _CHANGES_SHIFT | level << (2 * _FIELD_BITS) | upper << _FIELD_BITS | lower


@inlined
def _unpack_record(record: Any) -> Any:
    """Return the level and the two log indices of a candidate."""
    return record >> (2 * _FIELD_BITS) & _FIELD_MASK, (record >> _FIELD_BITS) & _FIELD_MASK, record & _FIELD_MASK


class LogitBlock(NamedTuple):
    """Hold some contexts, their logits and their prior."""

    rows: range
    logits: Reals
    prior: Eighths


class CollectedSymbols(NamedTuple):
    """Hold what may be coded of consecutive contexts, in their order.

    `records` has the candidates; `tokens`, `differences` (d = p - pi) and `draws` those coordinates whose symbol may be
    nonzero. `counts` has the number of records of each context; the kernel that collects also counts the latter.
    """

    records: Array
    tokens: Array
    differences: Array
    draws: Array
    counts: Array


class Code(NamedTuple):
    """Hold a code, empty if it did not fit, and the label's variance summed over tokens and contexts."""

    data: bytes
    variance: float


class _Source(NamedTuple):
    """Hold a block of contexts: keys of the draws, logits and their maxima, prior and its totals."""

    keys: Array
    logits: Array
    tops: Array
    prior: Array
    totals: Array


class _FinestStep(NamedTuple):
    """Hold what depends on the finest step: 1 / tau, log ratios by level, bounds of the prefilter."""

    inverse: float
    ratios: Array
    bounds: PrefilterBounds


class _Workspace(NamedTuple):
    """Hold memory for one context: exp of its logits, lanes of a sum, and what the prefilter needs."""

    exponentials: Array
    lanes: Array
    scratch: PrefilterScratch


class _StepPair(NamedTuple):
    """Hold a step and the next finer one, second, which the first `finer` contexts have.

    `coordinates` is how many there are in all contexts of the plan, and `finest` the finest tau that was collected.
    """

    vocab: int
    coordinates: int
    finer: int
    taus: Array
    ratios: Array
    finest: float


class _Symbols(NamedTuple):
    """Hold the symbols of all coordinates that may be nonzero, and the escapes: coordinate and symbol of each."""

    values: Array
    escapes: Array


class SymbolCollector:
    """Collect contexts for steps from number `finest` on, and code them with any such step."""

    def __init__(self, plan: Plan, finest: int) -> None:
        self.plan = plan
        lanes = np.empty(SUM_LANES, np.float32)
        self._workspace = _Workspace(context_buffer(plan.vocab), lanes, PrefilterScratch.allocate(plan.vocab))
        self._parts: list[CollectedSymbols] = []
        self._buffers: tuple[Array, ...] = ()
        self._set_finest(finest)

    def _set_finest(self, finest: int) -> None:
        self.finest = finest
        self._below = 0
        ratios = log_ratios(finest)
        self._step = _FinestStep(1 / step_to_tau(finest), ratios, prefilter_bounds(ratios))

    def add(self, block: LogitBlock) -> None:
        """Collect the next contexts; raise `InputError` for NaN and infinities."""
        rows, logits, prior = block
        logits = _single_or_double(logits)
        tops = logits.max(axis=1)
        if not (np.isfinite(tops).all() and np.isfinite(logits.min())):  # a maximum or minimum of NaN is NaN
            validation.finite(logits, rows.start)
        totals = prior_totals(prior)
        self._widen_bounds(float(totals.min()))
        if not self._buffers or self._buffers[0].size < logits.size:
            kinds = np.int32, np.int32, np.float32, np.uint32
            self._buffers = tuple(np.empty(logits.size, kind) for kind in kinds)
        counts = np.zeros((len(rows), 2), np.int64)
        source = _Source(draw_keys(self.plan, rows), logits, tops, prior.ravel(), totals)
        records, tokens, differences, draws = self._buffers
        buffers = CollectedSymbols(records, tokens, differences, draws, counts)
        _collect(source, self._step, self._workspace, buffers)
        kept, changing = counts.sum(axis=0)
        # Copies are contiguous, as joined parts are: kernels are compiled for one kind of array.
        part = CollectedSymbols(
            records=buffers.records[:kept].copy(),
            tokens=buffers.tokens[:changing].copy(),
            differences=buffers.differences[:changing].copy(),
            draws=buffers.draws[:changing].copy(),
            counts=counts[:, 0].copy(),
        )
        self._parts.append(part)

    def coarsen(self, finest: int) -> None:
        """Forget what is zero with all steps from a coarser one on, and collect the next contexts for these."""
        records, tokens, differences, draws, counts = self.collected()
        x = differences.astype(np.float64) / step_to_tau(finest) + (draws + 0.5) / DRAW_RANGE
        changes = (x < 0) | (x >= 1)
        records[np.flatnonzero(records >> _CHANGES_SHIFT)[~changes]] ^= 1 << _CHANGES_SHIFT
        self._parts = [CollectedSymbols(records, tokens[changes], differences[changes], draws[changes], counts)]
        self._set_finest(finest)

    def collected(self) -> CollectedSymbols:
        """Return all that was collected."""
        if len(self._parts) > 1:
            self._parts = [CollectedSymbols(*(np.concatenate(arrays) for arrays in zip(*self._parts, strict=True)))]
        return self._parts[0]

    def encode(self, step: int, capacity: int, finer: int = 0) -> Code:
        """Code with a step, in at most `capacity` bytes; the first `finer` contexts have the next finer step."""
        plan = self.plan
        collected = self.collected()
        numbers = step, max(step - 1, 0)
        taus = np.array([step_to_tau(number) for number in numbers])
        ratios = np.stack([log_ratios(number) for number in numbers])
        coordinates = plan.contexts * plan.vocab
        steps = _StepPair(plan.vocab, coordinates, finer, taus, ratios, step_to_tau(self.finest))
        size = collected.tokens.size
        symbols = _Symbols(np.empty(size, np.int32), np.empty((size + 1, 2), np.int64))
        coder = rangecoder.writer(capacity, initial_models(plan.learnt))
        length, nonzero, variance = _encode(coder, new_activity(), collected, steps, symbols)
        fits = length > 0 and nonzero <= MAX_SYMBOLS_PER_BYTE * length
        return Code(coder.data[:length].tobytes() if fits else b"", variance)

    def _widen_bounds(self, least: float) -> None:
        """Let all through the prefilter that may be negative, where a prior's probabilities add up to `least`.

        A negative symbol has tau u < pi. The bins take pi as if the probabilities added up to one.
        """
        below = math.ceil(-STEPS_PER_OCTAVE * math.log2(least)) - (MINUS_BINS - BIN_OFFSET << BIN_SHIFT)
        if below > self._below:
            self._below = below
            self._step = self._step._replace(bounds=prefilter_bounds(self._step.ratios, below=below))


def _single_or_double(logits: Reals) -> Array:
    """Return logits contiguous and as float32, or as float64 where float32 does not hold them."""
    kind = np.float32 if np.result_type(logits, np.float32) == np.float32 else np.float64
    return np.ascontiguousarray(logits, kind)


@borrowing_kernel
def _collect(source: _Source, step: _FinestStep, workspace: _Workspace, collected: CollectedSymbols) -> None:
    """Collect a block; `collected.counts` [n, 2] takes each context's records, and how many of them may change."""
    records = collected.records
    tokens = collected.tokens
    differences = collected.differences
    draws = collected.draws
    counts = collected.counts
    keys = source.keys
    prior = source.prior
    ratios = step.ratios
    inverse = step.inverse
    buffer = workspace.exponentials
    halves = workspace.scratch.halves
    listed = workspace.scratch.tokens
    vocab = source.logits.shape[1]
    n = 0
    changing = 0
    for row in range(keys.shape[0]):
        key = keys[row]
        at = row * vocab
        n_before = n
        changing_before = changing
        exponentials(source.logits[row], source.tops[row], buffer)
        node_factor = np.float32(1) / lane_sum(buffer, workspace.lanes)
        prior_factor = np.float32(1) / source.totals[row]
        scale = inverse * HALF_RANGE * node_factor
        for first in range(0, vocab, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, vocab)
            count = prefilter(key, prior, buffer, at, first, last, scale, step.bounds, workspace.scratch)
            for k in range(count):
                v = listed[k]
                u = token_draw(key, halves[v], v)
                level = -np.int64(prior[at + v])
                d = np.float32(buffer[v] * node_factor) - np.float32(LEVEL_PROBABILITY[level] * prior_factor)
                upper = log_index(DRAW_RANGE - u)
                lower = log_index(u + 1)
                plus, minus = ratio_bins(ratios[level], upper, lower)
                x = np.float64(d) * inverse + (u + 0.5) / DRAW_RANGE
                changes = 1 if x < 0.0 or x >= 1.0 else 0
                if changes or plus < PLUS_BINS or minus < MINUS_BINS:
                    records[n] = pack_record(changes, level, upper, lower)
                    n += 1
                if changes:
                    tokens[changing] = v
                    differences[changing] = d
                    draws[changing] = u
                    changing += 1
        counts[row, 0] = n - n_before
        counts[row, 1] = changing - changing_before


@borrowing_kernel
def _encode(coder: Coder, activity: Array, collected: CollectedSymbols, steps: _StepPair, symbols: _Symbols) -> Any:
    """Return the length of the code (-1 if there is no room), the number of nonzero symbols, and the variance.

    One kernel for all, since a call from Python with named tuples takes longer than coding a small payload.
    """
    nonzero, escapes, variance = _quantize(collected, steps, symbols)
    symbols.escapes[escapes, 0] = steps.coordinates  # the last gap reaches to the end
    _write(coder, activity, collected, steps, symbols)
    return finish(coder), nonzero, variance


@borrowing_kernel
def _quantize(collected: CollectedSymbols, steps: _StepPair, symbols: _Symbols) -> Any:
    """Compute the symbols; return how many are nonzero, how many of these are escapes, and the variance of all labels.

    A symbol's variance is tau^2 f (1 - f), with f the fraction of x = d / tau. A coordinate with |d| below the finest
    step is one of many that are collected with probability |d| / finest only. It counts by the inverse of that, for the
    others.
    """
    records = collected.records
    differences = collected.differences
    draws = collected.draws
    counts = collected.counts
    finest = steps.finest
    nonzero = 0
    escapes = 0
    variance = 0.0
    k = 0
    i = 0
    for row in range(counts.size):
        which = 1 if row < steps.finer else 0
        tau = steps.taus[which]
        inverse = 1.0 / steps.taus[which]
        ratios = steps.ratios[which]
        for _ in range(counts[row]):
            record = np.int64(records[k])
            k += 1
            if record >> _CHANGES_SHIFT:
                x = np.float64(differences[i]) * inverse
                if abs(differences[i]) < finest:
                    variance += tau * finest * (1.0 - abs(x))
                else:
                    variance += tau * tau * (x - np.floor(x)) * (1.0 - x + np.floor(x))
                symbol = int(np.floor(x + (np.int64(draws[i]) + 0.5) / DRAW_RANGE))
                symbols.values[i] = symbol
                if symbol:
                    nonzero += 1
                    level, upper, lower = _unpack_record(record)
                    plus, minus = ratio_bins(ratios[level], upper, lower)
                    if plus == PLUS_BINS and minus == MINUS_BINS:
                        symbols.escapes[escapes, 0] = row * steps.vocab + collected.tokens[i]
                        symbols.escapes[escapes, 1] = symbol
                        escapes += 1
                i += 1
    return nonzero, escapes, variance


@borrowing_kernel
def _write(coder: Coder, activity: Array, collected: CollectedSymbols, steps: _StepPair, symbols: _Symbols) -> None:
    """Write all symbols in the order in which `decoder._read` reads them; stop early if there is no room."""
    records = collected.records
    counts = collected.counts
    values = symbols.values
    escapes = symbols.escapes
    k = 0
    i = 0
    escape = 0
    code_gap(coder, escapes[0, 0])
    for row in range(counts.size):
        reset_activity(activity)
        ratios = steps.ratios[1 if row < steps.finer else 0]
        for _ in range(counts[row]):
            record = np.int64(records[k])
            k += 1
            symbol = np.int64(0)
            if record >> _CHANGES_SHIFT:
                symbol = np.int64(values[i])
                i += 1
            level, upper, lower = _unpack_record(record)
            ratio = ratios[level]
            plus, minus = ratio_bins(ratio, upper, lower)
            if plus < PLUS_BINS or minus < MINUS_BINS:
                code_symbol(coder, activity, plus, minus, ratio, symbol)
        while escapes[escape, 0] < (row + 1) * steps.vocab:
            code_escape(coder, escapes[escape, 1])
            escape += 1
            code_gap(coder, escapes[escape, 0] - escapes[escape - 1, 0] - 1)
        if coder.state[FULL]:
            return
