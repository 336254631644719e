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
from fpld.codecs.uniform.codec import UNIFORM
from fpld.numerics import softmax, split
from fpld.protocol.plain import side_by_side
from fpld.protocol.replies import Part, Sample, bracket
from fpld.rules import MEAN, MIXTURE, PRECISION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fpld.codecs import Codec
    from fpld.protocol.replies import Observer, Replies, Target
    from fpld.rules import Rule

    Run = Callable[[Replies, Observer, int], tuple[Target, Iterator[Part]]]

_BLOCK = 1 << 22  # coordinates that a thread works on at a time, node by node within a context


@dataclass(frozen=True, slots=True)
class Way:
    """A fast way, and whom it can serve.

    `run` combines on so many threads: it returns the target, which is whole once all parts were taken, and the parts in
    the order of their contexts. `samples`, `squares`: observers that want those. `one_prior`: the plans must share one
    prior. `kernels`: there is nothing without numba. None serves sequential refinement.
    """

    run: Run
    samples: bool = False
    squares: bool = False
    one_prior: bool = False
    kernels: bool = False

    def serves(self, replies: Replies, observer: Observer) -> bool:
        """Return whether these replies can be combined for this observer."""
        asked = (observer.samples and not self.samples) or (observer.squares and not self.squares)
        apart = self.one_prior and any(plan.prior is not replies.plans[0].prior for plan in replies.plans)
        return not (asked or apart or replies.own or (self.kernels and not compiled.available()))


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
    *,
    weighted: bool,
) -> tuple[Target, Iterator[Part]]:
    """Decode and add in one pass; `weighted` by the inverse of the variance."""
    from fpld.codecs.uniform import fast  # brings numba along

    target, count, contexts = np.empty(replies.shape, np.float32), len(replies.plans), replies.sampled()

    def work(rows: range) -> Part:
        some = contexts[(contexts >= rows.start) & (contexts < rows.stop)]
        total, noise = target[rows.start : rows.stop], np.zeros((some.size, target.shape[1]))
        total[:] = 0
        weights = np.zeros(total.shape) if weighted else None
        noise_of = fast.add(replies.payloads, replies.plans, rows, total, some - rows.start, noise, weights)
        total /= np.float32(count) if weights is None else weights.astype(np.float32)
        return Part(noise_of, np.zeros(count), bracket(target[some], noise / count**2), some.size)

    return target, side_by_side(work, split(*replies.shape, _BLOCK), threads)


def _predictive(replies: Replies, observer: Observer, threads: int, *, mixture: bool) -> tuple[Target, Iterator[Part]]:
    """Add up what nodes sent beside zeros, which they share; for a `mixture`, their probabilities."""
    from fpld.codecs.predictive.adding import add_up  # brings numba along

    target, count = np.empty(replies.shape, np.float32), len(replies.plans)

    def parts() -> Iterator[Part]:
        for part in add_up(replies.payloads, replies.plans, replies.sampled(), mixture, threads):
            rows, some = part.rows, part.sampled
            mean = (part.total / count).astype(np.float32)
            target[rows.start : rows.stop] = np.log(mean) if mixture else mean
            bounds = bracket(target[some], part.variance.sum(axis=0, dtype=np.float64) / count**2)
            sample = None
            if observer.samples and some.size:
                prior = replies.prior(rows, some - rows.start)
                sample = Sample(some, part.values, part.variance, softmax(target[some]), prior)
            yield Part(part.noise, np.zeros(count), bounds, some.size, sample)

    return target, parts()


WAYS: Mapping[tuple[Codec, Rule], Way] = {
    (UNIFORM, MEAN): Way(partial(_uniform, weighted=False), kernels=True),
    (UNIFORM, PRECISION): Way(partial(_uniform, weighted=True), kernels=True),
    (PREDICTIVE, MEAN): Way(partial(_predictive, mixture=False), samples=True, one_prior=True),
    (PREDICTIVE, MIXTURE): Way(partial(_predictive, mixture=True), samples=True, one_prior=True),
}
