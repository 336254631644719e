"""Theorem 5: the closed form, KKT conditions, a SciPy solver, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special

from fpld import BudgetError, InputError
from fpld.budget import allocators
from fpld.paper.theory import allocation_optimum, objective

if TYPE_CHECKING:
    from fpld.budget.allocators import Allocator
    from fpld.types import Floats

ALLOCATORS = [allocators.optimal, allocators.uniform, allocators.inverse]


def instance(rng: np.random.Generator) -> dict[str, Any]:
    """A random feasible instance: weights over decades, some caps, some floors, some ties."""
    nodes = int(rng.integers(1, 12))
    vocab = int(rng.integers(2, 500))
    weights = np.ones(nodes) if rng.random() < 0.1 else np.exp(rng.normal(0, 2, nodes))
    floors = rng.uniform(0, 3 * vocab, nodes) * (rng.random(nodes) < 0.5)
    caps = floors + rng.exponential(2 * vocab, nodes)
    caps[rng.random(nodes) < 0.3] = np.inf
    most = caps.sum() if np.isfinite(caps.sum()) else floors.sum() + 6 * vocab * nodes
    where = rng.choice([0.0, 1.0, rng.random()], p=[0.05, 0.05, 0.9])
    total = max(floors.sum() + (most - floors.sum()) * where, 1e-3)
    return {"weights": weights, "total": float(total), "vocab": vocab, "caps": caps, "floors": floors}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_bits_add_up_within_limits(allocator: Allocator) -> None:
    rng = np.random.default_rng(1)
    for _ in range(1000):
        case = instance(rng)
        bits = allocator(**case)
        assert bits.sum() == pytest.approx(case["total"], rel=1e-9)
        assert (bits >= case["floors"]).all()
        assert (bits <= case["caps"]).all()


def test_kkt_conditions_on_1000_random_instances() -> None:
    """One multiplier for all nodes in between, no more at a floor, no less at a cap: this proves optimality."""
    rng = np.random.default_rng(2)
    for _ in range(1000):
        case = instance(rng)
        bits = allocators.optimal(**case)
        gain = case["weights"] * np.exp2(-2 * bits / case["vocab"])
        near = 1e-9 * max(case["total"], 1)
        low = bits <= case["floors"] + near
        high = bits >= case["caps"] - near
        free = ~low & ~high
        level = np.median(gain[free]) if free.any() else None
        if level is not None:
            assert np.abs(gain[free] / level - 1).max() < 1e-6
            assert (gain[low & ~high] <= level * (1 + 1e-6)).all()
            assert (gain[high & ~low] >= level * (1 - 1e-6)).all()
        elif (low & ~high).any() and (high & ~low).any():
            assert gain[low & ~high].max() <= gain[high & ~low].min() * (1 + 1e-6)


def scipy_bits(case: dict[str, Any]) -> tuple[float, bool]:
    """Theorem 5's problem in units of V/2 bits, by SLSQP; its objective and whether it converged."""
    weights = case["weights"] / case["weights"].max()
    unit = case["vocab"] / 2
    low = case["floors"] / unit
    high = case["caps"] / unit
    total = case["total"] / unit
    start = allocators.uniform(**case) / unit
    found = optimize.minimize(
        lambda x: float((weights * np.exp2(-x)).sum()),
        start,
        jac=lambda x: -np.log(2) * weights * np.exp2(-x),
        bounds=list(zip(low, np.where(np.isfinite(high), high, None), strict=True)),
        constraints={"type": "eq", "fun": lambda x: x.sum() - total, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 300},
    )
    feasible = abs(found.x.sum() - total) < 1e-6
    return objective(found.x * unit, case["weights"], case["vocab"]).total, bool(found.success and feasible)


@pytest.mark.slow
def test_no_worse_than_a_scipy_solver_on_1000_random_instances() -> None:
    rng = np.random.default_rng(3)
    agreed = 0
    for _ in range(1000):
        case = instance(rng)
        ours = objective(allocators.optimal(**case), case["weights"], case["vocab"]).total
        theirs, converged = scipy_bits(case)
        if converged:
            assert ours <= theirs * (1 + 1e-5)
            agreed += ours == pytest.approx(theirs, rel=1e-4)
    assert agreed > 900


def test_closed_form_without_limits() -> None:
    weights = np.array([0.5, 3.0, 7.0])
    total = 5000.0
    vocab = 300
    expected = total / 3 + vocab / 2 * np.log2(weights / np.exp(np.log(weights).mean()))
    bits = allocators.optimal(weights, total, vocab)
    assert bits == pytest.approx(expected)
    assert objective(bits, weights, vocab).total == pytest.approx(allocation_optimum(weights, total, vocab))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.floats(100, 5000), st.floats(0.1, 10))
def test_scaling_weights_changes_nothing(weights: list[float], total: float, factor: float) -> None:
    once = allocators.optimal(weights, total, 64)
    assert allocators.optimal(np.array(weights) * factor, total, 64) == pytest.approx(once, abs=1e-6)


