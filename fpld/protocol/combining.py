"""Decode and combine the frames of a round: by blocks of contexts, nodes in a fixed order, blocks side by side on threads.

Memory is that of the result and of a few blocks, whatever the number of nodes; only rules that need all nodes at once
see a block of all of them. The result does not depend on the number of threads.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import combine as rules
from fpld.codecs import Adding, decode_blocks
from fpld.codecs.base import Sequential
from fpld.theory import softmax, weighted_bracket

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fpld.codecs import Codec
    from fpld.combine import Rule
    from fpld.types import Decoded, Floats, Plan

    Floats32 = np.ndarray[Any, np.dtype[np.float32]]

_BLOCK = 1 << 20  # coordinates that a thread works on at a time
_SUMS = 1 << 22  # the same where a codec adds nodes up itself, row by row
_SAMPLE = 1 << 18  # coordinates that the bounds are averaged over


class Sums(NamedTuple):
    """What a round brought: the target [m, V], each node's summed variance and squares, and the bounds [lower, upper]."""

    target: Floats32
    noise: Floats
    squares: Floats
    bracket: Floats


@dataclass(frozen=True, eq=False, slots=True)
class Replies:
    """The payloads of the nodes that answered, in the order of their numbers, with their plans.

    `own` holds what each node coded against, for sequential refinement; what is decoded is added to it. `squares` asks for
    the sums of squared logits, which cost a pass over the values.
    """

    codec: Codec
    rule: Rule
    payloads: Sequence[memoryview]
    plans: Sequence[Plan]
    own: Sequence[Floats32] = ()
    squares: bool = False

    def combine(self, threads: int = 0) -> Sums:
        """Combine; no threads: one for each core that this process may use."""
        contexts, vocab = self.plans[0].shape
        count = len(self.plans)
        target = np.empty((contexts, vocab), np.float32)
        adds = not self.own and not self.squares and self.rule in (rules.mean, rules.precision)
        if adds and isinstance(self.codec, Adding):
            blocks = split(contexts, vocab, _SUMS)
            parts = _side_by_side(partial(self._sum, self.codec, target), blocks, threads)
        else:
            blocks = split(contexts, vocab * (count if rules.stacks(self.rule) else 1), _BLOCK)
            if isinstance(self.codec, Sequential):
                streams = (decode_blocks(self.codec, *pair, blocks) for pair in self._pairs())
                parts = [self._apply(target, rows, replies) for rows, *replies in zip(blocks, *streams, strict=True)]
            else:
                parts = _side_by_side(lambda rows: self._apply(target, rows, self._decode(rows)), blocks, threads)
        noise, squares, bracket = (np.sum([part[i] for part in parts], axis=0) for i in range(3))
        return Sums(target, noise, squares, bracket / sum(part[3] for part in parts))

    def _pairs(self) -> Iterable[tuple[memoryview, Plan]]:
        return zip(self.payloads, self.plans, strict=True)

    def _decode(self, rows: range) -> Iterable[Decoded]:
        return (self.codec.decode(payload, plan, rows) for payload, plan in self._pairs())

    def _sum(self, codec: Adding, target: Floats32, rows: range) -> tuple[Floats, Floats, Floats, int]:
        """Let the codec add the nodes up."""
        count, (contexts, vocab) = len(self.plans), self.plans[0].shape
        total = target[rows.start : rows.stop]
        total[:] = 0
        noise = np.zeros((_sampled(len(rows), contexts, vocab), vocab))
        weights = np.zeros(total.shape) if self.rule is rules.precision else None
        noise_of = codec.add(self.payloads, self.plans, rows, total, noise, weights)
        total /= np.float32(count) if weights is None else weights.astype(np.float32)
        return noise_of, np.zeros(count), *_bracket(total, noise, count)

    def _apply(
        self, target: Floats32, rows: range, replies: Iterable[Decoded]
    ) -> tuple[Floats, Floats, Floats, int]:
        """Apply the rule node by node."""
        count, (contexts, vocab) = len(self.plans), self.plans[0].shape
        work = rules.running(self.rule)
        noise = np.zeros((_sampled(len(rows), contexts, vocab), vocab))
        noise_of, squares = np.zeros(count), np.zeros(count)
        for k, reply in enumerate(replies):
            values = self._absolute(k, rows, reply)
            variance = np.asarray(reply.variance, np.float32)
            work.add(values, variance)
            noise_of[k] = variance.sum(dtype=np.float64) * (values.size / variance.size)
            noise += np.broadcast_to(variance, values.shape)[: len(noise)]
            if self.squares:
                squares[k] = np.square(values, dtype=np.float64).sum()
        target[rows.start : rows.stop] = work.result()
        return noise_of, squares, *_bracket(target[rows.start : rows.stop], noise, count)

    def _absolute(self, k: int, rows: range, reply: Decoded) -> Floats32:
        """Add what the node coded against, and keep the sum."""
        values = reply.values.astype(np.float32, copy=False)
        if not self.own:
            return values
        part = self.own[k][rows.start : rows.stop]
        part += values
        return part


def split(contexts: int, width: int, size: int = _BLOCK) -> list[range]:
    """Cut contexts of `width` coordinates into blocks of about `size` coordinates, of one context at least."""
    stride = max(size // width, 1)
    return [range(start, min(start + stride, contexts)) for start in range(0, contexts, stride)]


def _sampled(rows: int, contexts: int, vocab: int) -> int:
    """Say how many contexts of a block the bounds are averaged over: in all about `_SAMPLE` coordinates."""
    return min(rows, -(-rows * max(_SAMPLE // vocab, 1) // contexts))


def _bracket(target: Floats32, noise: Floats, nodes: int) -> tuple[Floats, int]:
    return weighted_bracket(softmax(target[: len(noise)]), noise / nodes**2), len(noise)


def _side_by_side(work: Any, blocks: Sequence[range], threads: int) -> list[Any]:
    workers = min(threads or len(os.sched_getaffinity(0)), len(blocks))
    if workers == 1:
        return [work(rows) for rows in blocks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, blocks))
