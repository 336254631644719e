"""Fast paths: implementations of combining for pairs of a codec and a rule that give what the reference gives.

    uniform, mean                 decode and add in one compiled pass
    predictive, mean or mixture   add up what nodes sent beside the zeros, which they share
    samples, mixture              add up the changes that labels make to the prior; no dense logits at all

A path states what it can serve; everything else goes to `fpld.protocol.combine.combine_reference`. A path for another
pair is one more entry of `FAST_PATHS`, and one more row of the test that compares it with the reference.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from fpld.codecs.base import encode
from fpld.codecs.prior import make_prior
from fpld.codecs.text import decode_tokens, encode_tokens
from fpld.kernels import numba_available
from fpld.numerics import softmax, split
from fpld.protocol.combine import (
    BlockResult,
    Combined,
    LogitSample,
    NullObserver,
    Replies,
    combine_reference,
    map_blocks,
    sum_bounds,
)
from fpld.protocol.node_audit import audit_nodes
from fpld.registry import codecs, rules
from fpld.target import Target
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fpld.codecs.samples.decoder import SamplesReader, SparseLabels
    from fpld.protocol.combine import Combination, Observer
    from fpld.rules.base import AuditingRule
    from fpld.types import Array, Floats, Ints

_BLOCK = 1 << 22  # coordinates that a thread works on at a time, node by node within a context
_WARMUP_SHAPE = 8, 64  # contexts and tokens
_WARMUP_NODES = 3  # enough for every rule


@dataclass(frozen=True, slots=True)
class FastPath:
    """A fast implementation for one codec and one rule, by their names in `fpld.registry`, and what it can serve.

    `run` combines replies for an observer on a number of threads, as `combine_reference` does. `samples` and `squares`
    say whether observers may want those. `one_prior`: the plans must share one prior. `kernels`: it needs numba.
    `weights`: nodes may have unequal weights. None serves sequential refinement.
    """

    codec: str
    rule: str
    run: Callable[[Replies, Observer, int], Combination]
    samples: bool = False
    squares: bool = False
    one_prior: bool = False
    kernels: bool = False
    weights: bool = False

    def serves(self, replies: Replies, observer: Observer) -> bool:
        """Return whether these replies can be combined for this observer."""
        return (
            codecs.get(self.codec) == replies.codec
            and rules.get(self.rule) == replies.rule
            and (self.samples or not observer.wants_samples)
            and (self.squares or not observer.wants_squares)
            and (replies.one_prior or not self.one_prior)
            and (self.weights or not replies.rule.traits.weights)
            and not replies.reconstructions
            and (numba_available() or not self.kernels)
        )


def _uniform(
    replies: Replies,
    observer: Observer,  # noqa: ARG001  # the signature of all paths
    threads: int,
) -> Combination:
    """Decode and add in one pass."""
    from fpld.codecs.uniform import fast  # brings numba along

    target = np.empty(replies.shape, np.float32)
    count = len(replies.plans)

    def work(rows: range) -> BlockResult:
        sampled = replies.sampled(rows)
        total = target[rows.start : rows.stop]
        variance = np.zeros((sampled.size, target.shape[1]))
        total[:] = 0
        noise = fast.add_nodes(replies.payloads, replies.plans, rows, total, sampled - rows.start, variance)
        total /= np.float32(count)
        return BlockResult(noise, np.zeros(count), sum_bounds(target[sampled], variance / count**2), sampled.size)

    # What ranges and steps of float16 decode to is finite.
    return partial(Target.trusted, target), map_blocks(work, split(*replies.shape, _BLOCK), threads)


def _predictive(replies: Replies, observer: Observer, threads: int, *, mixture: bool) -> Combination:
    """Add up what nodes sent beside zeros, which they share; for a `mixture`, their probabilities."""
    from fpld.codecs.predictive.accumulate import add_payloads  # brings numba along

    target = np.empty(replies.shape, np.float32)
    count = len(replies.plans)

    def results() -> Iterator[BlockResult]:
        for part in add_payloads(replies.payloads, replies.plans, replies.sampled(), mixture, threads):
            rows = part.rows
            sampled = part.sampled
            mean = (part.total / count).astype(np.float32)
            target[rows.start : rows.stop] = np.log(mean) if mixture else mean
            bracket = sum_bounds(target[sampled], part.variance.sum(axis=0, dtype=np.float64) / count**2)
            sample = None
            if observer.wants_samples and sampled.size:
                prior = replies.prior(rows, sampled - rows.start)
                sample = LogitSample(sampled, part.values, part.variance, softmax(target[sampled]), prior)
            yield BlockResult(part.noise, np.zeros(count), bracket, sampled.size, sample)

    return partial(Target.dense, target), results()


class _Changes(NamedTuple):
    """Hold the weighted sum of all nodes' changes to the prior: how many a context has, their tokens, and they."""

    counts: Ints
    tokens: Ints
    changes: Array


