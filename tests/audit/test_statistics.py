"""What an audit concludes from scores: against mechanisms whose epsilon is known, and against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fpld.audit.statistics import auc, epsilon_bound, guess_probability_bound, true_positive_rate

ALARM = 1e-6


def responses(epsilon: float, canaries: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Score canaries by randomized response: pure differential privacy with exactly this epsilon."""
    rng = np.random.default_rng(seed)
    included = rng.random(canaries) < 0.5
    truthful = rng.random(canaries) < 1 / (1 + math.exp(-epsilon))
    return np.where(truthful, included, ~included).astype(float), included


@pytest.mark.parametrize("epsilon", [0.5, 1.5, 3.0])
def test_the_bound_holds_and_is_near_for_randomized_response(epsilon: float) -> None:
    """It may fail in 5 % of the trials: more than the binomial's upper end at a false-alarm rate of 1e-6 is a bug."""
    trials = 40
    bounds = [epsilon_bound(*responses(epsilon, 1000, seed), 0.0, seed=seed) for seed in range(trials)]
    assert sum(bound > epsilon for bound in bounds) <= stats.binom.isf(ALARM, trials, 0.05)
    assert 0.5 * epsilon < np.mean(bounds) < epsilon


def test_the_bound_holds_for_the_gaussian_mechanism() -> None:
    """Canaries summed by themselves under noise: an epsilon of 2 at delta 1e-5 takes a noise of 1.93."""
    noise = 1.93
    delta = 1e-5
    trials = 20
    over = 0
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        included = rng.random(2000) < 0.5
        over += epsilon_bound(included + noise * rng.normal(size=2000), included, delta, seed=seed) > 2.0
    assert over <= stats.binom.isf(ALARM, trials, 0.05)


def test_without_delta_the_chance_is_binomial_and_delta_adds_to_it() -> None:
    for right in (0, 30, 60):
        expected = stats.binom.sf(right - 1, 60, 1 / (1 + math.exp(-1.0)))
        assert guess_probability_bound(200, 60, right, 1.0, 0.0) == pytest.approx(expected)
        assert guess_probability_bound(200, 60, right, 1.0, 1e-3) >= expected
    assert guess_probability_bound(200, 60, 60, 2.0, 1e-5) > guess_probability_bound(200, 60, 60, 1.0, 1e-5)


def test_a_bound_says_nothing_where_nothing_is_known() -> None:
    rng = np.random.default_rng(0)
    assert epsilon_bound(np.zeros(400), rng.random(400) < 0.5, 1e-5, seed=1) == 0.0
    perfect = rng.random(400) < 0.5
    assert epsilon_bound(perfect.astype(float), perfect, 1e-5, seed=1) > 3.5


def test_auc_is_that_of_mann_and_whitney() -> None:
    rng = np.random.default_rng(1)
    scores = np.round(rng.normal(size=200), 1)
    included = rng.random(200) < 0.5
    expected = stats.mannwhitneyu(scores[included], scores[~included]).statistic
    estimate = auc(scores, included)
    assert estimate.value == pytest.approx(expected / included.sum() / (~included).sum())
    assert estimate.low < estimate.value < estimate.high


def test_the_interval_of_the_auc_covers_it() -> None:
    """Two normals one deviation apart: coverage of 95 %, within the binomial at a false-alarm rate of 1e-6."""
    true = stats.norm.cdf(1 / math.sqrt(2))
    trials = 200
    covered = 0
    rng = np.random.default_rng(2)
    for _ in range(trials):
        included = np.arange(160) < 80
        estimate = auc(rng.normal(size=160) + included, included)
        covered += estimate.low <= true <= estimate.high
    low, high = stats.binom.ppf([ALARM, 1 - ALARM], trials, 0.95)
    assert low <= covered <= high


def test_true_positives_are_counted_above_the_hundredth_of_the_others() -> None:
    scores = np.concatenate((np.arange(200.0), [198.5, 198.5, 100.0, 250.0]))
    included = np.arange(204) >= 200
    rate = true_positive_rate(scores, included)  # of 200 two may be above: the threshold is 197
    assert rate.value == pytest.approx(3 / 4)
    exact = stats.binomtest(3, 4).proportion_ci(method="exact")
    assert (rate.low, rate.high) == pytest.approx((exact.low, exact.high))
    assert true_positive_rate(-scores, included)[:2] == (0.0, 0.0)
