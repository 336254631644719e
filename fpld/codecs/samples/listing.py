"""Where the candidates of nodes lie that share draws: one pass over prior and draws for all of them.

Stratified nodes have the same draws but for a shift of the upper half by slot / slots. So a token's draw says for which
slots it may be a candidate: those whose shift takes it past the top of the circle, or nearly so. A node whose draws are
its own is the case of one slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.prior import LEAST_PRIOR
from fpld.codecs.samples import grid
from fpld.codecs.samples.draws import keys_of
from fpld.codecs.samples.sieving import LANES, Scratch, sift
from fpld.compiled import bare
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.codecs.prior import Eighths
    from fpld.types import Plan

    Array = np.ndarray[Any, np.dtype[Any]]

PART = 16  # bits of an upper half, and of a level
_CELLS = 1 << PART
_NONE = np.empty(0, np.float32)


class Places(NamedTuple):
    """Hold where a node may have candidates: token, level and upper half of the draw, by context; `ends` of each."""

    packed: Array
    ends: Array


class Room:
    """Memory for places, which listers share: what one has listed is gone when another lists."""

    def __init__(self) -> None:
        self._array = np.empty((0, 0), np.int64)

    def take(self, nodes: int, size: int) -> Array:
        """Return room for so many places of each of so many nodes, or for more."""
        had = self._array.shape
        if had[0] < nodes or had[1] < size:
            self._array = np.empty((max(had[0], nodes), max(had[1], size)), np.int64)
        return self._array[:nodes]


class Lister:
    """List where nodes may have candidates with steps from number `step` on; they share draws but for their slots."""

    def __init__(self, plans: Sequence[Plan], step: int, room: Room | None = None) -> None:
        self._plan, shared = plans[0], len(plans) > 1
        slots = self._plan.slots if shared else 1
        self._sieve = grid.make_sieve(grid.log_ratios(step), slots)
        self._scratch = Scratch.make(self._plan.vocab)
        self._shifts = (np.arange(2 * slots + 1) << PART) // slots
        self._homes = np.full(slots, -1)
        self._homes[[plan.slot if shared else 0 for plan in plans]] = np.arange(len(plans))
        self._homes = np.resize(self._homes, 2 * slots + 1)
        self._unshifted, self._nodes, self._room = shared, len(plans), room or Room()

    def list(self, rows: range, prior: Eighths) -> list[Places]:
        """Return the places of each node in these contexts."""
        room, ends = self._room.take(self._nodes, prior.size), np.zeros((self._nodes, len(rows)), np.int64)
        keys = keys_of(self._plan, rows)
        if self._unshifted:
            keys = keys.copy()
            keys[:, 4] = 0
        nodes = self._shifts, self._homes
        if not _list(keys, prior.ravel(), self._plan.vocab, self._sieve, self._scratch, _NONE, *nodes, room, ends):
            check_range(prior)
        return [Places(*node) for node in zip(room, ends, strict=True)]


def check_range(prior: Eighths) -> None:
    """Refuse a prior with integers that stand for nothing."""
    if prior.size and (prior.max() > 0 or prior.min() < LEAST_PRIOR):
        raise InputError(f"prior must lie in {LEAST_PRIOR}..0, eighths of a nat, got {prior.min()}..{prior.max()}")


@bare
def _list(
    keys: Any,
    prior: Any,
    vocab: Any,
    sieve: Any,
    scratch: Any,
    none: Any,
    shifts: Any,
    homes: Any,
    packed: Any,
    ends: Any,
) -> Any:
    """List the places of each node, by context and token; return whether the prior is one."""
    halves, places, reaches, widths, slots = scratch.halves, scratch.places, sieve.reaches, sieve.widths, sieve.slots
    for row in range(keys.shape[0]):
        at = row * vocab
        if row:
            for home in range(ends.shape[0]):
                ends[home, row] = ends[home, row - 1]
        for lane in range(0, vocab, LANES):
            count = sift(keys[row], prior, none, at, lane, min(lane + LANES, vocab), 0.0, sieve, scratch)
            for k in range(count):
                v = np.int64(places[k])
                level, half = -np.int64(prior[at + v]), np.int64(halves[v])
                if level < 0 or level >= reaches.size:
                    return False
                # From the first slot on whose shift takes it past the top.
                ahead = ((half + reaches[level]) & (_CELLS - 1)) - _CELLS
                slot = (-ahead * slots + _CELLS - 1) >> PART
                while ahead + shifts[slot] < widths[level]:
                    home = homes[slot]
                    if home >= 0:
                        own = (half + shifts[slot]) & (_CELLS - 1)
                        packed[home, ends[home, row]] = v << (2 * PART) | level << PART | own
                        ends[home, row] += 1
                    slot += 1
    return True
