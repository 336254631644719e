"""Material to a code: the symbols of a step, written context by context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.samples import grid, model, rangecoder
from fpld.codecs.samples.draws import ONE
from fpld.codecs.samples.grid import LOGS, MINUS, PLUS
from fpld.codecs.samples.material import CHANGES, FIELD
from fpld.codecs.samples.model import bins, escape, gap, mark, symbol
from fpld.codecs.samples.rangecoder import FULL
from fpld.codecs.samples.reading import PER_BYTE
from fpld.compiled import bare

if TYPE_CHECKING:
    from fpld.codecs.samples.material import Material

    Array = np.ndarray[Any, np.dtype[Any]]

_MASK = (1 << FIELD) - 1


class Code(NamedTuple):
    """Hold a code, empty if there was no room for it, and the label's variance, summed over all contexts."""

    data: bytes
    variance: float


def write(material: Material, step: int, room: int, finer: int = 0) -> Code:
    """Write the symbols of a step into at most `room` bytes; the first `finer` contexts have the next finer step."""
    plan, steps = material.plan, (step, max(step - 1, 0))
    packed, tokens, values, drawn, counts = material.arrays()
    ratios, taus = (
        np.stack([grid.log_ratios(each) for each in steps]),
        np.array([grid.step_size(each) for each in steps]),
    )
    symbols, escapes = np.empty(tokens.size, np.int32), np.empty((tokens.size + 1, 2), np.int64)
    source = packed, tokens, values, drawn, counts, plan.vocab, finer, taus, ratios, LOGS
    some, outside, variance = _quantize(*source, grid.step_size(material.finest), symbols, escapes)
    escapes[outside, 0] = plan.contexts * plan.vocab  # the end
    state, data = rangecoder.writer(), np.empty(room, np.uint8)
    coder = state, data, model.start_learning(plan.learnt)
    _write(*coder, packed, counts, plan.vocab, finer, ratios, LOGS, symbols, escapes, np.zeros(2, np.int64))
    mark(state, data)
    length = rangecoder.finish(state, data)
    fits = length > 0 and some <= PER_BYTE * length
    return Code(data[:length].tobytes() if fits else b"", variance)


@bare
def _quantize(
    packed: Any,
    tokens: Any,
    values: Any,
    drawn: Any,
    counts: Any,
    vocab: Any,
    finer: Any,
    taus: Any,
    ratios: Any,
    logs: Any,
    finest: Any,
    symbols: Any,
    escapes: Any,
) -> Any:
    """Return how many symbols are not zero, how many of them are escapes, and the variance of all labels.

    The variance of a symbol is f (1 - f), with f the fraction of x = d / tau. Where |d| is below the finest step, the
    token is one of many, kept with probability |d| / finest: for the others it counts by the inverse of that.
    `symbols` takes those of all that may change, `escapes` [n + 1, 2] where each lies, and its symbol.
    """
    some, outside, variance, k, i = 0, 0, 0.0, 0, 0
    for row in range(counts.size):
        side = 1 if row < finer else 0
        tau, inverse, own = taus[side], 1.0 / taus[side], ratios[side]
        for _ in range(counts[row]):
            record = np.int64(packed[k])
            k += 1
            if record >> CHANGES:
                x = np.float64(values[i]) * inverse
                if abs(values[i]) < finest:
                    variance += tau * finest * (1.0 - abs(x))
                else:
                    variance += tau * tau * (x - np.floor(x)) * (1.0 - x + np.floor(x))
                found = int(np.floor(x + (np.int64(drawn[i]) + 0.5) / ONE))
                symbols[i] = found
                if found:
                    some += 1
                    ratio = own[(record >> (2 * FIELD)) & _MASK]
                    plus, minus = bins(ratio, logs[(record >> FIELD) & _MASK], logs[record & _MASK])
                    if plus == PLUS and minus == MINUS:
                        escapes[outside, 0], escapes[outside, 1] = row * vocab + tokens[i], found
                        outside += 1
                i += 1
    return some, outside, variance


@bare
def _write(
    state: Any,
    data: Any,
    learning: Any,
    packed: Any,
    counts: Any,
    vocab: Any,
    finer: Any,
    ratios: Any,
    logs: Any,
    symbols: Any,
    escapes: Any,
    mood: Any,
) -> None:
    """Write symbols in the order in which `reading` reads them."""
    k, i, outside = 0, 0, 0
    gap(state, data, learning, escapes[0, 0])
    for row in range(counts.size):
        mood[0], mood[1] = 0, 0
        own = ratios[1 if row < finer else 0]
        for _ in range(counts[row]):
            record = np.int64(packed[k])
            k += 1
            found = np.int64(0)
            if record >> CHANGES:
                found = np.int64(symbols[i])
                i += 1
            ratio = own[(record >> (2 * FIELD)) & _MASK]
            plus, minus = bins(ratio, logs[(record >> FIELD) & _MASK], logs[record & _MASK])
            if plus < PLUS or minus < MINUS:
                symbol(state, data, learning, mood, plus, minus, ratio, found)
        while escapes[outside, 0] < (row + 1) * vocab:
            escape(state, data, learning, escapes[outside, 1])
            outside += 1
            gap(state, data, learning, escapes[outside, 0] - escapes[outside - 1, 0] - 1)
        if state[FULL]:
            return
