"""Labels that are optimised against the guarded mixture: the most harm within the distances that its audit allows.

The attacker knows the code, the student's prediction, the honest nodes' mean labels, or only its own, and how far from
them a node may be in each view of the audit (`Reach`). It climbs along the gradient of the loss of the mixture that it
is part of, in all contexts together:

    maximize   mean_c sum_v -h log((1 - w) h + w q)      h: the honest mean, q: its labels, w: the attackers' share
    subject to |q - h| within reach in every view        plain and relative, by context, in the mean, and by last token

q is a softmax, so labels are probabilities and nothing shows in their sums. What is beyond reach is paid for by a
penalty; `benchmarks.byzantine` then goes from h towards q as far as the audit itself allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import sparse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.types import Array

STEPS = 40
RATE = 0.3  # of Adam, in nats
PENALTY = 3.0  # nats for a view in which the square is twice what it may be
_TINY = 1e-9
_DECAY = (0.8, 0.95)


class Reach(NamedTuple):
    """The squared distances from the honest mean that an attacker may have, by context and of the mean over contexts.

    `relative_each` and `relative_whole` are of differences divided by sqrt(pi + 1/V), `after` [groups] of relative
    means over the contexts that end with a token.
    """

    each: float
    whole: float
    relative_each: float
    relative_whole: float
    after: Array


@dataclass(frozen=True, eq=False)
class Scales:
    """What differences are divided by, and which contexts are averaged together."""

    divisors: Array  # sqrt(pi + 1/V), [n, V]
    groups: sparse.csr_array  # [groups, n], each row a mean

    @classmethod
    def of(cls, prior: Array, last: Array) -> Scales:
        """Return those of a prior's probabilities [n, V] and contexts that end with tokens `last` [n]."""
        contexts, vocab = prior.shape
        counts = np.maximum(np.bincount(last, minlength=vocab), 1)
        shares = (1 / counts[last]).astype(np.float32)
        groups = sparse.csr_array((shares, (last, np.arange(contexts))), shape=(vocab, contexts))
        return cls(np.sqrt(prior + 1 / vocab, dtype=np.float32), groups)


def half_reach(reach: Reach) -> Reach:
    """Return the reach of half the distances."""
    each, whole, relative_each, relative_whole, after = reach
    return Reach(each / 4, whole / 4, relative_each / 4, relative_whole / 4, after / 4)


def reach_of(honest: Sequence[Array], scales: Scales, factor: float) -> Reach:
    """Return `factor` times the median honest node's distances to the honest mean, squared."""
    middle = np.mean(honest, axis=0)
    squares = [_squares(labels - middle, scales) for labels in honest]
    medians = (np.median([each[view] for each in squares], axis=0) * factor**2 for view in range(5))
    each, whole, relative_each, relative_whole, after = medians
    return Reach(float(each), float(whole), float(relative_each), float(relative_whole), after)


def worst_labels(honest: Array, scales: Scales, reach: Reach, weight: float) -> Array:
    """Return the labels [n, V] that do most harm to a mixture with the honest mean, in which they have this weight."""
    logits = np.log(np.maximum(honest, _TINY)).astype(np.float32)
    first = np.zeros_like(logits)
    second = np.zeros_like(logits)
    for step in range(1, STEPS + 1):
        labels = _softmax(logits)
        slope = -weight * honest / np.maximum((1 - weight) * honest + weight * labels, _TINY)
        slope -= _penalty_slope(labels - honest, scales, reach)
        slope = labels * (slope - (labels * slope).sum(axis=1, keepdims=True))
        # Adam: each label's own scale, since the gradients of rare tokens are small.
        first += (1 - _DECAY[0]) * (slope - first)
        second += (1 - _DECAY[1]) * (slope * slope - second)
        mean = first / (1 - _DECAY[0] ** step)
        size = np.sqrt(second / (1 - _DECAY[1] ** step))
        logits += RATE * mean / np.maximum(size, 1e-12)
    return _softmax(logits)


def _squares(differences: Array, scales: Scales) -> tuple[float, float, float, float, Array]:
    """Return the squares of differences [n, V] in every view."""
    relative = differences / scales.divisors
    return (
        float(np.square(differences).sum(axis=1).mean()),
        float(np.square(differences.mean(axis=0)).sum()),
        float(np.square(relative).sum(axis=1).mean()),
        float(np.square(relative.mean(axis=0)).sum()),
        np.square(scales.groups @ relative).sum(axis=1),
    )


def _penalty_slope(differences: Array, scales: Scales, reach: Reach) -> Array:
    """Return the gradient of the penalty, times the number of contexts, so that it is of each context's own loss.

    The penalty of a view is `PENALTY` (square / reach - 1)^2 beyond reach, and of groups by their share of contexts.
    """
    contexts = len(differences)
    each, whole, relative_each, relative_whole, after = _squares(differences, scales)
    slope = 2 * _price(each, reach.each) * differences
    slope += 2 * _price(whole, reach.whole) * differences.mean(axis=0)
    relative = differences / scales.divisors
    inner = 2 * _price(relative_each, reach.relative_each) * relative
    inner += 2 * _price(relative_whole, reach.relative_whole) * relative.mean(axis=0)
    sizes = np.diff(scales.groups.indptr) / contexts
    prices = _price(after, np.maximum(reach.after, _TINY)) * sizes
    means = scales.groups @ relative
    inner += 2 * contexts * (scales.groups.T @ (prices[:, None] * means).astype(np.float32))
    return np.asarray(slope + inner / scales.divisors)


def _price(square: Array | float, reach: Array | float) -> Array:
    """Return the derivative of a view's penalty by its square."""
    excess = np.maximum(np.asarray(square) / reach - 1, 0)
    return np.asarray(2 * PENALTY * excess / reach)


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
