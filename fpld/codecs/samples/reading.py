"""Symbols of a payload, read context by context: nothing of the size of the vocabulary is kept."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.samples import grid, model, rangecoder
from fpld.codecs.samples.draws import ONE, draw, keys_of, log_place, upper_half
from fpld.codecs.samples.grid import LOGS, MINUS, PLUS
from fpld.codecs.samples.listing import PART, check_range
from fpld.codecs.samples.model import bins, escape, gap, mark, symbol
from fpld.compiled import bare
from fpld.errors import FrameError, InputError

if TYPE_CHECKING:
    from fpld.codecs.prior import Eighths
    from fpld.codecs.samples.head import Head
    from fpld.codecs.samples.listing import Places
    from fpld.types import Plan

    Array = np.ndarray[Any, np.dtype[Any]]

PER_BYTE = 16  # symbols that are not zero, at most, for each byte of a payload: what is made of it stays in bounds
UNSOUND, BAD_PRIOR = -1, -2
NEXT, COUNT = 0, 1  # where the next escape lies, and how many symbols were not zero so far

_MASK = (1 << PART) - 1


class Symbols:
    """Read the symbols of a code, from the first context on."""

    def __init__(self, code: Array, head: Head, plan: Plan) -> None:
        self.code, self.plan, self.finest, self.finer = code, plan, head.finest, head.finer
        self.learning = model.start_learning(plan.learnt)
        self.state, self.mood, self.where = rangecoder.reader(code), np.zeros(2, np.int64), np.zeros(2, np.int64)
        self.ratios, self.sieve = _bounds(head.step, head.finest)
        self.total, self.limit = plan.contexts * plan.vocab, PER_BYTE * code.size
        self.where[NEXT] = gap(self.state, code, self.learning, 0)
        self._sound(self.where[NEXT] <= self.total)

    def read(self, rows: range, prior: Eighths, places: Places) -> tuple[Array, Array, Array]:
        """Return the next contexts' symbols that are not zero: where each context's start, their tokens, and they."""
        vocab = self.plan.vocab
        room = min(len(rows) * vocab, self.limit - int(self.where[COUNT]))
        starts, tokens, symbols = np.zeros(len(rows) + 1, np.int64), np.empty(room, np.int32), np.empty(room, np.int32)
        coder = self.state, self.code, self.learning, self.mood, self.where
        size = vocab, rows.start, self.total, grid.most_symbol(self.finest), self.finer, self.ratios, LOGS
        source = keys_of(self.plan, rows), prior.ravel(), *places
        found = _read(*coder, *source, *size, self.sieve, starts, tokens, symbols)
        if found == BAD_PRIOR:
            check_range(prior)
        self._sound(found >= 0)
        return starts, tokens[:found].copy(), symbols[:found].copy()

    def end(self) -> None:
        """Refuse a code that does not end after its last symbol."""
        self._sound(bool(mark(self.state, self.code)) and bool(rangecoder.ended(self.state, self.code)))

    @staticmethod
    def _sound(yes: bool) -> None:
        if not yes:
            raise FrameError("payload's code is not one: it is cut or changed, or was coded against another prior")


@lru_cache(maxsize=16)  # many nodes have the same few steps
def _bounds(step: int, finest: int) -> tuple[Array, grid.Sieve]:
    """Return the logarithms of both steps' ratios, and the sieve of the finest."""
    ratios = np.stack([grid.log_ratios(number) for number in (step, finest)])
    return ratios, grid.make_sieve(ratios[1])


def prior_block(plan: Plan, rows: range) -> Eighths:
    """Return some contexts of the plan's prior; `check_range` is yet to come."""
    if plan.prior is None:
        raise InputError("samples needs a prior: give the plan one, or choose another codec")
    block = np.ascontiguousarray(plan.prior.block(rows))
    if block.dtype != np.int16 or block.shape != (len(rows), plan.vocab):
        raise InputError(
            f"prior must be int16 of shape {(len(rows), plan.vocab)} for {rows}, got {block.dtype} {block.shape}"
        )
    return block


@bare
def _read(
    state: Any,
    data: Any,
    learning: Any,
    mood: Any,
    where: Any,
    keys: Any,
    prior: Any,
    packed: Any,
    ends: Any,
    vocab: Any,
    first: Any,
    total: Any,
    most: Any,
    finer: Any,
    ratios: Any,
    logs: Any,
    sieve: Any,
    starts: Any,
    tokens: Any,
    symbols: Any,
) -> Any:
    """Read contexts from `first` on; return how many symbols are not zero, or what is wrong."""
    reaches, widths = sieve.reaches, sieve.widths
    n, k = 0, 0
    for row in range(keys.shape[0]):
        key, at, own = keys[row], row * vocab, ratios[1 if first + row < finer else 0]
        mood[0], mood[1] = 0, 0
        while k < ends[row]:
            place = packed[k]
            k += 1
            v, level, upper = place >> (2 * PART), (place >> PART) & _MASK, place & _MASK
            if (upper + reaches[level]) & _MASK >= widths[level]:
                continue
            u, ratio = draw(key, upper, v), own[level]
            plus, minus = bins(ratio, logs[log_place(ONE - u)], logs[log_place(u + 1)])
            if plus < PLUS or minus < MINUS:
                found = symbol(state, data, learning, mood, plus, minus, ratio, 0)
                if found:
                    if n == tokens.size or abs(found) > most:
                        return UNSOUND
                    tokens[n], symbols[n] = v, found
                    n += 1
        start = (first + row) * vocab
        while where[NEXT] < start + vocab:
            v = where[NEXT] - start
            level = -np.int64(prior[at + v])
            if level < 0 or level >= own.size:
                return BAD_PRIOR
            u, ratio = draw(key, upper_half(key, v), v), own[level]
            plus, minus = bins(ratio, logs[log_place(ONE - u)], logs[log_place(u + 1)])
            found = escape(state, data, learning, 0)
            if plus < PLUS or minus < MINUS or n == tokens.size or abs(found) > most:
                return UNSOUND
            tokens[n], symbols[n] = v, found
            n += 1
            where[NEXT] += 1 + gap(state, data, learning, 0)
            if where[NEXT] > total:
                return UNSOUND
        starts[row + 1] = n
    where[COUNT] += n
    return n
