"""What an encoder keeps of logits: all that may be coded with steps from the finest in question on.

Of a candidate that cannot change, the level and the logarithms of its distances are kept, 27 bits. Of what may change
(it does with the finest step), the token, d and the draw as well. Nothing is kept of all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import _check
from fpld.codecs.prior import EIGHTHS
from fpld.codecs.samples import grid
from fpld.codecs.samples.draws import ONE, draw, keys_of, log_place
from fpld.codecs.samples.grid import LEVELS, LOGS, MINUS, PLUS
from fpld.codecs.samples.model import bins
from fpld.codecs.samples.reading import check_range
from fpld.codecs.samples.sieving import LANES, Scratch, sift
from fpld.compiled import bare

if TYPE_CHECKING:
    from fpld.codecs.prior import Eighths
    from fpld.types import Plan

    Array = np.ndarray[Any, np.dtype[Any]]
    Floats32 = np.ndarray[Any, np.dtype[np.float32]]

FIELD, CHANGES = 9, 27  # bits of a field; the bit that says that it may change
_CHANCES = np.exp(np.arange(1 - LEVELS, 1) / EIGHTHS).astype(np.float32)  # by the prior's integer, from the least on


@bare
def _look_up(prior: Any, table: Any, out: Any) -> None:
    last = table.size - 1
    for i in range(prior.size):
        out[i] = table[np.uint64(last + prior[i])]  # no sign: vectorises


def prior_chances(prior: Eighths, out: Floats32 | None = None) -> Floats32:
    """Return the prior's probabilities, in `out` if given: exp of its integers, with sum one in each context."""
    check_range(prior)
    chances: Floats32 = np.empty(prior.shape, np.float32) if out is None else out
    _look_up(prior.ravel(), _CHANCES, chances.ravel())
    chances *= np.float32(1) / chances.sum(axis=1, keepdims=True)
    return chances


def differences(logits: Array, prior: Eighths, start: int, room: Floats32 | None = None) -> Floats32:
    """Return d = p - pi of the contexts from `start` on; refuse NaN and infinities.

    `room` is memory for two arrays of that size, of which the first becomes the result: pages that are used again and
    again cost far less than new ones.
    """
    p: Floats32
    p, pi = (np.empty((2, logits.size), np.float32) if room is None else room)[:, : logits.size].reshape(
        2, *logits.shape
    )
    top = logits.max(axis=1, keepdims=True)
    if not (np.isfinite(top).all() and np.isfinite(logits.min())):  # both pass NaN on
        _check.finite(logits, start)
    np.subtract(logits, top, out=p, dtype=np.result_type(logits, np.float32), casting="same_kind")
    np.exp(p, out=p)
    p *= np.float32(1) / p.sum(axis=1, keepdims=True)
    p -= prior_chances(prior, pi)
    return p


class Material:
    """Collect contexts for steps from number `finest` on."""

    def __init__(self, plan: Plan, finest: int) -> None:
        self.plan, self.finest = plan, finest
        self._ratios = grid.log_ratios(finest)
        self._sieve, self._scratch = grid.make_sieve(self._ratios), Scratch.make(plan.vocab)
        self._parts: list[tuple[Array, ...]] = []
        self._room: tuple[Array, ...] = ()

    def add(self, rows: range, change: Floats32, prior: Eighths) -> None:
        """Take the next contexts."""
        if not self._room or self._room[0].size < change.size:
            self._room = tuple(np.empty(change.size, kind) for kind in (np.int32, np.int32, np.float32, np.uint32))
        packed, tokens, values, drawn = self._room
        counts = np.zeros((len(rows), 2), np.int64)
        source = keys_of(self.plan, rows), prior.ravel(), change.ravel(), self.plan.vocab
        scale = 1 / grid.step_size(self.finest), self._ratios, LOGS
        _collect(*source, *scale, self._sieve, self._scratch, packed, tokens, values, drawn, counts)
        kept, changing = counts.sum(axis=0)
        ends = tuple(part[:changing].copy() for part in (tokens, values, drawn))
        self._parts.append((packed[:kept].copy(), *ends, counts[:, 0]))

    def arrays(self) -> tuple[Array, ...]:
        """Return all that was kept: packed fields, tokens, d and draws of what may change, and counts of contexts."""
        if len(self._parts) > 1:
            self._parts = [tuple(np.concatenate(part) for part in zip(*self._parts, strict=True))]
        return self._parts[0]


@bare
def _collect(
    keys: Any,
    prior: Any,
    change: Any,
    vocab: Any,
    inverse: Any,
    ratios: Any,
    logs: Any,
    sieve: Any,
    scratch: Any,
    packed: Any,
    tokens: Any,
    values: Any,
    drawn: Any,
    counts: Any,
) -> None:
    """Keep what may be coded; `counts` [n, 2] takes how many of a context are kept, and how many of them may change."""
    halves, places = scratch.halves, scratch.places
    n, changing = 0, 0
    for row in range(keys.shape[0]):
        key, at, before, earlier = keys[row], row * vocab, n, changing
        for lane in range(0, vocab, LANES):
            ends = lane, min(lane + LANES, vocab)
            count = sift(key, prior, change, at, *ends, inverse, sieve, scratch)
            for k in range(count):
                v = places[k]
                u, d, level = draw(key, halves[v], v), np.float64(change[at + v]), -np.int64(prior[at + v])
                upper, lower = log_place(ONE - u), log_place(u + 1)
                plus, minus = bins(ratios[level], logs[upper], logs[lower])
                x = d * inverse + (u + 0.5) / ONE
                changes = 1 if x < 0.0 or x >= 1.0 else 0
                if changes or plus < PLUS or minus < MINUS:
                    packed[n] = changes << CHANGES | level << (2 * FIELD) | upper << FIELD | lower
                    n += 1
                if changes:
                    tokens[changing], values[changing], drawn[changing] = v, d, u
                    changing += 1
        counts[row, 0], counts[row, 1] = n - before, changing - earlier
