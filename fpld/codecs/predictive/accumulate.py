"""Add up predictive payloads of many nodes, at the cost of what they hold rather than of all coordinates.

Where a symbol is zero, what a node's coordinate decodes to depends on the prior's integer alone, and the nodes share
the prior. That part is added up once for all nodes, by a table with an entry for each integer. Each node then adds what
its own symbols change. It is the same for probabilities, which are normalized for each context by the same count.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.predictive import companding
from fpld.codecs.predictive.decoder import (
    CodedBlock,
    SymbolReader,
    class_counts,
    coder_blocks,
    expand_block,
    used_order,
)
from fpld.codecs.predictive.header import DITHER, PRIOR
from fpld.codecs.prior import LOG_PRIOR, whole_prior
from fpld.kernels import kernel
from fpld.numerics import softmax

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fpld.types import Array, Floats, Ints, Plan

MAX_LOOKUP = 8  # the largest symbol that is looked up
_INTEGERS = LOG_PRIOR.size


class AddedBlock(NamedTuple):
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
def _large_symbol(symbol: Any, j: Any, size: Any, large: Any) -> Any:
    """Return the value and the variance of a large symbol against integer j of the prior."""
    y = (abs(symbol) + large[0, j]) * size
    root = large[1, j]
    ratio = max(1.0 + (y if symbol > 0 else -y) / (4.0 * root), companding.MIN_RATIO)
    return large[2, j] + 4.0 * np.log(ratio), large[3, j] / (root * ratio) ** 2


@kernel
def _add_values(
    places: Any, symbols: Any, prior: Any, values: Any, spread: Any, size: Any, large: Any, total: Any
) -> Any:
    """Add what symbols change; return what they change of the summed variance."""
    noise = 0.0
    for k in range(places.size):
        i = places[k]
        j = -np.int64(prior[i])
        s = np.int64(symbols[k])
        if -MAX_LOOKUP <= s <= MAX_LOOKUP:
            value = values[j, s + MAX_LOOKUP]
            left = spread[j, s + MAX_LOOKUP]
        else:
            value, left = _large_symbol(s, j, size, large)
        total[i] += value - values[j, MAX_LOOKUP]
        noise += left - spread[j, MAX_LOOKUP]
    return noise


@kernel
def _add_probabilities(
    places: Any, symbols: Any, prior: Any, probabilities: Any, spread: Any, size: Any, large: Any, mass: Any, total: Any
) -> Any:
    """Add what symbols change of the probabilities; return what they change of the summed variance.

    `mass` [contexts] comes as what zeros alone would have, and leaves as what there is.
    """
    noise = 0.0
    vocab = total.size // mass.size
    changes = np.empty(places.size)
    for k in range(places.size):
        i = places[k]
        j = -np.int64(prior[i])
        s = np.int64(symbols[k])
        if -MAX_LOOKUP <= s <= MAX_LOOKUP:
            changes[k] = probabilities[j, s + MAX_LOOKUP] - probabilities[j, MAX_LOOKUP]
            left = spread[j, s + MAX_LOOKUP]
        else:
            value, left = _large_symbol(s, j, size, large)
            changes[k] = np.exp(value) - probabilities[j, MAX_LOOKUP]
        mass[i // vocab] += changes[k]
        noise += left - spread[j, MAX_LOOKUP]
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

    def __init__(self, payload: bytes | memoryview, plan: Plan, counts: Ints | None) -> None:
        self.plan = plan
        self.reader = SymbolReader(payload, plan, counts) if len(payload) else None
        self.codes_prior = self.reader is not None and self.reader.prior is not None
        self.sparse = self.reader is not None and self.reader.header.mode & (PRIOR | DITHER) == PRIOR
        if self.reader is None or not self.sparse:
            return
        self.header = header = self.reader.header
        self.size = header.size
        # What a symbol from -MAX_LOOKUP to MAX_LOOKUP decodes to against each integer of the prior, and its variance.
        self.values, self.spread = np.empty((2, _INTEGERS, 2 * MAX_LOOKUP + 1), np.float32)
        self.values[:, MAX_LOOKUP], self.spread[:, MAX_LOOKUP] = companding.zero_values(header)
        all_integers = -np.arange(_INTEGERS, dtype=np.int16)
        for s in (*range(-MAX_LOOKUP, 0), *range(1, MAX_LOOKUP + 1)):
            values, spread = companding.expand_prior(np.full(_INTEGERS, s, np.int32), all_integers, header)
            self.values[:, s + MAX_LOOKUP] = values
            self.spread[:, s + MAX_LOOKUP] = spread
        self.probabilities = np.exp(self.values)
        self.zero_probabilities = self.probabilities[:, MAX_LOOKUP].astype(np.float64)
        self.zero_spread = self.spread[:, MAX_LOOKUP].astype(np.float64)
        more, left = companding.large_symbol_terms(header)
        self.large = np.stack([more, companding.SQRT_PRIOR, LOG_PRIOR.astype(np.float32), left])

    def read(self, rows: range) -> CodedBlock | None:
        """Decode the next block, with places in the coder's order; None if the payload is empty."""
        return None if self.reader is None else self.reader.read(rows)

    def placed(self, block: CodedBlock | None, order: Array) -> CodedBlock | None:
        """Return a block with places in the block instead of the coder's order."""
        return block._replace(places=order[block.places]) if block is not None and self.codes_prior else block


