"""Decode the replies of a round and combine them into the student's target.

A round holds K payloads of m contexts with V logits each, which may be far more than memory holds. So contexts are cut
into blocks, and a block is decoded and combined node by node, in the order of the nodes' numbers. Memory is that of
the result and of a few blocks, whatever K is. Blocks do not depend on each other: threads work on them side by side,
and the result depends neither on their number nor on how the contexts are cut.

While a block is at hand an *observer* may look at it: estimators want all nodes' logits on a sample of contexts, or
their sums of squares. What a block yields besides its part of the target is a `BlockResult`; the results are added up
in the order of the contexts.

`combine_reference` serves every codec, every rule and every observer. `fpld.protocol.fast_paths` has faster
implementations for some pairs of a codec and a rule, and `combine_replies`, which chooses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from fpld.numerics import softmax, split
from fpld.paper.theory import weighted_bracket
from fpld.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fpld.codecs.base import Codec
    from fpld.codecs.prior import Eighths
    from fpld.rules import Rule
    from fpld.types import Decoded, Floats, Floats32, Ints, Plan

_SAMPLE_SIZE = 1 << 18  # coordinates of a node from which bounds and estimates are computed
_BOUNDS_BLOCK = 1 << 15  # coordinates at a time, so that what the bounds are computed from stays in the cache
_BLOCK = 1 << 20  # coordinates that a thread works on at a time


@dataclass(frozen=True, eq=False, slots=True)
class Replies:
    """Hold the payloads of the nodes that answered, in the order of their numbers, with their plans.

    `reconstructions` holds what each node coded against, for sequential refinement; what is decoded is added to it in
    place. `trust` is the nodes' trust before this round, for rules that remember it. `next_tokens` [m] are the tokens
    that follow the contexts in the public text, -1 where none does, for rules that compare nodes with it.
    """

    codec: Codec
    rule: Rule
    payloads: Sequence[bytes | memoryview]
    plans: Sequence[Plan]
    reconstructions: Sequence[Floats32] = ()
    trust: Floats | None = None
    next_tokens: Ints | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape [m, V] of a node's logits."""
        return self.plans[0].shape

    @property
    def one_prior(self) -> bool:
        """Return whether all plans share one prior."""
        return all(plan.prior is self.plans[0].prior for plan in self.plans)

    def sampled(self, rows: range | None = None) -> Ints:
        """Return the contexts for bounds and estimates, evenly spread: all of them, or those within a block."""
        contexts, vocab = self.shape
        count = min(-(-_SAMPLE_SIZE // vocab), contexts)
        spread = np.arange(count) * contexts // count
        return spread if rows is None else spread[(spread >= rows.start) & (spread < rows.stop)]

    def prior(self, rows: range, offsets: Ints) -> Eighths | None:
        """Return the prior of the contexts at some offsets from the first of the rows."""
        prior = self.plans[0].prior
        return None if prior is None else prior.block(rows)[offsets]


class LogitSample(NamedTuple):
    """Hold all nodes' logits and variances [K, n, V] on some contexts, the result, and the prior.

    `combined` are probabilities [n, V], `prior` [n, V] is in eighths of a nat.
    """

    contexts: Ints
    values: Floats32
    variance: Floats32
    combined: Floats
    prior: Eighths | None


class Observation(NamedTuple):
    """Hold what an estimator is shown of a round; entry k of each sequence is that of `nodes[k]`, which answered.

    `noise` is the mean variance of a decoded logit. `squares` are sums of squared decoded logits, and `samples` come in
    the order of their contexts; both only if the traits ask for them.
    """

    nodes: Sequence[int]
    plans: Sequence[Plan]
    codec: Codec
    noise: Floats
    squares: Floats
    samples: Sequence[LogitSample] = ()


class Observer(Protocol):
    """Look at a round while it is combined; the flags state beforehand what is wanted."""

    wants_samples: bool
    wants_squares: bool

    def observe(self, sample: LogitSample) -> None:
        """Take a sample; samples come in the order of their contexts."""
        ...


class NullObserver:
    """Observe nothing."""

    wants_samples = False
    wants_squares = False

    def observe(self, sample: LogitSample) -> None:
        """Ignore a sample."""


class BlockResult(NamedTuple):
    """Hold the sums over a block of contexts: of each node the variance and the squares (if they are wanted).

    `bracket` is the sum of the bounds [lower, upper] over `contexts` contexts.
    """

    noise: Floats
    squares: Floats
    bracket: Floats
    contexts: int
    sample: LogitSample | None = None


class Combined(NamedTuple):
    """Hold the result of a round: the student's target, the nodes that it is from, and statistics for people.

    `noise` and `squares` are each node's summed variance and sum of squares, the latter if the observer wants it.
    `lower` and `upper` bound the KL that coding has cost, in nats per context; they are None for sampled labels, to
    which the paper's bounds do not apply. `trust` is each node's trust under a rule that audits.
    """

    target: Target
    nodes: list[int]
    noise: Floats
    squares: Floats
    lower: float | None
    upper: float | None
    trust: Floats | None = None


# A function that makes the target once all block results were taken, and the results in the order of contexts.
Combination = tuple[Callable[[], Target], Iterator[BlockResult]]


def sum_bounds(logits: Floats32, noise: Floats) -> Floats:
    """Return the bounds [lower, upper] summed over contexts, from combined logits and their variances [n, V]."""
    total = np.zeros(2)
    for b in split(len(logits), logits.shape[1], _BOUNDS_BLOCK):
        total += weighted_bracket(softmax(logits[b.start : b.stop]), noise[b.start : b.stop])
    return total


def combine_reference(replies: Replies, observer: Observer, threads: int) -> Combination:
    """Combine by decoding every node in full: the reference for all fast paths."""
    target = np.empty(replies.shape, np.float32)
    contexts, vocab = replies.shape
    blocks = split(contexts, vocab * (len(replies.plans) if replies.rule.traits.needs_all else 1), _BLOCK)
    pairs = zip(replies.payloads, replies.plans, strict=True)
    readers = [replies.codec.reader(payload, plan) for payload, plan in pairs]
    if not replies.codec.traits.seeks:
        # Such a payload can only be decoded from its beginning: blocks are worked on in order, on one thread.
        streams = [reader.blocks(blocks) for reader in readers]
        return partial(Target.dense, target), (
            _combine_block(replies, observer, target, rows, (next(s) for s in streams)) for rows in blocks
        )

    def work(rows: range) -> BlockResult:
        nodes = (block for reader in readers for block in reader.blocks([rows]))
        return _combine_block(replies, observer, target, rows, nodes)

    return partial(Target.dense, target), map_blocks(work, blocks, threads)


def _combine_block(
    replies: Replies, observer: Observer, target: Floats32, rows: range, nodes: Iterable[Decoded]
) -> BlockResult:
    """Apply the rule to a block, node by node, and write the result to its rows of the target."""
    count = len(replies.plans)
    vocab = target.shape[1]
    sampled = replies.sampled(rows)
    offsets = sampled - rows.start
    accumulator = replies.rule.start((len(rows), vocab))
    total_variance = np.zeros((sampled.size, vocab))
    noise = np.zeros(count)
    squares = np.zeros(count)
    sample_shape = (count, sampled.size, vocab) if observer.wants_samples else 0
    sample_values = np.empty(sample_shape, np.float32)
    sample_variance = np.empty(sample_shape, np.float32)
    for k, node in enumerate(nodes):
        decoded = _add_reconstruction(replies, k, rows, node)
        values = decoded.values
        variance = np.asarray(decoded.variance, np.float32)
        accumulator.add(decoded)
        # A sampled label is noisy in probabilities, and values are their logarithms: hence the factor p^2.
        node_noise = variance if decoded.probabilities is None else variance * np.exp(2 * values)
        noise[k] = node_noise.sum(axis=-1).sum(dtype=np.float64) * (values.size / node_noise.size)
        total_variance += np.broadcast_to(variance, values.shape)[offsets]
        if observer.wants_squares:
            squares[k] = np.square(values, dtype=np.float64).sum()
        if observer.wants_samples:
            sample_values[k] = values[offsets]
            sample_variance[k] = np.broadcast_to(variance, values.shape)[offsets]
    target[rows.start : rows.stop] = accumulator.result()
    logits = target[sampled]
    sample = None
    if observer.wants_samples and sampled.size:
        prior = replies.prior(rows, offsets)
        sample = LogitSample(sampled, sample_values, sample_variance, softmax(logits), prior)
    if replies.codec.traits.sparse:
        # The paper's bounds are about dense labels.
        return BlockResult(noise, squares, np.zeros(2), 0, sample)
    return BlockResult(noise, squares, sum_bounds(logits, total_variance / count**2), sampled.size, sample)


def _add_reconstruction(replies: Replies, k: int, rows: range, decoded: Decoded) -> Decoded:
    """Add the k-th node's reconstruction to what it sent, and keep the sum as its next reconstruction."""
    values = decoded.values.astype(np.float32, copy=False)
    if not replies.reconstructions:
        return decoded._replace(values=values)
    block = replies.reconstructions[k][rows.start : rows.stop]
    block += values
    return decoded._replace(values=block)


def map_blocks(work: Callable[[range], BlockResult], blocks: Sequence[range], threads: int) -> Iterator[BlockResult]:
    """Work on blocks on threads; yield results in the order of the blocks."""
    workers = min(threads, len(blocks))
    if workers == 1:
        yield from map(work, blocks)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(work, blocks)
