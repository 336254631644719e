"""Correlated quantization: stochastic rounding with thresholds that are stratified over the nodes.

After A. T. Suresh, Z. Sun, J. H. Ro and F. Yu, *Correlated quantization for distributed mean estimation and
optimization*, ICML 2022. Node i of K rounds up if its threshold (pi(i) + gamma_i) / K lies below the place of the
value within its cell; pi is a fresh permutation for each coordinate that all nodes share, gamma_i is uniform and the
node's own. One bit: the two ends of the range. More levels: a grid with an offset that the nodes share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import factorial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.stochastic import StochasticCodec
from fpld.codecs.dither import Dither

if TYPE_CHECKING:
    from benchmarks.peers.rows import Floats32
    from fpld.types import Floats, Ints, Plan, Reals

GROUP = 8  # nodes that share a permutation: 8! of them are a table, and more nodes gain little
_SHARED = 2**32 - 1  # streams that belong to no node count down from here


@dataclass(frozen=True)
class CorrelatedCodec(StochasticCodec):
    """Round with stratified thresholds; `nodes` is K, which the plan does not state."""

    nodes: int = 1
    code: int = 32802

    def round(self, place: Floats32, levels: Ints, plan: Plan, rows: range) -> Ints:
        """Round up where the node's threshold lies below the place within the cell."""
        start, step = self._grid(levels, plan, rows)
        cell = np.clip((place - start) / step, 0, levels - 1)
        whole = np.floor(cell)
        return (whole + (self._thresholds(plan, rows) < cell - whole)).astype(np.int64)

    def place(self, symbols: Ints, levels: Ints, plan: Plan, rows: range) -> tuple[Reals, Reals]:
        """Return the place of each level on the shared grid, and the step."""
        start, step = self._grid(levels, plan, rows)
        return start + symbols * step, step

    def _grid(self, levels: Ints, plan: Plan, rows: range) -> tuple[Floats, Floats]:
        """Return the first level and the step: N levels of step (N + 1) / (N (N - 1)) from a point in (-1/N, 0)."""
        if (levels == 2).all():
            return np.zeros(1), np.ones(1)
        shift = self._stream(plan, 1).block(rows, plan.vocab) + 0.5
        start = np.where(levels == 2, 0.0, -shift / levels)
        return start, np.where(levels == 2, 1.0, (levels + 1) / (levels * (levels - 1)))

    def _thresholds(self, plan: Plan, rows: range) -> Floats:
        """Return this node's thresholds in (0, 1), stratified over the nodes of its group."""
        group, index = divmod(plan.node, GROUP)
        size = max(min(self.nodes - group * GROUP, GROUP), index + 1)
        words = self._stream(plan, 0).words(rows, plan.vocab).astype(np.uint64)
        slots = _permutations(size)[(words * np.uint64(factorial(size))) >> np.uint64(32), index]
        own = Dither.derive(plan.run_key, round=plan.round, node=plan.node).block(rows, plan.vocab) + 0.5
        thresholds: Floats = (slots + own) / size
        return thresholds

    def _stream(self, plan: Plan, purpose: int) -> Dither:
        stream = _SHARED - 2 * (plan.node // GROUP) - purpose
        return Dither.derive(plan.run_key, round=plan.round, node=stream)


@cache
def _permutations(size: int) -> Ints:
    return np.array(list(permutations(range(size))), np.int64)
