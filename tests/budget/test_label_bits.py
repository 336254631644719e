"""Bits for sampled labels: the closed form, a SciPy solver, contexts against bits, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from fpld import BudgetError, InputError
from fpld.budget import allocators
from fpld.budget.allocators import optimal_samples, square_root
from fpld.paper.theory import label_gain, label_objective, label_optimum
from fpld.planner.contexts import DEMONSTRATION, LABEL_OVERHEAD_BITS, LossModel, LossPoint, best_contexts, fit_loss
from fpld.registry import allocators as registered

MODEL = LossModel(floor=3.4, breadth=900.0, steps=0.5, labels=3e4, overhead=LABEL_OVERHEAD_BITS, rms=0.0)


def instance(rng: np.random.Generator) -> dict[str, Any]:
    """Return a random feasible instance: weights and costs over decades, some caps, some floors, some ties."""
    nodes = int(rng.integers(1, 12))
    weights = np.ones(nodes) if rng.random() < 0.1 else np.exp(rng.normal(0, 2, nodes))
    costs = np.ones(nodes) if rng.random() < 0.3 else np.exp(rng.normal(0, 1, nodes))
    floors = rng.uniform(0, 30, nodes) * (rng.random(nodes) < 0.5)
    caps = floors + rng.exponential(40, nodes)
    caps[rng.random(nodes) < 0.3] = np.inf
    least = float((costs * floors).sum())
    most = float((costs * caps).sum()) if np.isfinite(caps).all() else least + 60 * float(costs.sum())
    where = rng.choice([0.02, 1.0, rng.uniform(0.02, 1)], p=[0.05, 0.05, 0.9])
    return {
        "weights": weights,
        "total": min(max(least + (most - least) * where, 1e-3), most),
        "costs": costs,
        "caps": caps,
        "floors": floors,
    }


def test_kkt_conditions_on_1000_random_instances() -> None:
    """One price for all nodes in between, no more at a floor, no less at a cap: this proves optimality."""
    rng = np.random.default_rng(2)
    for _ in range(1000):
        case = instance(rng)
        found = optimal_samples(**case)
        assert case["costs"] @ found == pytest.approx(case["total"], rel=1e-9)
        near = 1e-9 * max(case["total"], 1)
        low = found <= case["floors"] + near
        high = found >= case["caps"] - near
        assert (found >= case["floors"] - near).all()
        assert (found <= case["caps"] + near).all()
        price = case["weights"] / (case["costs"] * found**2)
        free = ~low & ~high
        if free.any():
            level = np.median(price[free])
            assert np.abs(price[free] / level - 1).max() < 1e-6
            assert (price[low & ~high] <= level * (1 + 1e-6)).all()
            assert (price[high & ~low] >= level * (1 - 1e-6)).all()


def scipy_noise(case: dict[str, Any]) -> tuple[float, bool]:
    """Solve the same problem by SLSQP, in logarithms of shares of the total; its sum, and whether it converged."""
    scale = case["total"] / case["costs"]
    weights = case["weights"] / scale
    high = np.minimum(case["caps"] / scale, 1.0)
    low = np.maximum(case["floors"] / scale, 1e-5 * high)
    start = low + (high - low) * (1 - low.sum()) / max((high - low).sum(), 1e-300)
    unit = float((weights / start).sum())
    found = optimize.minimize(
        lambda y: float((weights * np.exp(-y)).sum()) / unit,
        np.log(start),
        jac=lambda y: -weights * np.exp(-y) / unit,
        bounds=list(zip(np.log(low), np.log(high), strict=True)),
        constraints={"type": "eq", "fun": lambda y: np.exp(y).sum() - 1, "jac": np.exp},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    return float(found.fun * unit), bool(found.success and abs(np.exp(found.x).sum() - 1) < 1e-8)


@pytest.mark.slow
def test_no_worse_than_a_scipy_solver_on_1000_random_instances() -> None:
    rng = np.random.default_rng(3)
    agreed = 0
    for _ in range(1000):
        case = instance(rng)
        ours = float((case["weights"] / optimal_samples(**case)).sum())
        theirs, converged = scipy_noise(case)
        if converged:
            assert ours <= theirs * (1 + 1e-5)
            agreed += ours == pytest.approx(theirs, rel=1e-4)
    assert agreed > 900


def test_closed_form_without_limits() -> None:
    weights = np.array([0.5, 3.0, 7.0])
    total = 500.0
    bits = square_root(weights, total, vocab=300)
    assert bits == pytest.approx(total * np.sqrt(weights) / np.sqrt(weights).sum())
    best = label_objective(bits, weights).total
    assert best == pytest.approx(label_optimum(weights, total))
    even = label_objective(allocators.uniform(weights, total, 300), weights).total
    assert even / best == pytest.approx(label_gain(weights))
    assert label_objective(total * weights / weights.sum(), weights).total == pytest.approx(even)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_the_gain_lies_between_one_and_the_number_of_nodes(weights: list[float]) -> None:
    assert 1 - 1e-12 <= label_gain(weights) <= len(weights) * (1 + 1e-12)


def test_it_is_an_allocator_by_name() -> None:
    assert registered.get("square-root") is square_root
    bits = registered.get("square-root")([1, 4], 30, 8, [100, 15], [12, 0])
    assert bits.tolist() == [15.0, 15.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1, 0]}, r"weights\[1\] must be finite and greater than 0, got 0"),
        ({"costs": [1, 0]}, r"costs\[1\] must be finite and greater than 0, got 0"),
        ({"costs": [1, math.inf]}, r"costs\[1\] must be finite"),
        ({"costs": [1]}, "costs must have 2 entries"),
        ({"total": 0}, "total must be greater than 0"),
        ({"caps": [1, 2, 3]}, "caps must have 2 entries"),
        ({"floors": [-1, 0]}, r"floors\[0\] must be finite and at least 0"),
        ({"caps": [10, 20]}, "total must be at most 30, the sum of the caps"),
        ({"floors": [80, 30]}, "total must be at least 110, the sum of the floors"),
    ],
)
def test_bad_and_infeasible_input_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        optimal_samples(**{"weights": [1, 2], "total": 100, **change})


def test_a_vocabulary_is_checked_as_by_the_other_allocators() -> None:
    with pytest.raises(InputError, match="vocab"):
        square_root([1, 2], 100, 0)


@pytest.mark.parametrize("total", [2e4, 1e6, 5e6, 1e8])
@pytest.mark.parametrize("limits", [{}, {"most_contexts": 30_000}, {"least_bits": 40}])
def test_the_best_split_is_that_of_a_search(total: float, limits: dict[str, float]) -> None:
    split = best_contexts(MODEL, total, **limits)
    least = max(limits.get("least_bits", 3.0), total / limits.get("most_contexts", math.inf))
    bits = np.geomspace(least, total, 200_001)
    losses = np.array([MODEL.loss(total / b, b) for b in bits])
    assert split.bits == pytest.approx(bits[losses.argmin()], rel=1e-3)
    assert split.loss == pytest.approx(losses.min(), abs=1e-9)
    assert split.contexts == int(total / split.bits)


def test_the_range_is_where_the_loss_is_near_the_best() -> None:
    split = best_contexts(MODEL, 5e6, tolerance=0.002)
    for edge in (split.least_bits, split.most_bits):
        assert MODEL.loss(5e6 / edge, edge) == pytest.approx(split.loss + 0.002, abs=1e-9)
    assert split.least_bits < split.bits < split.most_bits
    # At a limit only the side within it counts.
    held = best_contexts(MODEL, 5e6, most_contexts=20_000, tolerance=0.002)
    assert held.least_bits == held.bits == 250
    assert MODEL.loss(5e6 / held.most_bits, held.most_bits) == pytest.approx(held.loss + 0.002, abs=1e-9)
    assert best_contexts(LossModel(3, 900, 0.5, 0, 2.5, rms=0.01), 5e6).tolerance == 0.01


def test_what_costs_nothing_is_not_paid_for() -> None:
    assert best_contexts(LossModel(3, 900, 0, 0, 2.5, 0), 1e6).bits == 3.0  # no noise: all contexts
    assert best_contexts(LossModel(3, 0, 0.5, 0, 2.5, 0), 1e6).contexts == 1  # contexts are worth nothing


def test_the_fit_finds_the_constants_again() -> None:
    rng = np.random.default_rng(0)
    points = [(m, b, MODEL.loss(m, b)) for m in (1e4, 3e4, 1e5, 3e5) for b in (8, 16, 60, math.inf)]
    found = fit_loss(points)
    for name in ("floor", "breadth", "steps", "labels"):
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=1e-6)
    assert found.rms < 1e-9
    noisy = [fit_loss([(m, b, loss + rng.normal(0, 0.002)) for m, b, loss in points]).rms for _ in range(200)]
    # 16 points and 4 constants: the mean square is 0.002^2 12/16. Of 200 it has a standard deviation of
    # sqrt(2 / 2400) = 2.9 %; four of them: one false alarm in 16,000 draws.
    assert np.square(noisy).mean() == pytest.approx(0.002**2 * 12 / 16, rel=0.116)


def test_constants_are_not_negative() -> None:
    """Where more contexts did harm by chance, the fit says that they are worth nothing, as SciPy's does."""
    points = [LossPoint(m, b, 3.0 + 1e-7 * m + 1 / b) for m in (1e4, 1e5) for b in (8, 16, 60, math.inf)]
    found = fit_loss(points)
    assert found.breadth == 0.0
    assert min(found.steps, found.labels) >= 0.0
    m, b, loss = np.array(points).T
    noise = 1 / (b - LABEL_OVERHEAD_BITS)
    columns = np.stack([np.ones_like(m), -np.ones_like(m), 1 / m, noise, noise / m], axis=1)
    _, distance = optimize.nnls(columns, loss)
    assert found.rms == pytest.approx(distance / math.sqrt(len(points)), rel=1e-6)


