"""Add up predictive payloads of many nodes, at the cost of what they hold rather than of all coordinates.

Where a symbol is zero, what a node's coordinate decodes to depends on the prior's integer alone, and the nodes share
the prior: that part is added up once for all nodes, by a table with a place for each integer. Each node then adds what
its own symbols change. It is the same for probabilities, which are normalized for each context by the same count.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.predictive import companding
from fpld.codecs.predictive.coding import expanded
from fpld.codecs.predictive.head import DITHER, PRIOR
from fpld.codecs.predictive.symbols import SymbolReader, block_ranges, class_counts, used_order
from fpld.codecs.prior import LOG_PRIOR, whole_prior
from fpld.compiled import kernel
from fpld.numerics import softmax

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from fpld.types import Floats, Ints, Plan

FEW = 8  # symbols up to this size are looked up
_INTEGERS = LOG_PRIOR.size
_ROOT = np.exp(LOG_PRIOR / 2).astype(np.float32)

Array = np.ndarray[Any, np.dtype[Any]]
Block = tuple[Array, Array, Array]  # places of symbols that are not zero, the symbols, and the contexts' tails


class Added(NamedTuple):
    """A block of contexts: the nodes' values (or probabilities) added up, and each node's summed variance [K].

    Of the `sampled` contexts, which count from the first, every node's values and variances [K, n, V].
    """

    rows: range
    total: Array
    noise: Floats
    sampled: Ints
    values: Array
    variance: Array


@kernel
def _beyond(symbol: Any, j: Any, size: Any, large: Any) -> Any:
    """Return the value and the variance of a large symbol against integer j of the prior."""
    y = (abs(symbol) + large[0, j]) * size
    root = large[1, j]
    ratio = max(1.0 + (y if symbol > 0 else -y) / (4.0 * root), companding.LEAST_RATIO)
    return large[2, j] + 4.0 * np.log(ratio), large[3, j] / (root * ratio) ** 2


@kernel
def _add_values(
    places: Any, symbols: Any, prior: Any, values: Any, spread: Any, size: Any, large: Any, total: Any
) -> Any:
    """Add what symbols change; return what they change of the summed variance."""
    noise = 0.0
    for k in range(places.size):
        i = places[k]
        j, s = -np.int64(prior[i]), np.int64(symbols[k])
        if -FEW <= s <= FEW:
            value, left = values[j, s + FEW], spread[j, s + FEW]
        else:
            value, left = _beyond(s, j, size, large)
        total[i] += value - values[j, FEW]
        noise += left - spread[j, FEW]
    return noise


@kernel
def _add_chances(
    places: Any, symbols: Any, prior: Any, chances: Any, spread: Any, size: Any, large: Any, mass: Any, total: Any
) -> Any:
    """Add what symbols change of the probabilities; return what they change of the summed variance.

    `mass` [contexts] comes as what zeros alone would have, and leaves as what there is.
    """
    noise, vocab = 0.0, total.size // mass.size
    changes = np.empty(places.size)
    for k in range(places.size):
        i = places[k]
        j, s = -np.int64(prior[i]), np.int64(symbols[k])
        if -FEW <= s <= FEW:
            changes[k], left = chances[j, s + FEW] - chances[j, FEW], spread[j, s + FEW]
        else:
            value, left = _beyond(s, j, size, large)
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
    """A node's payload, and what its symbols decode to against each integer of the prior."""

    def __init__(self, payload: bytes | memoryview, plan: Plan, counts: npt.NDArray[np.int64] | None) -> None:
        self.plan, self.reader = plan, SymbolReader(payload, plan, counts) if len(payload) else None
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
        self.large = np.stack([more, _ROOT, LOG_PRIOR.astype(np.float32), left])

    def read(self, rows: range) -> Block | None:
        """Decode the next block's symbols, in the coder's order; nothing, if nothing was sent."""
        return None if self.reader is None else self.reader.read(rows)

    def placed(self, block: Block | None, order: Array) -> Block | None:
        """Return a block's symbols where they belong."""
        if block is None or not self.codes_prior:
            return block
        return order[block[0]], block[1], block[2]


