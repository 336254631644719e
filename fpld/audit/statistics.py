"""What scores of included and of left out canaries say: AUC, true positives at few false ones, a bound on epsilon.

The bound is that of Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (2023): many canaries,
each in or out by a fair coin of its own, in a single run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.errors import MissingExtraError

try:
    from scipy.stats import beta, binom
except ImportError as error:
    raise MissingExtraError("an audit", "privacy") from error

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

CONFIDENCE = 0.95
SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the canaries about which a guess is made
_TWO_SIDED = 1.959963984540054  # normal quantile of 0.975


class Estimate(NamedTuple):
    """A value with its interval of 95 %."""

    value: float
    low: float
    high: float


def auc(scores: Array, included: Array) -> Estimate:
    """Return the chance that an included canary scores higher than one left out, ties counting half.

    The interval is that of DeLong et al. (1988).
    """
    inside, outside = scores[included], scores[~included]
    above = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)
    value = float(above.mean())
    variance = above.mean(axis=1).var(ddof=1) / len(inside) + above.mean(axis=0).var(ddof=1) / len(outside)
    half = _TWO_SIDED * math.sqrt(variance)
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


def true_positives(scores: Array, included: Array, rate: float = 0.01) -> Estimate:
    """Return the share of included canaries that score above all but a share `rate` of those left out.

    The interval is that of Clopper and Pearson (1934), for the threshold as it is.
    """
    inside, outside = scores[included], np.sort(scores[~included])[::-1]
    threshold = outside[int(rate * len(outside))]
    count, total = int((inside > threshold).sum()), len(inside)
    tail = (1 - CONFIDENCE) / 2
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return Estimate(count / total, low, high)


def epsilon_bound(scores: Array, included: Array, delta: float, *, seed: int) -> float:
    """Return an epsilon that the training exceeds with 95 % confidence, whatever it promises; 0 says nothing.

    Of the canaries with the highest scores it is guessed that they are in, of as many with the lowest that they are
    out; of how many is tried in four ways, each at a quarter of the error. `seed` breaks ties.
    """
    total = len(scores)
    order = np.lexsort((np.random.default_rng(seed).random(total), scores))
    found = 0.0
    for share in SHARES:
        half = int(share * total) // 2
        right = int(included[order[total - half :]].sum()) + int((~included[order[:half]]).sum())
        error = (1 - CONFIDENCE) / len(SHARES)
        found = max(found, _largest(total, 2 * half, right, delta, error))
    return found


def guessing_chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the chance of so many right guesses under (epsilon, delta)-differential privacy (their Theorem 5.2)."""
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    chance = float(binom.sf(right - 1, guesses, rate))
    steps = np.arange(1, right + 1)
    sums = np.cumsum(binom.pmf(right - steps, guesses, rate))
    worst = float((sums / steps).max()) if right else 0.0
    return min(chance + 2.0 * canaries * delta * worst, 1.0)


def _largest(canaries: int, guesses: int, right: int, delta: float, error: float) -> float:
    """Return the largest epsilon under which so many right guesses are less likely than `error`."""
    if not guesses or guessing_chance(canaries, guesses, right, 0.0, delta) >= error:
        return 0.0
    low, high = 0.0, 1.0
    while guessing_chance(canaries, guesses, right, high, delta) < error and high < 64:
        low, high = high, 2 * high
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if guessing_chance(canaries, guesses, right, middle, delta) < error else (low, middle)
        )
    return low
