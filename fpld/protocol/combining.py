"""Decode and combine the frames of a round: by blocks of contexts, nodes in a fixed order, blocks on threads.

Memory is that of the result and of a few blocks, whatever the number of nodes; only rules that need all nodes at once
see a block of all of them. The result does not depend on the number of threads.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from fpld.codecs import Adding, Summing, decode_blocks
from fpld.codecs.base import Sequential
from fpld.numerics import softmax, split
from fpld.paper.theory import weighted_bracket
from fpld.rules import builtin as rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fpld.codecs import Codec
    from fpld.rules.builtin import Rule
    from fpld.types import Decoded, Floats, Plan

    Floats32 = np.ndarray[Any, np.dtype[np.float32]]

_BLOCK = 1 << 20  # coordinates that a thread works on at a time
_SUMS = 1 << 22  # the same where a codec adds nodes up itself, row by row
_BOUNDS = 1 << 15  # the same for bounds: their float64 arrays stay in the cache
_SAMPLE = 1 << 18  # coordinates of a node that bounds and estimates are from


class Sums(NamedTuple):
    """What a round brought: the target [m, V], each node's summed variance and squares, the bounds [lower, upper]."""

    target: Floats32
    noise: Floats
    squares: Floats
    bracket: Floats


class Sample(NamedTuple):
    """All nodes' logits and variances [K, rows, V] on some contexts, and what they were combined to (probabilities)."""

    rows: range
    values: Floats32
    variance: Floats32
    combined: Floats


class Observer(Protocol):
    """Who looks at a round as it is combined, and says beforehand what it wants to see."""

    samples: bool
    squares: bool

    def look(self, sample: Sample) -> None:
        """Take a sample; they come in the order of their contexts."""
        ...