def add_up(
    payloads: Sequence[bytes | memoryview], plans: Sequence[Plan], sampled: Ints, mixture: bool, threads: int
) -> Iterator[Added]:
    """Add up all nodes' values, or for a mixture their probabilities, block by block, in the order of the nodes.

    The nodes must share one prior. Of the `sampled` contexts, every node's values and variances are returned too.
    """
    prior = whole_prior(plans[0])
    counts = None if prior is None else class_counts(prior, plans[0])
    pool = ThreadPoolExecutor(threads) if threads > 1 else nullcontext()
    with pool as workers:
        over = map if workers is None else workers.map
        nodes = list(over(lambda pair: _Node(pair[0], pair[1], counts), zip(payloads, plans, strict=True)))
        for b, rows in enumerate(block_ranges(plans[0])):
            some = sampled[(sampled >= rows.start) & (sampled < rows.stop)]
            found = list(over(partial(_Node.read, rows=rows), nodes))
            if prior is None or counts is None:
                yield _add(nodes, found, rows, None, some, mixture)
                continue
            own = prior[rows.start : rows.stop]
            ordered = [block[0] for node, block in zip(nodes, found, strict=True) if block and node.codes_prior]
            order = used_order(own, counts[b], ordered)
            placed = [node.placed(block, order) for node, block in zip(nodes, found, strict=True)]
            yield _add(nodes, placed, rows, own, some, mixture)


def _add(
    nodes: list[_Node], found: list[Block | None], rows: range, own: Array | None, sampled: Ints, mixture: bool
) -> Added:
    """Add up a block."""
    vocab, some = nodes[0].plan.vocab, sampled - rows.start
    total = np.zeros((len(rows), vocab), np.float64 if mixture else np.float32)
    seen: Array = np.empty((2, len(nodes), some.size, vocab), np.float32)
    noise, zeros = np.zeros(len(nodes)), np.zeros((len(rows), _INTEGERS), total.dtype)
    tally, sparse = np.zeros((len(rows), _INTEGERS)), own is not None and any(node.sparse for node in nodes)
    if sparse:
        _tally(own, tally)
    everywhere = tally.sum(axis=0)
    for k, (node, block) in enumerate(zip(nodes, found, strict=True)):
        if node.sparse and own is not None and block is not None:
            change = _add_sparse(node, block, own, tally, zeros, total, mixture)
            noise[k] = change + float(everywhere @ node.zero_spread)
            if some.size:
                seen[:, k] = companding.expand(*_of_rows(block, some, own.shape), own[some], node.head, seen.shape[2:])
        else:
            values, variance = expanded(block, node.reader, node.plan, rows)
            noise[k] = variance.sum(dtype=np.float64)
            seen[0, k], seen[1, k] = values[some], variance[some]
            if mixture and node.reader is not None:
                values = values - companding.bias(variance, node.reader.head)
            total += softmax(values) if mixture else values
    if sparse:
        _add_zeros(own, zeros, total)
    return Added(rows, total, noise, sampled, seen[0], seen[1])


def _add_sparse(
    node: _Node, block: Block, own: Array, tally: Array, zeros: Array, total: Array, mixture: bool
) -> float:
    """Add what a node's symbols change to `total` and what its zeros are to `zeros`; return the change of variance."""
    places, symbols, _ = block
    rest = node.spread, node.size, node.large
    if not mixture:
        zeros += node.values[:, FEW]
        return float(_add_values(places, symbols, own.ravel(), node.values, *rest, total.ravel()))
    mass = tally @ node.zero_chances
    change = _add_chances(places, symbols, own.ravel(), node.chances, *rest, mass, total.ravel())
    zeros += node.zero_chances / mass[:, None]
    return float(change)


def _of_rows(block: Block, rows: Ints, shape: tuple[int, ...]) -> Block:
    """Return the symbols of some contexts of a block, as if these were all."""
    places, symbols, tails = block
    if rows.size == shape[0]:
        return block
    place_of = np.full(shape[0], -1)
    place_of[rows] = np.arange(rows.size)
    wanted = np.flatnonzero(np.repeat(place_of >= 0, shape[1])[places])  # a division of every place would take longer
    row, column = np.divmod(places[wanted], shape[1])
    return (place_of[row] * shape[1] + column).astype(np.int32), symbols[wanted], tails[rows]
