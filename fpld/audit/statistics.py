"""Statistics of canaries' scores: AUC, true positives at few false ones, and a lower bound of epsilon.

The bound is that of Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (2023): many canaries,
each in or out by a fair coin of its own, in a single run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.errors import MissingExtraError

try:
    from scipy.stats import beta, binom
except ImportError as error:
    raise MissingExtraError("an audit", "privacy") from error

if TYPE_CHECKING:
    from fpld.types import Array

CONFIDENCE = 0.95
GUESSED_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the canaries
_NORMAL_QUANTILE = 1.959963984540054  # of 0.975
_MAX_EPSILON = 64.0
_BISECTION_STEPS = 24


class Estimate(NamedTuple):
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def auc(scores: Array, included: Array) -> Estimate:
    """Return the probability that an included canary scores higher than an excluded one, ties counting half.

    The interval is that of DeLong et al. (1988).
    """
    inside = scores[included]
    outside = scores[~included]
    above = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)
    value = float(above.mean())
    variance = above.mean(axis=1).var(ddof=1) / len(inside) + above.mean(axis=0).var(ddof=1) / len(outside)
    half = _NORMAL_QUANTILE * math.sqrt(variance)
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


def true_positive_rate(scores: Array, included: Array, rate: float = 0.01) -> Estimate:
    """Return the share of included canaries that score above all but a share `rate` of the excluded ones.

    The interval is that of Clopper and Pearson (1934) for a fixed threshold.
    """
    inside = scores[included]
    outside = np.sort(scores[~included])[::-1]
    threshold = outside[int(rate * len(outside))]
    count = int((inside > threshold).sum())
    total = len(inside)
    tail = (1 - CONFIDENCE) / 2
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return Estimate(count / total, low, high)


def epsilon_bound(scores: Array, included: Array, delta: float, *, seed: int) -> float:
    """Return an epsilon that the training exceeds with 95 % confidence; 0 if nothing can be said.

    The attacker guesses that the canaries with the highest scores are in, and as many with the lowest are out. Each of
    the `GUESSED_SHARES` is tried at its part of the error. `seed` breaks ties.
    """
    total = len(scores)
    order = np.lexsort((np.random.default_rng(seed).random(total), scores))
    error = (1 - CONFIDENCE) / len(GUESSED_SHARES)
    bound = 0.0
    for share in GUESSED_SHARES:
        half = int(share * total) // 2
        right = int(included[order[total - half :]].sum()) + int((~included[order[:half]]).sum())
        bound = max(bound, _largest_rejected_epsilon(total, 2 * half, right, delta, error))
    return bound


def guess_probability_bound(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of `right` or more right guesses under (epsilon, delta)-privacy (their Theorem 5.2)."""
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    chance = float(binom.sf(right - 1, guesses, rate))
    steps = np.arange(1, right + 1)
    sums = np.cumsum(binom.pmf(right - steps, guesses, rate))
    worst = float((sums / steps).max()) if right else 0.0
    return min(chance + 2.0 * canaries * delta * worst, 1.0)


def _largest_rejected_epsilon(canaries: int, guesses: int, right: int, delta: float, error: float) -> float:
    """Return the largest epsilon under which so many right guesses are less likely than `error`."""
    if not guesses or guess_probability_bound(canaries, guesses, right, 0.0, delta) >= error:
        return 0.0
    low = 0.0
    high = 1.0
    while guess_probability_bound(canaries, guesses, right, high, delta) < error and high < _MAX_EPSILON:
        low = high
        high = 2 * high
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        if guess_probability_bound(canaries, guesses, right, middle, delta) < error:
            low = middle
        else:
            high = middle
    return low
