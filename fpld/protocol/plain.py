"""The plain way to combine: nodes are streams of decoded blocks, and the rule takes a block node by node.

It serves every codec, every rule and every observer; the fast ways in `fpld.protocol.ways` give the same. Memory is
that of the result and of a few blocks, whatever the number of nodes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.numerics import softmax, split
from fpld.protocol.replies import Piece, Sample, bracket
from fpld.rules.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fpld.protocol.replies import Observer, Replies
    from fpld.types import Decoded

    Floats32 = np.ndarray[Any, np.dtype[np.float32]]

_BLOCK = 1 << 20  # coordinates that a thread works on at a time


def plain(replies: Replies, observer: Observer, threads: int) -> tuple[Callable[[], Target], Iterator[Piece]]:
    """Return a function that makes the target once all pieces were taken, and the pieces in order of contexts."""
    target = np.empty(replies.shape, np.float32)
    contexts, vocab = replies.shape
    blocks = split(contexts, vocab * (len(replies.plans) if replies.rule.traits.needs_all else 1), _BLOCK)
    pairs = zip(replies.payloads, replies.plans, strict=True)
    readers = [replies.codec.reader(payload, plan) for payload, plan in pairs]
    if not replies.codec.traits.seeks:
        streams = [reader.blocks(blocks) for reader in readers]
        return partial(Target.dense, target), (
            _apply(replies, observer, target, rows, (next(s) for s in streams)) for rows in blocks
        )

    def work(rows: range) -> Piece:
        found = (block for reader in readers for block in reader.blocks([rows]))
        return _apply(replies, observer, target, rows, found)

    return partial(Target.dense, target), side_by_side(work, blocks, threads)


def _apply(replies: Replies, observer: Observer, target: Floats32, rows: range, nodes: Iterable[Decoded]) -> Piece:
    """Apply the rule to a block, node by node."""
    count, vocab = len(replies.plans), target.shape[1]
    contexts = replies.sampled()
    contexts = contexts[(contexts >= rows.start) & (contexts < rows.stop)]
    some, work = contexts - rows.start, replies.rule.start((len(rows), vocab))
    noise, noise_of, squares = np.zeros((some.size, vocab)), np.zeros(count), np.zeros(count)
    seen = np.empty((2, count, some.size, vocab) if observer.samples else 0, np.float32)
    for k, node in enumerate(nodes):
        decoded = _absolute(replies, k, rows, node)
        values, variance = decoded.values, np.asarray(decoded.variance, np.float32)
        work.add(decoded)
        # What a codec estimates is what it is noisy in: sampled labels are probabilities, values their logarithms.
        own = variance if decoded.chances is None else variance * np.exp(2 * values)
        noise_of[k] = own.sum(axis=-1).sum(dtype=np.float64) * (values.size / own.size)
        noise += np.broadcast_to(variance, values.shape)[some]
        if observer.squares:
            squares[k] = np.square(values, dtype=np.float64).sum()
        if observer.samples:
            seen[0, k], seen[1, k] = values[some], np.broadcast_to(variance, values.shape)[some]
    target[rows.start : rows.stop] = work.result()
    found = target[contexts]
    sample = None
    if observer.samples and some.size:
        sample = Sample(contexts, seen[0], seen[1], softmax(found), replies.prior(rows, some))
    if replies.codec.traits.sparse:
        return Piece(noise_of, squares, np.zeros(2), 0, sample)  # no bounds of the paper's are about such a channel
    return Piece(noise_of, squares, bracket(found, noise / count**2), some.size, sample)


def _absolute(replies: Replies, k: int, rows: range, decoded: Decoded) -> Decoded:
    """Add what the node coded against, and keep the sum."""
    values = decoded.values.astype(np.float32, copy=False)
    if not replies.own:
        return decoded._replace(values=values)
    part = replies.own[k][rows.start : rows.stop]
    part += values
    return decoded._replace(values=part)


def side_by_side(work: Callable[[range], Piece], blocks: Sequence[range], threads: int) -> Iterator[Piece]:
    """Work on blocks on threads; return results in the order of the blocks."""
    workers = min(threads, len(blocks))
    if workers == 1:
        yield from map(work, blocks)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(work, blocks)
