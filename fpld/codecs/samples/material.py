"""What an encoder keeps of logits: all that may be coded with steps from the finest in question on.

Of a candidate that cannot change, the level and the logarithms of its distances are kept, 27 bits. Of what may change
(it does with the finest step), the token, d and the draw as well. Nothing is kept of all others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import _check
from fpld.codecs.samples import grid
from fpld.codecs.samples.chances import SUMS, TABLE, exponentials, prior_totals, room_for, total
from fpld.codecs.samples.draws import ONE, draw, keys_of, log_place
from fpld.codecs.samples.grid import HALF, LOGS, LOWEST, MINUS, OCTAVE, PLUS
from fpld.codecs.samples.model import bins
from fpld.codecs.samples.sieving import LANES, Scratch, sift
from fpld.compiled import bare

if TYPE_CHECKING:
    from fpld.codecs.prior import Eighths
    from fpld.types import Plan, Reals

    Array = np.ndarray[Any, np.dtype[Any]]

FIELD, CHANGES = 9, 27  # bits of a field; the bit that says that it may change


class Material:
    """Collect contexts for steps from number `finest` on."""

    def __init__(self, plan: Plan, finest: int) -> None:
        self.plan = plan
        self._scratch, self._chances = Scratch.make(plan.vocab), room_for(plan.vocab)
        self._lanes = np.empty(SUMS, np.float32)
        self._parts: list[tuple[Array, ...]] = []
        self._room: tuple[Array, ...] = ()
        self._start(finest)

    def _start(self, finest: int) -> None:
        self.finest, self._below = finest, 0
        self._ratios = grid.log_ratios(finest)
        self._sieve = grid.make_sieve(self._ratios)

    def add(self, rows: range, logits: Reals, prior: Eighths) -> None:
        """Take the next contexts; refuse NaN and infinities."""
        logits = _single_or_double(logits)
        tops = logits.max(axis=1)
        if not (np.isfinite(tops).all() and np.isfinite(logits.min())):  # both pass NaN on
            _check.finite(logits, rows.start)
        totals = prior_totals(prior)
        self._reach(float(totals.min()))
        if not self._room or self._room[0].size < logits.size:
            self._room = tuple(np.empty(logits.size, kind) for kind in (np.int32, np.int32, np.float32, np.uint32))
        packed, tokens, values, drawn = self._room
        counts = np.zeros((len(rows), 2), np.int64)
        source = keys_of(self.plan, rows), logits, tops, prior.ravel(), totals, TABLE
        room = self._chances, self._lanes, self._scratch
        scale = 1 / grid.step_size(self.finest), self._ratios, LOGS
        _collect(*source, *scale, self._sieve, *room, packed, tokens, values, drawn, counts)
        kept, changing = counts.sum(axis=0)
        ends = tuple(part[:changing].copy() for part in (tokens, values, drawn))
        self._parts.append((packed[:kept].copy(), *ends, counts[:, 0].copy()))  # contiguous, as joined parts are

    def coarsen(self, finest: int) -> None:
        """Forget what changes with no step from a coarser one on; take the next contexts for that."""
        packed, tokens, values, drawn, counts = self.arrays()
        x = values.astype(np.float64) / grid.step_size(finest) + (drawn + 0.5) / ONE
        changes = (x < 0) | (x >= 1)
        packed[np.flatnonzero(packed >> CHANGES)[~changes]] ^= 1 << CHANGES
        self._parts = [(packed, tokens[changes], values[changes], drawn[changes], counts)]
        self._start(finest)

    def arrays(self) -> tuple[Array, ...]:
        """Return all that was kept: packed fields, tokens, d and draws of what may change, and counts of contexts."""
        if len(self._parts) > 1:
            self._parts = [tuple(np.concatenate(part) for part in zip(*self._parts, strict=True))]
        return self._parts[0]

    def _reach(self, least: float) -> None:
        """Let all through that may be below zero, where a prior's probabilities add up to `least`.

        A symbol below zero has tau u < pi. The bins take pi as if the probabilities added up to one.
        """
        below = math.ceil(-OCTAVE * math.log2(least)) - (MINUS - LOWEST << HALF)
        if below > self._below:
            self._below = below
            self._sieve = grid.make_sieve(self._ratios, below=below)


def _single_or_double(logits: Reals) -> Array:
    kind = np.float32 if np.result_type(logits, np.float32) == np.float32 else np.float64
    return np.ascontiguousarray(logits, kind)


@bare
def _collect(
    keys: Any,
    logits: Any,
    tops: Any,
    prior: Any,
    totals: Any,
    table: Any,
    inverse: Any,
    ratios: Any,
    logs: Any,
    sieve: Any,
    chances: Any,
    lanes: Any,
    scratch: Any,
    packed: Any,
    tokens: Any,
    values: Any,
    drawn: Any,
    counts: Any,
) -> None:
    """Keep what may be coded; `counts` [n, 2] takes how many of a context are kept, and how many of them may change."""
    halves, places, vocab = scratch.halves, scratch.places, logits.shape[1]
    n, changing = 0, 0
    for row in range(keys.shape[0]):
        key, at, before, earlier = keys[row], row * vocab, n, changing
        exponentials(logits[row], tops[row], chances)
        own, other = np.float32(1) / total(chances, lanes), np.float32(1) / totals[row]
        for lane in range(0, vocab, LANES):
            ends = lane, min(lane + LANES, vocab)
            count = sift(key, prior, chances, at, *ends, inverse * 65536 * own, sieve, scratch)
            for k in range(count):
                v = places[k]
                u, level = draw(key, halves[v], v), -np.int64(prior[at + v])
                d = np.float32(chances[v] * own) - np.float32(table[level] * other)
                upper, lower = log_place(ONE - u), log_place(u + 1)
                plus, minus = bins(ratios[level], logs[upper], logs[lower])
                x = np.float64(d) * inverse + (u + 0.5) / ONE
                changes = 1 if x < 0.0 or x >= 1.0 else 0
                if changes or plus < PLUS or minus < MINUS:
                    packed[n] = changes << CHANGES | level << (2 * FIELD) | upper << FIELD | lower
                    n += 1
                if changes:
                    tokens[changing], values[changing], drawn[changing] = v, d, u
                    changing += 1
        counts[row, 0], counts[row, 1] = n - before, changing - earlier