def add_payloads(
    payloads: Sequence[bytes | memoryview], plans: Sequence[Plan], sampled: Ints, mixture: bool, threads: int
) -> Iterator[AddedBlock]:
    """Add up all nodes' values, or for a mixture their probabilities, block by block, in the order of the nodes.

    The nodes must share one prior. Of the `sampled` contexts, every node's values and variances are returned too.
    """
    prior = whole_prior(plans[0])
    counts = None if prior is None else class_counts(prior, plans[0])
    pool = ThreadPoolExecutor(threads) if threads > 1 else nullcontext()
    with pool as workers:
        over = map if workers is None else workers.map
        nodes = list(over(lambda pair: _Node(pair[0], pair[1], counts), zip(payloads, plans, strict=True)))
        for b, rows in enumerate(coder_blocks(plans[0])):
            some = sampled[(sampled >= rows.start) & (sampled < rows.stop)]
            blocks = list(over(partial(_Node.read, rows=rows), nodes))
            if prior is None or counts is None:
                yield _add_block(nodes, blocks, rows, None, some, mixture)
                continue
            # The coder's order is computed once for all nodes, and only for classes that hold symbols.
            part = prior[rows.start : rows.stop]
            listed = [block.places for node, block in zip(nodes, blocks, strict=True) if block and node.codes_prior]
            order = used_order(part, counts[b], listed)
            placed = [node.placed(block, order) for node, block in zip(nodes, blocks, strict=True)]
            yield _add_block(nodes, placed, rows, part, some, mixture)


def _add_block(
    nodes: list[_Node],
    blocks: list[CodedBlock | None],
    rows: range,
    prior: Array | None,
    sampled: Ints,
    mixture: bool,
) -> AddedBlock:
    """Add up a block."""
    vocab = nodes[0].plan.vocab
    some = sampled - rows.start
    total = np.zeros((len(rows), vocab), np.float64 if mixture else np.float32)
    seen: Array = np.empty((2, len(nodes), some.size, vocab), np.float32)
    noise = np.zeros(len(nodes))
    zeros = np.zeros((len(rows), _INTEGERS), total.dtype)
    tally = np.zeros((len(rows), _INTEGERS))
    sparse = prior is not None and any(node.sparse for node in nodes)
    if sparse:
        _tally(prior, tally)
    everywhere = tally.sum(axis=0)
    for k, (node, block) in enumerate(zip(nodes, blocks, strict=True)):
        if node.sparse and prior is not None and block is not None:
            change = _add_sparse(node, block, prior, tally, zeros, total, mixture)
            noise[k] = change + float(everywhere @ node.zero_spread)
            if some.size:
                part = _of_rows(block, some, prior.shape)
                seen[:, k] = companding.expand_symbols(*part, prior[some], node.header, seen.shape[2:])
        else:
            values, variance = expand_block(block, node.reader, node.plan, rows)
            noise[k] = variance.sum(dtype=np.float64)
            seen[0, k] = values[some]
            seen[1, k] = variance[some]
            if mixture and node.reader is not None:
                values = values - companding.dither_bias(variance, node.reader.header)
            total += softmax(values) if mixture else values
    if sparse:
        _add_zeros(prior, zeros, total)
    return AddedBlock(rows, total, noise, sampled, seen[0], seen[1])


def _add_sparse(
    node: _Node, block: CodedBlock, prior: Array, tally: Array, zeros: Array, total: Array, mixture: bool
) -> float:
    """Add what a node's symbols change to `total` and what its zeros are to `zeros`; return the change of variance."""
    places, symbols, _ = block
    rest = node.spread, node.size, node.large
    if not mixture:
        zeros += node.values[:, MAX_LOOKUP]
        return float(_add_values(places, symbols, prior.ravel(), node.values, *rest, total.ravel()))
    mass = tally @ node.zero_probabilities
    change = _add_probabilities(places, symbols, prior.ravel(), node.probabilities, *rest, mass, total.ravel())
    zeros += node.zero_probabilities / mass[:, None]
    return float(change)


def _of_rows(block: CodedBlock, rows: Ints, shape: tuple[int, ...]) -> CodedBlock:
    """Return the symbols of some contexts of a block, as if these were all."""
    places, symbols, tails = block
    if rows.size == shape[0]:
        return block
    place_of = np.full(shape[0], -1)
    place_of[rows] = np.arange(rows.size)
    # A lookup of every place takes less time than a division.
    wanted = np.flatnonzero(np.repeat(place_of >= 0, shape[1])[places])
    row, column = np.divmod(places[wanted], shape[1])
    return CodedBlock((place_of[row] * shape[1] + column).astype(np.int32), symbols[wanted], tails[rows])
