"""Add up the predictive payloads of many nodes, at the cost of what they hold rather than of all coordinates.

Where a symbol is zero, what a node's coordinate decodes to depends on the prior's integer alone, and the nodes share
the prior: that part is added up once for all nodes, by a table with a place for each integer. Each node then adds what
its own symbols change. It is the same for probabilities, which are normalized for each context by the same count.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.base import Sum
from fpld.codecs.predictive import companding
from fpld.codecs.predictive.coding import expanded
from fpld.codecs.predictive.head import DITHER, PRIOR
from fpld.codecs.predictive.symbols import Reader, block_ranges, class_counts, used_order
from fpld.codecs.prior import LOG_PRIOR, checked
from fpld.compiled import kernel
from fpld.numerics import softmax

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from fpld.types import Plan

FEW = 8  # symbols up to this size are looked up
_INTEGERS = LOG_PRIOR.size
_ROOT = np.exp(LOG_PRIOR / 2).astype(np.float32)

Array = np.ndarray[Any, np.dtype[Any]]


@kernel
def _beyond(symbol: Any, j: Any, size: Any, cells: Any) -> Any:
    """Return the value and the variance of a large symbol against integer j of the prior."""
    y = (abs(symbol) + cells[0, j]) * size
    root = cells[1, j]
    ratio = max(1.0 + (y if symbol > 0 else -y) / (4.0 * root), companding.LEAST_RATIO)
    return cells[2, j] + 4.0 * np.log(ratio), cells[3, j] / (root * ratio) ** 2


@kernel
def _add_values(
    places: Any, symbols: Any, prior: Any, values: Any, spread: Any, size: Any, cells: Any, total: Any
) -> Any:
    """Add what symbols change; return what they change of the summed variance."""
    noise = 0.0
    for k in range(places.size):
        i = places[k]
        j, s = -np.int64(prior[i]), np.int64(symbols[k])
        if -FEW <= s <= FEW:
            value, left = values[j, s + FEW], spread[j, s + FEW]
        else:
            value, left = _beyond(s, j, size, cells)
        total[i] += value - values[j, FEW]
        noise += left - spread[j, FEW]
    return noise


@kernel
def _add_chances(
    places: Any, symbols: Any, prior: Any, chances: Any, spread: Any, size: Any, cells: Any, mass: Any, total: Any
) -> Any:
    """Do so with probabilities; `mass` [contexts] comes as what zeros alone would have, and leaves as what there is."""
    noise, vocab = 0.0, total.size // mass.size
    changes = np.empty(places.size)
    for k in range(places.size):
        i = places[k]
        j, s = -np.int64(prior[i]), np.int64(symbols[k])
        if -FEW <= s <= FEW:
            changes[k], left = chances[j, s + FEW] - chances[j, FEW], spread[j, s + FEW]
        else:
            value, left = _beyond(s, j, size, cells)
            changes[k] = np.exp(value) - chances[j, FEW]
        mass[i // vocab] += changes[k]
        noise += left - spread[j, FEW]
    for k in range(places.size):
        total[places[k]] += changes[k] / mass[places[k] // vocab]
    return noise


@kernel
def _add_zeros(prior: Any, zeros: Any, total: Any) -> None:
    """Add to each coordinate what the zeros of all nodes are there; `zeros` [contexts, integers]."""
    for row in range(prior.shape[0]):
        for v in range(prior.shape[1]):
            total[row, v] += zeros[row, -np.int64(prior[row, v])]


@kernel
def _tally(prior: Any, out: Any) -> None:
    """Count how often each integer of the prior stands in a context."""
    for row in range(prior.shape[0]):
        for v in range(prior.shape[1]):
            out[row, -np.int64(prior[row, v])] += 1


class _Node:
    """A node's payload, and tables of what its symbols decode to."""

    def __init__(self, payload: bytes | memoryview, plan: Plan, counts: npt.NDArray[np.int64] | None) -> None:
        self.plan, self.reader = plan, Reader(payload, plan, counts) if len(payload) else None
        self.codes_prior = self.reader is not None and self.reader.prior is not None
        self.sparse = self.reader is not None and self.reader.head.mode & (PRIOR | DITHER) == PRIOR
        if self.reader is None or not self.sparse:
            return
        self.head = head = self.reader.head
        all_integers = -np.arange(_INTEGERS, dtype=np.int16)
        self.size = head.size
        self.values, self.spread = np.empty((2, _INTEGERS, 2 * FEW + 1), np.float32)
        self.values[:, FEW], self.spread[:, FEW] = companding.base(head)
        for s in (*range(-FEW, 0), *range(1, FEW + 1)):
            symbols = np.full(_INTEGERS, s, np.int32)
            self.values[:, s + FEW], self.spread[:, s + FEW] = companding.expand_prior(symbols, all_integers, head)
        self.chances = np.exp(self.values)
        self.zero_chances, self.zero_spread = (x[:, FEW].astype(np.float64) for x in (self.chances, self.spread))
        more, left = companding.beyond(head)
        self.cells = np.stack([more, _ROOT, LOG_PRIOR.astype(np.float32), left])

    def read(self, rows: range) -> tuple[Array, Array, Array] | None:
        """Decode the next block's symbols, in the coder's order; nothing, if nothing was sent."""
        return None if self.reader is None else self.reader.read(rows)

    def placed(self, block: tuple[Array, Array, Array] | None, order: Array) -> tuple[Array, Array, Array] | None:
        """Return a block's symbols where they belong."""
        if block is None or not self.codes_prior:
            return block
        return order[block[0]], block[1], block[2]