def _samples(
    replies: Replies,
    observer: Observer,  # noqa: ARG001  # the signature of all paths
    threads: int,  # noqa: ARG001
) -> Combination:
    """Add up what labels change of the prior; of all coordinates only a block of the prior is held."""
    from fpld.codecs.samples.decoder import decode_sparse  # brings numba along

    count = len(replies.plans)
    vocab = replies.shape[1]
    weights = np.array(replies.rule.traits.weights or [1.0] * count)
    blocks: list[_Changes] = []

    def results() -> Iterator[BlockResult]:
        pairs = zip(replies.payloads, replies.plans, strict=True)
        readers = [cast("SamplesReader", replies.codec.reader(payload, plan)) for payload, plan in pairs]
        for nodes in decode_sparse(readers):
            summed = _sum_changes(nodes, weights)
            blocks.append(summed._replace(changes=(summed.changes / weights.sum()).astype(np.float32)))
            yield BlockResult(np.array([node.noise for node in nodes]), np.zeros(count), np.zeros(2), 0)

    def finish() -> Target:
        counts, tokens, changes = (np.concatenate(part) for part in zip(*blocks, strict=True))
        starts = np.concatenate([[0], np.cumsum(counts)])
        return Target.sparse(starts, tokens, changes, vocab=vocab)

    return finish, results()


def _sum_changes(nodes: Sequence[SparseLabels], weights: Floats) -> _Changes:
    """Return the nodes' weighted changes in a block of contexts, summed by context and token."""
    counts = [np.diff(node.starts) for node in nodes]
    rows = np.concatenate([np.repeat(np.arange(len(per_context)), per_context) for per_context in counts])
    tokens = np.concatenate([node.tokens for node in nodes])
    changes = np.concatenate([weight * node.changes for weight, node in zip(weights, nodes, strict=True)])
    # Sorted by context and token, equal coordinates stand side by side: each run of them becomes one sum.
    order = np.lexsort((tokens, rows))
    rows = rows[order]
    tokens = tokens[order]
    changes = changes[order]
    first = np.ones(len(rows), bool)
    first[1:] = (np.diff(rows) != 0) | (np.diff(tokens) != 0)
    places = np.flatnonzero(first)
    sums = np.add.reduceat(changes, places) if places.size else changes
    return _Changes(np.bincount(rows[places], minlength=len(counts[0])), tokens[places], sums)


FAST_PATHS = (
    FastPath("uniform", "mean", _uniform, kernels=True),
    FastPath("predictive", "mean", partial(_predictive, mixture=False), samples=True, one_prior=True),
    FastPath("predictive", "mixture", partial(_predictive, mixture=True), samples=True, one_prior=True),
    FastPath("samples", "mixture", _samples, one_prior=True, weights=True),
)


def combine_replies(
    replies: Replies, observer: Observer, threads: int = 0, paths: Sequence[FastPath] = FAST_PATHS
) -> Combined:
    """Combine the replies of a round, by a fast path if one serves.

    Parameters
    ----------
    replies
        Payloads and plans of the nodes that answered; their reconstructions are updated in place.
    observer
        Looks at samples while blocks are combined.
    threads
        Number of threads; 0 takes one for each core that this process may use.
    paths
        Fast paths to choose from; an empty sequence leaves the reference implementation.
    """
    trust = None
    if replies.rule.traits.audits:
        rule = cast("AuditingRule", replies.rule)
        trust = rule.trust(audit_nodes(replies), replies.trust)
        replies = replace(replies, rule=rule.with_trust(trust))
    run = next((path.run for path in paths if path.serves(replies, observer)), combine_reference)
    make_target, results = run(replies, observer, threads or len(os.sched_getaffinity(0)))
    noise = np.zeros(len(replies.plans))
    squares = np.zeros(len(replies.plans))
    bracket = np.zeros(2)
    contexts = 0
    for result in results:
        noise += result.noise
        squares += result.squares
        bracket += result.bracket
        contexts += result.contexts
        if result.sample is not None:
            observer.observe(result.sample)
    lower, upper = (bracket / contexts).tolist() if contexts else (None, None)
    return Combined(make_target(), [plan.node for plan in replies.plans], noise, squares, lower, upper, trust)


def warm_up(codec: str, rule: str) -> None:
    """Compile the kernels of a codec and a rule by encoding and combining small labels of a few nodes.

    Kernels are compiled when they are first called, and cached on disk for all processes of this machine. Without a
    warm-up, nodes that start together would each compile them.
    """
    chosen = codecs.get(codec)
    rng = np.random.default_rng(0)
    prior = make_prior(rng.normal(size=_WARMUP_SHAPE)) if chosen.traits.prior else None
    contexts, vocab = _WARMUP_SHAPE
    plan = Plan(bytes(16), 1, 0, bytes(32), contexts, vocab, 32.0 * vocab, slots=_WARMUP_NODES, prior=prior)
    plans = [replace(plan, node=node, slot=node) for node in range(_WARMUP_NODES)]
    labels = rng.normal(size=(_WARMUP_NODES, *_WARMUP_SHAPE)).astype(np.float32)
    payloads = [encode(chosen, logits, plan) for logits, plan in zip(labels, plans, strict=True)]
    combine_replies(Replies(chosen, rules.get(rule), payloads, plans), NullObserver())


def warm_up_all() -> Iterator[str]:
    """Compile the kernels of every codec with every rule, and those of written text; yield the name of each.

    What is compiled here serves every run on this machine.
    """
    for codec in codecs.names():
        for rule in rules.names():
            warm_up(codec, rule)
        yield codec
    contexts, vocab = _WARMUP_SHAPE
    text = np.zeros((1, contexts), np.int32)
    data = encode_tokens(text, vocab, capacity=1 << 10)
    decode_tokens(data, text[:, 0], contexts, vocab)
    yield "written text"
