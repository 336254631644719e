"""Theory against something independent: direct formulas, quadrature, Monte Carlo, limit cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fpld import InputError
from fpld.budget import allocators
from fpld.paper import theory
from fpld.paper.simulate import Draw, Truth
from fpld.paper.theory import CUBIC

logit_rows = arrays(np.float64, st.integers(2, 30), elements=st.floats(-20, 20))


@given(logit_rows)
def test_lemma_7_trace_lies_between_its_bounds(logits: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    p = theory.softmax(logits)
    lower, trace, upper = theory.hessian_trace(p)
    assert trace == pytest.approx(np.trace(np.diag(p) - np.outer(p, p)), abs=1e-12)
    assert lower - 1e-12 <= trace <= upper


@given(logit_rows, st.integers(0, 2**32 - 1), st.floats(1e-3, 5))
def test_kl_identity_is_the_definition(
    logits: np.ndarray[tuple[int, ...], np.dtype[np.float64]], seed: int, size: float
) -> None:
    error = np.random.default_rng(seed).normal(0, size, logits.shape)
    log_p = logits - np.logaddexp.reduce(logits)
    log_q = logits + error - np.logaddexp.reduce(logits + error)
    assert theory.kl(logits, error) == pytest.approx(np.sum(np.exp(log_p) * (log_p - log_q)), rel=1e-6, abs=1e-12)
    assert theory.kl(logits, error) >= -1e-15


def test_kl_keeps_its_digits_when_the_error_is_tiny() -> None:
    error = np.array([1.0, -2.0, 0.5])
    p = np.full(3, 1 / 3)
    quadratic = ((error - error @ p) ** 2 @ p) / 2
    for size in (1e-3, 1e-6, 1e-9):
        assert theory.kl(np.zeros(3), size * error) == pytest.approx(size**2 * quadratic, rel=2e-3)


@given(logit_rows, st.integers(0, 2**32 - 1), st.floats(1e-3, 3))
def test_cubic_remainder_constant(
    logits: np.ndarray[tuple[int, ...], np.dtype[np.float64]], seed: int, size: float
) -> None:
    found = theory.expand_kl(logits, np.random.default_rng(seed).uniform(-size, size, logits.shape))
    assert found.exact == pytest.approx(found.quadratic + found.remainder)
    assert abs(found.remainder) <= found.bound + 1e-12


def test_cubic_constant_is_the_extreme_third_moment() -> None:
    """Two points at +-1 with p at one: the third central moment 8 p (1-p) (1-2p) is largest at 8 / (6 sqrt 3)."""
    p = np.linspace(0, 1, 100_001)
    assert pytest.approx((8 * p * (1 - p) * (1 - 2 * p)).max(), rel=1e-6) == CUBIC * 6


def test_largest_error_of_many_is_bounded() -> None:
    """E max^3 of V averaged uniform errors, measured, against the explicit constant."""
    sigma = 0.1
    draws = np.random.default_rng(1).uniform(-1, 1, (400, 4, 256)).mean(axis=1) * sigma * math.sqrt(12)
    measured = CUBIC * (np.abs(draws).max(axis=1) ** 3).mean()
    assert measured < theory.cubic_remainder(sigma**2, 256) < 4 * measured


def test_constants() -> None:
    assert theory.c_q(3.0) == 3.0
    assert theory.c_3(3.0) == 1.5
    assert theory.c_lb(3.0, 0.5) == pytest.approx(0.5 * 9 / 12)
    assert float(theory.reach(2.0, 1.0)) == 3.0


def test_theorem_4_reduces_to_theorem_1() -> None:
    same = theory.heterogeneous_upper([3.0] * 5, [2.0] * 5, vocab=64, samples=1000, contexts=500)
    once = theory.fpld_upper(5, 3.0, 2.0, vocab=64, samples=1000, contexts=500)
    assert same == once
    assert once.bandwidth == pytest.approx(theory.c_3(2.0) / 5 * 2**-6)
    assert once.probe == pytest.approx(math.sqrt(64 * math.log(64 / 0.05) / 500))
    assert once.data == pytest.approx(0.5 / 5000)
    assert once.total == pytest.approx(once.data + once.probe + once.bandwidth)


def test_theorem_2_is_half_the_quadratic_term() -> None:
    lower = theory.matching_lower(4.0, 1.0, vocab=256, c_p=0.9, nodes=4)
    assert lower.bandwidth == pytest.approx(0.9 / (12 * 4) * 2**-8)
    assert lower.bandwidth < theory.fpld_upper(4, 4.0, 1.0, vocab=256).bandwidth
    assert not theory.matching_lower(4.0, 1.0, vocab=256, c_p=0.0, nodes=4).holds


def test_conditions_hold_for_small_errors_and_fail_for_large() -> None:
    assert theory.se(1e-6, 256).holds
    assert not theory.se(1.0, 256).holds
    assert theory.se_prime(1e-6, 256, 0.9).limit == pytest.approx(0.9e-6 / 4)
    assert not theory.se_prime(1e-4, 256, 0.01).holds
    assert theory.nd(theory.softmax(np.zeros((3, 4)))).value == pytest.approx(0.75)


def test_the_bracket_holds_for_random_federations_wherever_its_conditions_do() -> None:
    """Measured bandwidth KL between Theorems 2 and 4, unequal bits and clips; slack for a sampling error of 0.7 %."""
    rng = np.random.default_rng(3)
    tried = 0
    for seed in range(25):
        nodes = int(rng.integers(1, 7))
        bits = rng.uniform(4, 8, nodes)
        clips = rng.uniform(1, 3, nodes)
        target = Truth.draw(contexts=200, vocab=100, seed=seed)
        draw = Draw.make(target, nodes=nodes, seed=seed, samples=math.inf)
        lower = theory.matching_lower(bits, clips, vocab=100, c_p=target.c_p)
        upper = theory.heterogeneous_upper(bits, clips, vocab=100)
        if lower.holds and upper.small_error.holds:
            tried += 1
            assert lower.bandwidth < draw.kl(bits, clips) < upper.bandwidth * 1.03
    assert tried >= 10


def test_theorem_3() -> None:
    one, four = (theory.refinement_upper(4, 2.0, 1.0, t, vocab=256) for t in (1, 4))
    assert one.bandwidth == one.vanilla == four.vanilla
    assert one.bandwidth / four.bandwidth == pytest.approx(16**3)
    assert four.remainder < four.bandwidth
    assert four.small_error.holds


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(-1, 1)), min_size=1, max_size=8),
    st.floats(0, 0.5),
)
def test_lemma_8_transfer(nodes: list[tuple[float, float]], eta: float) -> None:
    weights = np.array([w for w, _ in nodes])
    estimate = weights * (1 + eta * np.array([e for _, e in nodes]))
    total = 64.0 * len(nodes) * 20  # so much that no allocation meets the floor at zero
    best = theory.objective(allocators.optimal(weights, total, 64), weights, 64).total
    plugged = theory.objective(allocators.optimal(estimate, total, 64), weights, 64).total
    assert plugged <= best * theory.transfer(eta) * (1 + 1e-9)


def test_lemma_9_concentration_covers() -> None:
    """At 1 - delta = 0.9, failures of 400 warm-ups stay below 40 + 4 standard deviations."""
    rng = np.random.default_rng(4)
    limits = theory.concentration([1.0, 2.0], 2.0, nodes=2, contexts=20, rounds=2, delta=0.1)
    truth = np.array([1.0, 4.0]) / 3 + np.array([1.0, 4.0]) / 3 / 16
    failures = 0
    for _ in range(400):
        decoded = rng.uniform(-1, 1, (2, 40, 3)) * np.array([1.0, 2.0]).reshape(2, 1, 1)
        decoded += rng.uniform(-0.25, 0.25, decoded.shape) * np.array([1.0, 2.0]).reshape(2, 1, 1)
        failures += bool((np.abs(np.square(decoded).mean(axis=(1, 2)) - truth) > limits).any())
    assert failures <= 40 + 24


def test_corollary_6() -> None:
    found = theory.adaptive_bound([0.3, 5.0], [1.0, 4.0], 2.0, contexts=10**6)
    reach = 4 * 1.25
    assert found.c_ad == pytest.approx(3 * reach**2 / 0.3 * math.sqrt((math.log(2) + 1) / 2))
    assert found.bound == pytest.approx(1 + found.c_ad * math.sqrt(math.log(40) / 10**6))
    assert 1 < found.direct < found.bound
    assert found.valid
    assert not theory.adaptive_bound([0.3, 5.0], [1.0, 4.0], 2.0, contexts=10).valid


def test_theorem_5_optimum_is_the_objective_at_the_optimum() -> None:
    weights = [1.0, 1.0, 16.0, 16.0]
    bits = allocators.optimal(weights, 4096, 256)
    assert theory.objective(bits, weights, 256).total == pytest.approx(theory.allocation_optimum(weights, 4096, 256))
    assert theory.objective(bits, weights, 256).terms.shape == (4,)


def test_bad_numbers_are_refused() -> None:
    for call, message in [
        (lambda: theory.c_q(0.0), "clip"),
        (lambda: theory.mean_variance([1.0, 2.0], 1.0, nodes=3), "3 nodes"),
        (lambda: theory.mean_variance(-1.0, 1.0), "bits"),
        (lambda: theory.transfer(0.6), "eta"),
        (lambda: theory.fpld_upper(4, 4.0, 1.0, vocab=256, delta=1.5), "delta"),
        (lambda: theory.refinement_upper(4, 2.0, 1.0, 0, vocab=256), "rounds"),
        (lambda: theory.adaptive_bound([1.0, -1.0], 1.0, 2.0, contexts=10), "weights"),
    ]:
        with pytest.raises(InputError, match=message):
            call()