def test_the_demonstration_is_near_sixty_bits() -> None:
    model = fit_loss(DEMONSTRATION)
    assert model.rms < 0.005
    split = best_contexts(model, 3.3e6 * 8 / 5)
    assert 45 < split.bits < 80
    assert 65_000 < split.contexts < 120_000
    assert split.least_bits < 40
    assert split.most_bits > 90


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(1e4, 8)], "triples"),
        ([(1e4, 8, 3.0), (1e5, 8, 3.1), (2e5, 8, 3.1), (3e5, 8, 3.1)], "must differ in contexts, in bits"),
        ([(1e4, 8, 3.0), (1e4, 16, 3.1), (1e4, 32, 3.1), (1e4, 64, 3.1)], "must differ in contexts, in bits"),
        ([(1e4, 2, 3.0), (1e4, 16, 3.1), (2e4, 8, 3.1), (2e4, 64, 3.1)], "bits above the overhead"),
        ([(0, 8, 3.0), (1e4, 16, 3.1), (2e4, 8, 3.1), (2e4, 64, 3.1)], "contexts above 0"),
    ],
)
def test_points_that_say_too_little_are_refused(points: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_loss(points)


def test_a_total_below_one_label_is_refused() -> None:
    with pytest.raises(BudgetError, match="total must be at least 3 bits"):
        best_contexts(MODEL, 2.0)
    with pytest.raises(InputError, match=r"least_bits must be greater than 2\.5"):
        best_contexts(MODEL, 1e6, least_bits=2.0)
