"""Fast ways to combine, for pairs of a codec and a rule: each gives what the plain way gives.

A way for another pair is one more entry of `WAYS`, and one more row of the test that holds it to the plain way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fpld import compiled
from fpld.codecs.predictive.codec import PREDICTIVE
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.uniform.codec import UNIFORM
from fpld.numerics import softmax, split
from fpld.protocol.plain import side_by_side
from fpld.protocol.replies import Piece, Sample, bracket
from fpld.rules import MEAN, MIXTURE
from fpld.rules.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fpld.codecs import Codec
    from fpld.codecs.samples.reader import Sparse
    from fpld.protocol.replies import Observer, Replies
    from fpld.rules import Rule
    from fpld.types import Floats, Ints

_BLOCK = 1 << 22  # coordinates that a thread works on at a time, node by node within a context


@dataclass(frozen=True, slots=True)
class Way:
    """A fast way, and whom it can serve.

    `run` combines on so many threads: it returns a function that makes the target once all pieces were taken, and the
    pieces in order of contexts. `samples`, `squares`: observers that want those. `one_prior`: the plans must share one
    prior. `kernels`: there is nothing without numba. `weights`: nodes may count unequally. None serves sequential
    refinement.
    """

    run: Callable[[Replies, Observer, int], tuple[Callable[[], Target], Iterator[Piece]]]
    samples: bool = False
    squares: bool = False
    one_prior: bool = False
    kernels: bool = False
    weights: bool = False

    def serves(self, replies: Replies, observer: Observer) -> bool:
        """Return whether these replies can be combined for this observer."""
        asked = (observer.samples and not self.samples) or (observer.squares and not self.squares)
        apart = self.one_prior and any(plan.prior is not replies.plans[0].prior for plan in replies.plans)
        unequal = bool(replies.rule.traits.weights) and not self.weights
        return not (asked or apart or unequal or replies.own or (self.kernels and not compiled.available()))


def fast_way(ways: Mapping[tuple[Codec, Rule], Way], replies: Replies, observer: Observer) -> Way | None:
    """Return the way for these replies and this observer, if there is one; codecs and rules need no hash."""
    for (codec, rule), way in ways.items():
        if codec == replies.codec and rule == replies.rule and way.serves(replies, observer):
            return way
    return None


def _uniform(
    replies: Replies,
    observer: Observer,  # noqa: ARG001  # the form of all ways
    threads: int,
) -> tuple[Callable[[], Target], Iterator[Piece]]:
    """Decode and add in one pass."""
    from fpld.codecs.uniform import fast  # brings numba along

    target, count, contexts = np.empty(replies.shape, np.float32), len(replies.plans), replies.sampled()

    def work(rows: range) -> Piece:
        some = contexts[(contexts >= rows.start) & (contexts < rows.stop)]
        total, noise = target[rows.start : rows.stop], np.zeros((some.size, target.shape[1]))
        total[:] = 0
        noise_of = fast.add(replies.payloads, replies.plans, rows, total, some - rows.start, noise)
        total /= np.float32(count)
        return Piece(noise_of, np.zeros(count), bracket(target[some], noise / count**2), some.size)

    # What ranges and steps of float16 decode to is finite.
    return partial(Target.trusted, target), side_by_side(work, split(*replies.shape, _BLOCK), threads)


def _predictive(
    replies: Replies, observer: Observer, threads: int, *, mixture: bool
) -> tuple[Callable[[], Target], Iterator[Piece]]:
    """Add up what nodes sent beside zeros, which they share; for a `mixture`, their probabilities."""
    from fpld.codecs.predictive.adding import add_up  # brings numba along

    target, count = np.empty(replies.shape, np.float32), len(replies.plans)

    def parts() -> Iterator[Piece]:
        for part in add_up(replies.payloads, replies.plans, replies.sampled(), mixture, threads):
            rows, some = part.rows, part.sampled
            mean = (part.total / count).astype(np.float32)
            target[rows.start : rows.stop] = np.log(mean) if mixture else mean
            bounds = bracket(target[some], part.variance.sum(axis=0, dtype=np.float64) / count**2)
            sample = None
            if observer.samples and some.size:
                prior = replies.prior(rows, some - rows.start)
                sample = Sample(some, part.values, part.variance, softmax(target[some]), prior)
            yield Piece(part.noise, np.zeros(count), bounds, some.size, sample)

    return partial(Target.dense, target), parts()


def _samples(
    replies: Replies,
    observer: Observer,  # noqa: ARG001  # the form of all ways
    threads: int,  # noqa: ARG001
) -> tuple[Callable[[], Target], Iterator[Piece]]:
    """Add up what labels change of the prior; of all coordinates only a block of the prior is held."""
    from fpld.codecs.samples.reader import sparse_together  # brings numba along

    count, vocab = len(replies.plans), replies.shape[1]
    weights = np.array(replies.rule.traits.weights or [1.0] * count)
    found: list[tuple[Ints, ...]] = []

    def parts() -> Iterator[Piece]:
        pairs = zip(replies.payloads, replies.plans, strict=True)
        readers = [SAMPLES.reader(payload, plan) for payload, plan in pairs]
        for blocks in sparse_together(readers):
            counts, tokens, changes = _joined(blocks, weights)
            found.append((counts, tokens, (changes / weights.sum()).astype(np.float32)))
            yield Piece(np.array([block.noise for block in blocks]), np.zeros(count), np.zeros(2), 0)

    def finish() -> Target:
        counts, tokens, changes = (np.concatenate(part) for part in zip(*found, strict=True))
        starts = np.concatenate([[0], np.cumsum(counts)])
        return Target.sparse(starts, tokens, changes, vocab=vocab)

    return finish, parts()


def _joined(blocks: Sequence[Sparse], weights: Floats) -> tuple[Ints, ...]:
    """Return all nodes' weighted changes by context: how many there are in each, their tokens, and they, added up."""
    counts = [np.diff(block.starts) for block in blocks]
    rows = np.concatenate([np.repeat(np.arange(len(own)), own) for own in counts])
    tokens = np.concatenate([block.tokens for block in blocks])
    changes = np.concatenate([w * block.changes for w, block in zip(weights, blocks, strict=True)])
    order = np.lexsort((tokens, rows))
    rows, tokens, changes = rows[order], tokens[order], changes[order]
    first = np.ones(len(rows), bool)
    first[1:] = (np.diff(rows) != 0) | (np.diff(tokens) != 0)
    places = np.flatnonzero(first)
    added = np.add.reduceat(changes, places) if places.size else changes
    return np.bincount(rows[places], minlength=len(counts[0])), tokens[places], added


WAYS: Mapping[tuple[Codec, Rule], Way] = {
    (UNIFORM, MEAN): Way(_uniform, kernels=True),
    (PREDICTIVE, MEAN): Way(partial(_predictive, mixture=False), samples=True, one_prior=True),
    (PREDICTIVE, MIXTURE): Way(partial(_predictive, mixture=True), samples=True, one_prior=True),
    (SAMPLES, MIXTURE): Way(_samples, one_prior=True, weights=True),
}