def sums(
    payloads: Sequence[bytes | memoryview], plans: Sequence[Plan], sample: int, mixture: bool, threads: int
) -> Iterator[Sum]:
    """Add up block by block; the nodes must share one prior."""
    prior = checked(plans[0])
    counts = None if prior is None else class_counts(prior, plans[0])
    pool = ThreadPoolExecutor(threads) if threads > 1 else nullcontext()
    with pool as workers:
        over = map if workers is None else workers.map
        nodes = list(over(lambda pair: _Node(pair[0], pair[1], counts), zip(payloads, plans, strict=True)))
        for b, (rows, some) in enumerate(_sampled(plans[0], sample)):
            found = list(over(partial(_Node.read, rows=rows), nodes))
            if prior is None or counts is None:
                yield _sum(nodes, found, rows, None, some, mixture)
                continue
            own = prior[rows.start : rows.stop]
            ordered = [block[0] for node, block in zip(nodes, found, strict=True) if block and node.codes_prior]
            order = used_order(own, counts[b], ordered)
            placed = [node.placed(block, order) for node, block in zip(nodes, found, strict=True)]
            yield _sum(nodes, placed, rows, own, some, mixture)


def _sampled(plan: Plan, sample: int) -> Iterator[tuple[range, int]]:
    """Return blocks, and how many contexts of each to look at: spread evenly."""
    wanted, taken = min(-(-sample // plan.vocab), plan.contexts), 0
    for rows in block_ranges(plan):
        some = wanted * rows.stop // plan.contexts - taken
        taken += some
        yield rows, some


def _sum(
    nodes: list[_Node],
    found: list[tuple[Array, Array, Array] | None],
    rows: range,
    own: Array | None,
    some: int,
    mixture: bool,
) -> Sum:
    """Add up a block."""
    vocab, sparse = nodes[0].plan.vocab, [node for node in nodes if node.sparse]
    shape = (len(rows), vocab)
    total = np.zeros(shape, np.float64 if mixture else np.float32)
    seen: Array = np.empty((2, len(nodes), some, vocab), np.float32)
    noise, zeros = np.zeros(len(nodes)), np.zeros((len(rows), _INTEGERS), total.dtype)
    tally = np.zeros((len(rows), _INTEGERS))
    if sparse and own is not None:
        _tally(own, tally)
    everywhere = tally.sum(axis=0)
    for k, (node, block) in enumerate(zip(nodes, found, strict=True)):
        if node.sparse and own is not None and block is not None:
            places, symbols, _ = block
            arguments = places, symbols, own.ravel()
            if mixture:
                mass = tally @ node.zero_chances
                more = _add_chances(*arguments, node.chances, node.spread, node.size, node.cells, mass, total.ravel())
                zeros += node.zero_chances / mass[:, None]
            else:
                more = _add_values(*arguments, node.values, node.spread, node.size, node.cells, total.ravel())
                zeros += node.values[:, FEW]
            noise[k] = more + float(everywhere @ node.zero_spread)
            if some:
                few = places < some * vocab
                seen[:, k] = companding.expand(
                    places[few], symbols[few], block[2], own[:some], node.head, (some, vocab)
                )
        else:
            values, variance = expanded(block, node.reader, node.plan, rows)
            if mixture and node.reader is not None:
                total += softmax(companding.unbiased(values, variance, node.reader.head))
            else:
                total += softmax(values) if mixture else values
            noise[k] = variance.sum(dtype=np.float64)
            seen[0, k], seen[1, k] = values[:some], variance[:some]
    if sparse and own is not None:
        _add_zeros(own, zeros, total)
    return Sum(rows, total, noise, seen[0], seen[1])