class _Part(NamedTuple):
    """The sums over a block of contexts, how many of them the bounds are from, and the sample, if one was wanted."""

    noise: Floats
    squares: Floats
    bracket: Floats
    contexts: int
    sample: Sample | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Replies:
    """The payloads of the nodes that answered, in the order of their numbers, with their plans.

    `own` holds what each node coded against, for sequential refinement; what is decoded is added to it.
    """

    codec: Codec
    rule: Rule
    payloads: Sequence[memoryview]
    plans: Sequence[Plan]
    own: Sequence[Floats32] = ()

    def combine(self, observer: Observer, threads: int = 0) -> Sums:
        """Combine; no threads: one for each core that this process may use."""
        target = np.empty(self.plans[0].shape, np.float32)
        noise, squares, bracket, contexts = np.zeros(len(self.plans)), np.zeros(len(self.plans)), np.zeros(2), 0
        for part in self._parts(target, observer, threads):
            noise += part.noise
            squares += part.squares
            bracket += part.bracket
            contexts += part.contexts
            if part.sample is not None:
                observer.look(part.sample)
        return Sums(target, noise, squares, bracket / contexts)

    def _parts(self, target: Floats32, observer: Observer, threads: int) -> Iterable[_Part]:
        """Work on the blocks in the way that suits codec and rule; return what comes of them in their order."""
        contexts, vocab = target.shape
        linear = self.rule in (rules.mean, rules.precision)
        if linear and isinstance(self.codec, Adding) and not (self.own or observer.samples or observer.squares):
            return _side_by_side(partial(self._sum, self.codec, target), split(contexts, vocab, _SUMS), threads)
        if self.rule in (rules.mean, rules.mixture) and not (self.own or observer.squares) and self._shares():
            return self._summed(target, observer, threads or len(os.sched_getaffinity(0)))
        blocks = split(contexts, vocab * (len(self.plans) if rules.stacks(self.rule) else 1))
        if isinstance(self.codec, Sequential):
            streams = (decode_blocks(self.codec, *pair, blocks) for pair in self._pairs())
            together = zip(blocks, *streams, strict=True)
            return (self._apply(target, observer, rows, replies) for rows, *replies in together)
        return _side_by_side(lambda rows: self._apply(target, observer, rows, self._decode(rows)), blocks, threads)

    def _pairs(self) -> Iterable[tuple[memoryview, Plan]]:
        return zip(self.payloads, self.plans, strict=True)

    def _decode(self, rows: range) -> Iterable[Decoded]:
        return (self.codec.decode(payload, plan, rows) for payload, plan in self._pairs())

    def _sum(self, codec: Adding, target: Floats32, rows: range) -> _Part:
        """Let the codec add the nodes up."""
        total = target[rows.start : rows.stop]
        total[:] = 0
        noise = np.zeros((_sampled(len(rows), target.shape), target.shape[1]))
        weights = np.zeros(total.shape) if self.rule is rules.precision else None
        noise_of = codec.add(self.payloads, self.plans, rows, total, noise, weights)
        total /= np.float32(len(self.plans)) if weights is None else weights.astype(np.float32)
        noise /= len(self.plans) ** 2
        blocks = split(len(noise), target.shape[1], _BOUNDS)
        bracket = sum(
            (weighted_bracket(softmax(total[b.start : b.stop]), noise[b.start : b.stop]) for b in blocks), np.zeros(2)
        )
        return _Part(noise_of, np.zeros(len(self.plans)), bracket, len(noise))

    def _shares(self) -> bool:
        """Return whether the codec can add the nodes up from the start to the end."""
        together = all(plan.prior is self.plans[0].prior for plan in self.plans)
        return together and isinstance(self.codec, Summing) and not getattr(self.codec, "strict", False)

    def _summed(self, target: Floats32, observer: Observer, threads: int) -> Iterator[_Part]:
        """Let the codec add the nodes up, or their probabilities."""
        count, mixture = len(self.plans), self.rule is rules.mixture
        codec = cast("Summing", self.codec)
        for part in codec.sums(self.payloads, self.plans, sample=_SAMPLE, mixture=mixture, threads=threads):
            rows, some = part.rows, part.values.shape[1]
            mean = (part.total / count).astype(np.float32)
            target[rows.start : rows.stop] = np.log(mean) if mixture else mean
            combined = softmax(target[rows.start : rows.start + some])
            bracket = weighted_bracket(combined, part.variance.sum(axis=0, dtype=np.float64) / count**2)
            sample = None
            if observer.samples and some:
                sample = Sample(range(rows.start, rows.start + some), part.values, part.variance, combined)
            yield _Part(part.noise, np.zeros(count), bracket, some, sample)

    def _apply(self, target: Floats32, observer: Observer, rows: range, replies: Iterable[Decoded]) -> _Part:
        """Apply the rule node by node."""
        count, some = len(self.plans), _sampled(len(rows), target.shape)
        work, seen = rules.running(self.rule), _room(observer.samples, count, some, target.shape[1])
        noise, noise_of, squares = np.zeros((some, target.shape[1])), np.zeros(count), np.zeros(count)
        nothing = np.zeros((1, 1), np.float32)
        # Means of what may have been meant hold no noise to take out, and students do better without what they lack of
        # a mean probability (docs/rules.md).
        means = getattr(self.codec, "shrinks", False) and self.rule is rules.mixture
        for k, reply in enumerate(replies):
            values, variance = self._absolute(k, rows, reply), np.asarray(reply.variance, np.float32)
            work.add(values, nothing if means else variance)
            noise_of[k] = variance.sum(axis=-1).sum(dtype=np.float64) * (values.size / variance.size)
            noise += np.broadcast_to(variance, values.shape)[:some]
            if observer.squares:
                squares[k] = np.square(values, dtype=np.float64).sum()
            if observer.samples:
                seen[0, k], seen[1, k] = values[:some], np.broadcast_to(variance, values.shape)[:some]
        target[rows.start : rows.stop] = work.result()
        combined = softmax(target[rows.start : rows.start + some])
        sample = Sample(range(rows.start, rows.start + some), seen[0], seen[1], combined) if observer.samples else None
        return _Part(noise_of, squares, weighted_bracket(combined, noise / count**2), some, sample)

    def _absolute(self, k: int, rows: range, reply: Decoded) -> Floats32:
        """Add what the node coded against, and keep the sum."""
        values = reply.values.astype(np.float32, copy=False)
        if not self.own:
            return values
        part = self.own[k][rows.start : rows.stop]
        part += values
        return part


def _sampled(rows: int, shape: tuple[int, ...]) -> int:
    """Return how many contexts of a block are looked at more closely: in all about `_SAMPLE` coordinates of a node."""
    contexts, vocab = shape
    return min(rows, -(-rows * max(_SAMPLE // vocab, 1) // contexts))


def _room(wanted: bool, *shape: int) -> Floats32:
    return np.empty((2, *shape) if wanted else (2, 0), np.float32)


def _side_by_side(work: Callable[[range], _Part], blocks: Sequence[range], threads: int) -> Iterator[_Part]:
    """Work on blocks on threads; return results in the order of the blocks."""
    workers = min(threads or len(os.sched_getaffinity(0)), len(blocks))
    if workers == 1:
        yield from map(work, blocks)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(work, blocks)
