"""Plans of sampled labels: bits by square roots, noise, contexts, downlink, and what a real run makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy.optimize import minimize

from fpld.budget.policy import Budget, usual_allocator
from fpld.cli import main
from fpld.codecs.prior import block_ranges
from fpld.errors import InputError
from fpld.planner import PlanInputs, Sender, forecast, least_total
from fpld.planner.contexts import DEMONSTRATION, best_contexts, fit_loss, label_rows
from fpld.planner.inputs import read_plan_source
from fpld.planner.render import advice, policy_rows, site_rows
from fpld.protocol.shared_prior import collect_notes, estimate_notes_bytes, round_blocks
from tests.federation.conftest import config_file
from tests.planner.test_plan_command import rows

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]


def three(**changes: object) -> PlanInputs:
    sites = tuple(
        Sender(name, cap=cap, weight=w) for name, cap, w in [("a", 200, 1.0), ("b", 200, 4.0), ("c", 50, 9.0)]
    )
    return replace(PlanInputs(sites, 20_000, 1024, codec="samples"), **changes)  # type: ignore[arg-type]


def test_bits_are_those_of_a_solver() -> None:
    plan = forecast(three(), total=180.0)
    w = plan.inputs.weights
    caps = plan.inputs.caps()
    floors = plan.inputs.floors()
    optimum = minimize(
        lambda bits: (w / bits).sum(),
        np.full(3, 45.0),
        jac=lambda bits: -w / bits**2,
        bounds=list(zip(floors, caps, strict=True)),
        constraints={"type": "eq", "fun": lambda bits: bits.sum() - 180.0},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert plan.policy == "square-root"
    assert plan.bits == pytest.approx(optimum.x, rel=1e-4)
    assert plan.held_by == ["", "", "cap"]
    assert plan.noise == pytest.approx(optimum.fun / 9)


def test_no_bracket_where_none_applies() -> None:
    plan = forecast(three(student=4e6), total=180.0)
    row = policy_rows(plan)[0]
    assert plan.upper is None
    assert plan.doubts() == []
    assert not {"upper", "lower", "kl_at_most", "upper_holds"} & set(row)
    assert "clip" not in site_rows(plan)[0]
    assert row["noise"] < min(other["noise"] for other in policy_rows(plan)[1:])
    assert row["downlink_bytes"] == 3 * site_rows(plan)[0]["downlink_bytes"]
    assert any("% of the way from base to mixture" in line for line in advice(plan))
    assert not any("noise" in line for line in advice(plan))
    with pytest.raises(InputError, match="not about the codec 'samples': give a total"):
        least_total(plan.inputs, 0.01)


def test_the_next_megabyte_is_a_difference_of_noise() -> None:
    plan = forecast(three(), total=120.0)
    gain = plan.next_megabyte()[0]
    more = plan.bits + np.array([8e6 / 20_000, 0, 0])
    assert gain == pytest.approx((plan.inputs.weights / plan.bits - plan.inputs.weights / more).sum() / 9)


def test_contexts_are_those_of_the_fitted_loss() -> None:
    """As many nodes as the demonstration had: the model as it was fitted; more nodes want fewer bits each."""
    sites = tuple(Sender(f"s{i}", cap=60.0) for i in range(5))
    planned, best = label_rows(forecast(PlanInputs(sites, 92_160, 1024, codec="samples")))
    direct = best_contexts(fit_loss(DEMONSTRATION), 92_160 * 60.0, least_bits=3.01)
    assert (planned["contexts"], planned["context_bits"]) == (92_160, 60.0)
    assert best["contexts"] == direct.contexts
    assert best["context_bits"] == pytest.approx(direct.bits)
    assert 0 <= planned["extra_loss"] < 1e-3
    many = tuple(Sender(f"s{i}", cap=60.0) for i in range(20))
    assert label_rows(forecast(PlanInputs(many, 92_160, 1024, codec="samples")))[1]["context_bits"] < 0.7 * direct.bits
    assert label_rows(forecast(PlanInputs(sites, 92_160, 1024, codec="predictive"))) == []


def test_the_allocator_goes_by_the_codec_if_none_is_named() -> None:
    assert [usual_allocator(name) for name in ("samples", "predictive", "uniform")] == [
        "square-root",
        "optimal",
        "optimal",
    ]
    caps = np.full(2, 100.0)
    floors = np.full(2, 3.0)
    w = np.array([1.0, 16.0])
    budget = Budget(caps, floors, 256, 50.0, None, w, usual="square-root")
    assert budget.bits(1).tolist() == [10.0, 40.0]
    assert "square-root" in budget.sharing


def test_notes_take_what_is_said() -> None:
    """About 6,500 coordinates lie near a boundary, a binomial count: 10 % are beyond eight deviations of it."""
    shape = 20_000, 1024
    rng = np.random.default_rng(0)
    noted = round_blocks((2 * rng.standard_normal((len(part), 1024)) for part in block_ranges(shape)), shape)
    assert collect_notes(noted, shape).size == pytest.approx(estimate_notes_bytes(*shape), rel=0.1)


@pytest.mark.slow
def test_a_run_learns_weights_and_the_planner_learns_from_the_run(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
) -> None:
    """Warm-up, then bits by the square roots of noise x bits; the trace, the planner's noise and its downlink agree."""
    text = config_file.read_text().replace(
        "[engine]", '[codec]\nname = "samples"\n\n[baselines]\nmethods = ["ensemble"]\n\n[engine]'
    )
    text = text.replace("bits = 1.5", "bits = 4.0") + '\n[budget]\ntotal = 0.6\nestimator = "distortion"\n'
    config_file.write_text(text)
    assert main(["run", str(config_file), "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    first, second, third = (json.loads(line) for line in (tmp_path / "run/trace.jsonl").read_text().splitlines())
    assert first["bits_allotted"] == pytest.approx([0.2] * 3)
    for before, after in ((first, second), (second, third)):
        weights = np.array(before["noise"]) * np.array(before["bits_allotted"])
        assert before["weights"] == pytest.approx(256 * weights)
        assert after["bits_allotted"] == pytest.approx(0.6 * np.sqrt(weights) / np.sqrt(weights).sum(), rel=1e-6)
    losses = {row["method"]: row["heldout_loss"] for row in json.loads((tmp_path / "run/result.json").read_text())}
    learning = read_plan_source(str(tmp_path / "run")).inputs.learning
    assert learning is not None
    assert (learning.base, learning.mixture) == (losses["base"], losses["ensemble"])
    table = rows(capsys, "plan", str(tmp_path / "run"), "--total", "0.6")
    sites = [row for row in table if row["table"] == "sites"]
    assert [row["downlink_bytes"] for row in sites] == [max(third["node_downlink_bytes"])] * 3
    planned = next(row for row in table if row["table"] == "policies")
    assert planned["policy"] == "square-root"
    noise = 256 * np.array(third["noise"]) * np.array(third["bits_allotted"]) / [row["bits"] for row in sites]
    assert planned["noise"] == pytest.approx(noise.sum() / 9)
    assert {row["split"] for row in table if row["table"] == "labels"} == {"planned", "best"}


def test_written_contexts_cost_what_public_ones_do() -> None:
    plain = forecast(three(), total=180.0)
    written = forecast(three(contexts=2_000, written=18_000), total=180.0)
    assert [row["round_bytes"] for row in site_rows(written)] == [row["round_bytes"] for row in site_rows(plain)]
    assert label_rows(written) == []