def test_equal_weights_are_uniform_and_double_weight_is_half_a_vocabulary_more() -> None:
    assert allocators.optimal([3, 3, 3], 300, 10).tolist() == pytest.approx([100, 100, 100])
    bits = allocators.optimal([1, 2], 1000, 64)
    assert bits[1] - bits[0] == pytest.approx(32)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1, 0]}, r"weights\[1\] must be finite and greater than 0, got 0"),
        ({"weights": [1, float("nan")]}, r"weights\[1\]"),
        ({"weights": []}, "weights must be a non-empty"),
        ({"weights": "many"}, "weights must be a sequence"),
        ({"total": 0}, "total must be greater than 0"),
        ({"total": float("inf")}, "total must be finite"),
        ({"vocab": 0}, "vocab"),
        ({"caps": [1, 2, 3]}, "caps must have 2 entries"),
        ({"floors": [-1, 0]}, r"floors\[0\] must be finite and at least 0"),
        ({"caps": [10, 20]}, "total must be at most 30, the sum of the caps, got 100"),
        ({"floors": [80, 30]}, "total must be at least 110, the sum of the floors, got 100"),
        ({"caps": [50, 90], "floors": [0, 95]}, r"caps\[1\] must be at least floors\[1\] = 95, got 90"),
    ],
)
def test_bad_and_infeasible_input_is_refused(allocator: Allocator, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"weights": [1, 2], "total": 100, "vocab": 8, **change}
    with pytest.raises(InputError, match=message) as caught:
        allocator(**arguments)
    assert isinstance(caught.value, BudgetError) == ("sum of" in message or "must be at least floors" in message)


def test_inverse_gives_in_proportion() -> None:
    assert allocators.inverse([1, 4], 100, 8).tolist() == pytest.approx([80, 20])


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=20))
def test_rounding_keeps_the_total_and_moves_no_node_by_a_bit(bits: list[float]) -> None:
    whole = allocators.round_bits(bits)
    assert abs(whole.sum() - sum(bits)) < 1
    assert whole.sum() <= sum(bits) + 1e-6
    assert (np.abs(whole - np.array(bits)) < 1).all()


def test_rounding_never_passes_a_cap() -> None:
    assert allocators.round_bits([10.5, 10.5], caps=[10.5, 20]).tolist() == [10, 11]


def test_a_million_nodes() -> None:
    rng = np.random.default_rng(5)
    caps = rng.uniform(300, 2000, 10**6)
    bits = allocators.optimal(np.exp(rng.normal(size=10**6)), 5e8, 256, caps, np.full(10**6, 10.0))
    assert bits.sum() == pytest.approx(5e8, rel=1e-12)
    assert (bits <= caps).all()


def test_equal_slopes_is_what_a_solver_finds() -> None:
    rng = np.random.default_rng(11)
    for _ in range(20):
        levels = rng.normal(0, 1, 5)
        rates = rng.uniform(0.05, 0.3, 5)
        caps = rng.uniform(100, 400, 5)
        floors = rng.uniform(1, 20, 5)
        total = float(rng.uniform(floors.sum() * 1.1, caps.sum() * 0.95))
        bits = allocators.equal_slopes(levels, rates, total, caps, floors)

        def loss(b: Floats, levels: Floats = levels, rates: Floats = rates) -> float:
            return float(np.exp(levels - rates * np.sqrt(b)).sum())

        start = floors + (caps - floors) * (total - floors.sum()) / (caps - floors).sum()
        found = optimize.minimize(
            loss,
            start,
            bounds=list(zip(floors, caps, strict=True)),
            constraints={"type": "eq", "fun": lambda b, total=total: b.sum() - total},
            options={"maxiter": 500, "ftol": 1e-12},
        )
        assert bits.sum() == pytest.approx(total)
        assert (bits >= floors - 1e-9).all()
        assert (bits <= caps + 1e-9).all()
        assert loss(bits) <= found.fun * (1 + 1e-6)


def test_lamberts_function_is_scipys() -> None:
    z = np.concatenate([np.linspace(-700, 700, 5000), np.linspace(-3, 3, 5000)])
    assert allocators._lambert(z) == pytest.approx(special.wrightomega(z), rel=1e-13)


def test_equal_slopes_is_lamberts_function() -> None:
    """Without limits a node's bits at a slope e^s are (W(rate^2 e^(level - s) / 2) / rate)^2; s by a root finder."""
    rng = np.random.default_rng(12)
    for _ in range(50):
        nodes = int(rng.integers(1, 8))
        levels = rng.normal(0, 2, nodes)
        rates = np.exp(rng.normal(-2, 1, nodes))
        total = float(rng.uniform(10, 5000))

        def bits_at(slope: float, levels: Floats = levels, rates: Floats = rates) -> Floats:
            bits: Floats = np.square(special.lambertw(rates**2 * np.exp(levels - slope) / 2).real / rates)
            return bits

        slope = optimize.brentq(lambda s, total=total, at=bits_at: at(s).sum() - total, -400, 100, xtol=1e-12)
        assert allocators.equal_slopes(levels, rates, total) == pytest.approx(bits_at(slope), rel=1e-6, abs=1e-6)


def test_equal_slopes_refuses_nonsense() -> None:
    with pytest.raises(InputError, match="rates finite and greater than 0"):
        allocators.equal_slopes([0.0, 0.0], [0.1, 0.0], 10.0)
    with pytest.raises(BudgetError, match="total must be at most"):
        allocators.equal_slopes([0.0, 0.0], [0.1, 0.1], 10.0, caps=[2.0, 2.0])
