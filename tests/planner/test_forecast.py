"""The planner: it agrees with the simulator and with real bytes, its inverse is one, and nonsense is named."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fpld import decode, encode
from fpld.codecs import UniformCodec
from fpld.errors import BudgetError, FpldError
from fpld.numerics import kl
from fpld.paper import simulate
from fpld.paper.theory import heterogeneous_upper
from fpld.planner import Forecast, PlanInputs, Sender, forecast, least_total, shortest_deadline
from fpld.planner.render import advice, compare_policies, policy_rows, site_rows
from fpld.protocol.wire import OVERHEAD_BYTES

CONTEXTS = 1500
VOCAB = 32


def four(**changes: object) -> PlanInputs:
    sites = tuple(
        Sender(name, rate, clip=clip)
        for name, rate, clip in [("a", 2e6, 4.0), ("b", 2e6, 4.0), ("c", 384e3, 8.0), ("d", 256e3, 8.0)]
    )
    return replace(PlanInputs(sites, 16384, 1024, deadline=300.0, rounds=4, samples=30_000.0), **changes)  # type: ignore[arg-type]


def random_inputs(rng: np.random.Generator) -> PlanInputs:
    count = int(rng.integers(2, 9))
    sites = tuple(
        Sender(f"site {i}", float(rng.uniform(2e3, 2e4)), clip=float(rng.uniform(1.0, 5.0))) for i in range(count)
    )
    return PlanInputs(
        sites,
        CONTEXTS,
        VOCAB,
        deadline=float(rng.uniform(10, 60)),
        samples=float(rng.uniform(1e3, 1e5)),
        channel="paper",
    )


def test_fifty_random_plans_agree_with_the_simulator() -> None:
    """Measured KL lies in the predicted bracket wherever its conditions hold.

    The mean over 1500 contexts of 32 tokens has a standard error of 0.7 %, the upper bound at least 4 % of room
    (1 - c_p) and the lower a half: a false alarm is beyond five standard errors, one in millions for all fifty.
    """
    rng = np.random.default_rng(11)
    target = simulate.Truth.draw(contexts=CONTEXTS, vocab=VOCAB, seed=3)
    promised = 0
    for seed in range(50):
        inputs = replace(random_inputs(rng), c_p=target.c_p)
        caps = inputs.caps()
        total = float(rng.uniform(0.3, 1.0) * caps.sum())
        plan = forecast(inputs, str(rng.choice(["optimal", "uniform", "inverse"])), total)
        assert plan.upper is not None
        assert plan.lower is not None
        draw = simulate.Draw.make(target, nodes=len(inputs.sites), seed=seed, samples=inputs.samples)
        clips = inputs.clips
        assert clips is not None
        measured = draw.kl(plan.bits_per_coordinate, clips)
        if plan.upper_holds:
            assert measured <= plan.upper.total
        if plan.lower_holds:
            promised += 1
            assert measured >= plan.lower.bandwidth
    assert 15 <= promised <= 49  # some plans are good enough for a promise, and some are not


@pytest.mark.parametrize("bits", [2.0, 3.3, 4.6, 6.0])
@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize("stratified", [False, True])
def test_on_the_wire_the_bracket_holds_for_real_bytes(bits: float, ranged: bool, stratified: bool) -> None:
    """Frames of the uniform codec, decoded: KL of the mean, and the bytes as forecast."""
    target = simulate.Truth.draw(contexts=400, vocab=64, seed=1)
    draw = simulate.Draw.make(target, nodes=3, seed=2)
    # A stated range is that of the context's logits, a little under 1 here; a clip level of 1 is what it amounts to.
    sites = tuple(Sender(f"n{i}", clip=1.0, ranged=ranged) for i in range(3))
    inputs = PlanInputs(sites, 400, 64, c_p=target.c_p, stratified=stratified)
    plan = forecast(inputs, "optimal", 3 * bits * 64)
    decoded = []
    for i, site in enumerate(inputs.sites):
        wire = replace(
            inputs.uplinks.plan(site, float(plan.bits[i])),
            node=i,
            slot=i if stratified else 0,
            slots=3 if stratified else 1,
        )
        payload = encode(UniformCodec(), draw.logits[i], wire)
        assert len(payload) + OVERHEAD_BYTES == plan.bytes_sent[i]
        decoded.append(decode(UniformCodec(), payload, wire).values)
    mean = draw.logits.mean(axis=0)
    measured = float(kl(mean, np.mean(decoded, axis=0) - mean).mean())
    assert plan.upper is not None
    assert plan.lower is not None
    assert stratified or plan.lower.bandwidth <= measured
    assert not (stratified and plan.lower_holds)
    # Without a promise (few bits: (SE) fails) the bound is still near; with one it holds.
    assert measured <= plan.upper.bandwidth * (1.0 if plan.upper_holds else 1.1)


def test_the_wire_is_never_better_than_the_papers_channel() -> None:
    for total in (4, 6, 9.3, 14, 20, 30):
        wire, paper = (forecast(four(channel=c), "optimal", total * 1024) for c in ("wire", "paper"))
        assert wire.upper is not None
        assert paper.upper is not None
        assert wire.upper.bandwidth >= paper.upper.bandwidth * (1 - 1e-9)


def test_seconds_bytes_and_caps() -> None:
    plan = forecast(four(), "optimal", 20 * 1024)
    assert plan.held_by == ["", "", "", "link"]
    assert plan.seconds[3] == pytest.approx(300, abs=0.01)
    assert plan.round_seconds is not None
    assert plan.round_seconds <= 300
    assert sum(plan.bytes_sent) == pytest.approx(16384 * 20 * 1024 / 8 + 4 * OVERHEAD_BYTES, abs=4)
    everyone = forecast(four())
    assert all(everyone.held_by)
    row = policy_rows(plan)[0]
    assert (row["all_bytes"], row["all_seconds"]) == (4 * row["round_bytes"], 4 * row["round_seconds"])


def test_the_optimal_policy_has_the_least_bound() -> None:
    uppers = {
        name: plan.upper for name, plan in compare_policies(forecast(four(channel="paper"), total=16 * 1024)).items()
    }
    bounds = {name: upper.total for name, upper in uppers.items() if upper is not None}
    assert bounds["optimal"] < bounds["uniform"] < bounds["inverse"]


def test_the_next_megabyte_is_a_difference_of_noise() -> None:
    plan = forecast(four(channel="paper"), total=18 * 1024)
    gains = plan.next_megabyte()
    for i, gain in enumerate(gains):
        more = plan.bits.copy()
        more[i] += 8e6 / 16384
        now, then = (heterogeneous_upper(bits / 1024, [4, 4, 8, 8], vocab=1024).bandwidth for bits in (plan.bits, more))
        assert gain == pytest.approx(2 * (now - then))  # a bound is half the noise
    best = [site.name for site in plan.inputs.sites][int(np.argmax(np.array(gains, float)))]
    assert best == "d"  # the thin link holds it where a bit is worth most
    assert any(f"buys most at {best}, if its cap were lifted" in line for line in advice(plan))


@pytest.mark.parametrize("target", [0.05, 0.01, 0.002])
def test_the_inverse_meets_the_target_and_a_little_less_does_not(target: float) -> None:
    inputs = four(deadline=3600.0)
    least = least_total(inputs, target)
    assert least.upper is not None
    assert least.upper.total <= target
    assert least.upper_holds
    assert not promises(forecast(inputs, "optimal", float(least.bits.sum()) * 0.99), target)
    short = shortest_deadline(inputs, target)
    assert short.upper is not None
    assert short.inputs.deadline is not None
    assert short.upper.total <= target
    assert short.upper_holds
    assert not promises(forecast(replace(inputs, deadline=short.inputs.deadline * 0.99)), target)


def promises(plan: Forecast, target: float) -> bool:
    return plan.upper is not None and plan.upper_holds and plan.upper.total <= target


def test_doubts_name_the_condition() -> None:
    rough = forecast(four(), total=8 * 1024)
    fine = forecast(four(deadline=3000.0), total=40 * 1024)
    assert not rough.upper_holds
    assert any(doubt.startswith("(SE) fails") for doubt in rough.doubts())
    assert any(doubt.startswith("(SE') fails") for doubt in rough.doubts())
    assert fine.upper_holds
    assert not fine.lower_holds  # stratified, as runs are
    assert [doubt[:27] for doubt in fine.doubts()] == ["the dither is stratified: n"]
    independent = forecast(four(deadline=3000.0, stratified=False), total=40 * 1024)
    assert independent.lower_holds
    assert independent.doubts() == []
    degenerate = forecast(four(c_p=0.0, deadline=3000.0), total=40 * 1024)
    assert any(doubt.startswith("(ND) fails") for doubt in degenerate.doubts())
    assert not degenerate.lower_holds
    predictive = forecast(four(codec="predictive"), total=1024)
    assert [doubt[:30] for doubt in predictive.doubts()] == ["no loss is forecast: the paper"]
    assert predictive.upper is None
    assert predictive.cost is None
    assert not predictive.upper_holds


def test_without_clip_levels_there_is_a_plan_and_no_bracket() -> None:
    plan = forecast(PlanInputs((Sender("a", 1e6), Sender("b", 1e5)), 1000, 100, deadline=60))
    assert plan.upper is None
    assert "no bounds" in plan.doubts()[0]
    assert "next_megabyte" not in site_rows(plan)[0]
    with pytest.raises(FpldError, match="clip levels or weights"):
        least_total(plan.inputs, 0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sender("x", -5.0), "rate of node 'x' must be greater than 0"),
        (lambda: Sender("x", clip=math.nan), "clip of node 'x' must be finite"),
        (lambda: Sender("x", cap=0.0), "cap of node 'x' must be greater than 0"),
        (lambda: four(contexts=0), "contexts must be an integer from 1"),
        (lambda: four(codec="zip"), "codec must be one of"),
        (lambda: PlanInputs((Sender("x"), Sender("x")), 10, 10), "names of nodes must differ"),
        (
            lambda: forecast(four(deadline=20.0)),
            "over 256 kbit/s feasible is a deadline of at least 65.6 s, or at most",
        ),
        (lambda: forecast(four(), total=99 * 1024), "total must be from 4,096 bits per context (8.389 MB a round)"),
        (
            lambda: forecast(PlanInputs((Sender("x", clip=1.0),), 10, 10)),
            "total must be given, or a limit for every node: 'x'",
        ),
        (lambda: least_total(four(), 1e-9), "target must be greater than the data term 4.17e-06"),
        (lambda: least_total(four(), 1e-4), "target must be at least 0.00"),
        (lambda: least_total(four(), -1), "target must be greater than 0"),
    ],
)
def test_nonsense_is_named_and_what_is_feasible(make: object, message: str) -> None:
    with pytest.raises(FpldError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)


def test_the_feasible_deadline_that_an_error_names_is_feasible() -> None:
    with pytest.raises(BudgetError):
        forecast(four(deadline=65.0))
    assert isinstance(forecast(four(deadline=65.6)), Forecast)
    with pytest.raises(BudgetError, match=r"feasible is a deadline of 422\.7 s"):
        least_total(four(), 1e-4)
    assert isinstance(least_total(four(deadline=422.7), 1e-4), Forecast)
