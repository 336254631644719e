"""The expected held-out loss: what it is fitted on, that other texts forecast a text, and how it follows the budget."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy.stats import t as student

from benchmarks.planner import FIRST, LAST, collect, dump, table
from fpld import config as configuration
from fpld.errors import InputError
from fpld.planner import PlanInputs, Sender, forecast
from fpld.planner.expected import (
    COVERAGE,
    GAINS,
    KeptGain,
    Learning,
    check_texts,
    expect,
    fit_levels,
    kept_gains,
    student_t,
)
from fpld.planner.inputs import read_plan_source
from fpld.planner.render import plan_charts, plan_page, policy_rows, site_rows
from fpld.planner.sending import planned_expectation
from tests.planner.test_plan_command import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
USUAL = Learning(steps=2000, usual=True)


def equal(bits: float, nodes: int = 5) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.full(nodes, bits)


def plan(bits: Sequence[float] = (44.0,) * 5, **changes: object) -> PlanInputs:
    sites = tuple(Sender(f"n{i}", cap=bit) for i, bit in enumerate(bits))
    inputs = PlanInputs(sites, 92_160, 1024, codec="samples", learning=USUAL)
    return replace(inputs, **changes)  # type: ignore[arg-type]


def test_the_package_has_what_the_kept_results_say() -> None:
    """`python -m benchmarks.planner --write` makes both files again."""
    kept = collect()
    assert (ROOT / "fpld/planner" / GAINS).read_text("utf-8") == dump(kept)
    assert tuple(kept) == kept_gains()
    page = (ROOT / "docs/planning.md").read_text("utf-8")
    assert page.partition(FIRST)[2].partition(LAST)[0].strip() == table(kept)


def test_other_texts_forecast_the_kept_runs() -> None:
    """Every text is left out in turn. Labels are missed by 0.08 of the way at most, what models write by 0.16."""
    checks = check_texts(collect())
    assert {check.run.text for check in checks} >= {"presidents", "Wikipedia", "abstracts"}
    for check in checks:
        error = abs(check.run.share - check.expected.value)
        assert error < (0.08 if check.run.sends == "labels" else 0.16)
        assert check.inside is not False
    ranged = [check for check in checks if check.inside is not None]
    assert len(ranged) >= 7
    gaps = [(check.run.gap, check.gap) for check in checks if check.gap is not None]
    assert all(gap.value == pytest.approx(measured, rel=0.05) for measured, gap in gaps)


def test_a_left_out_text_says_nothing_of_itself() -> None:
    """Whatever a text showed, its own forecast stays the same."""
    kept = collect()
    bent = [row._replace(share=0.1) if row.text == "Wikipedia" else row for row in kept]
    before, after = (
        [check.expected for check in check_texts(each) if check.run.text == "Wikipedia"] for each in (kept, bent)
    )
    assert before == after


def test_ranges_cover_as_often_as_they_say() -> None:
    """Synthetic texts whose levels are normal: of 2,000 forecasts of one more text 90 % +- 2 % are right (3 sigma)."""
    rng = np.random.default_rng(5)
    right = 0
    for _ in range(2000):
        levels = rng.normal(0.9, 0.05, 4)
        known = [KeptGain("", str(i), "labels", 5, 92_160, 33.0, 2000, 0.5, x, True) for i, x in enumerate(levels)]
        checked = next(check for check in check_texts(known) if check.run.text == "3")
        right += bool(checked.inside)
    assert right / 2000 == pytest.approx(COVERAGE, abs=0.02)


def test_quantiles_are_those_of_scipy() -> None:
    expected = [student.ppf((1 + COVERAGE) / 2, freedom) for freedom in range(1, 11)]
    assert [student_t(freedom) for freedom in range(1, 11)] == pytest.approx(expected, abs=6e-4)
    assert student_t(50) == student_t(10)


def test_one_text_gives_a_level_and_no_range() -> None:
    (row,) = [row for row in kept_gains() if row.result == "rivals"]
    levels = fit_levels([row])
    assert math.isinf(levels.share("labels", 0.0).high)
    assert levels.gap is None


def test_more_bits_contexts_steps_and_nodes_never_hurt() -> None:
    def share(bits: float = 33.0, contexts: int = 92_160, steps: int = 2000, nodes: int = 5) -> float:
        found = expect("labels", contexts=contexts, bits=equal(bits, nodes), learning=Learning(steps))
        assert found is not None
        return found.share.value

    assert share(20.0) < share(33.0) < share(100.0)
    assert share(contexts=30_000) < share() < share(contexts=200_000)
    assert share(steps=600) < share() < share(steps=4000)
    assert share(nodes=3) < share() < share(nodes=20)
    updates = [
        expect("updates", contexts=92_160, bits=equal(bits), learning=Learning(4000)) for bits in (1.9, 2.0, 3.0, 4.0)
    ]
    assert updates[0] is None  # such updates make teachers that are worse than their average
    values = [each.share.value for each in updates[1:] if each is not None]
    assert values == sorted(values)


def test_unequal_bits_count_by_their_noise() -> None:
    even = expect("labels", contexts=92_160, bits=equal(34.0), learning=USUAL)
    uneven = expect("labels", contexts=92_160, bits=np.array([10.0, 40, 40, 40, 40]), learning=USUAL)
    assert even is not None
    assert uneven is not None
    assert uneven.share.value < even.share.value


def test_nats_need_a_gap() -> None:
    bits = equal(36.0)
    unknown = expect("labels", contexts=92_160, bits=bits, learning=Learning(2000))
    kept = expect("labels", contexts=92_160, bits=bits, learning=USUAL)
    told = expect("labels", contexts=92_160, bits=bits, learning=Learning(2000, base=4.0, mixture=3.5))
    assert unknown is not None
    assert (unknown.gain, unknown.loss) == (None, None)
    assert "--base" in str(unknown)
    assert kept is not None
    assert kept.gain is not None
    assert "base - 0." in str(kept)
    assert told is not None
    assert told.loss is not None
    assert told.loss.value == pytest.approx(4.0 - 0.5 * told.share.value)
    assert told.loss.low < told.loss.value < told.loss.high
    with pytest.raises(InputError, match="mixture must be below"):
        Learning(base=3.5, mixture=4.0)


def test_what_no_kept_run_has_is_said() -> None:
    small = expect("labels", contexts=5000, bits=equal(40.0), learning=USUAL)
    assert small is not None
    assert any("contexts" in doubt for doubt in small.doubts)
    assert expect("labels", contexts=300, bits=equal(40.0), learning=USUAL) is None
    pretrained = expect("updates", contexts=92_160, bits=equal(3.0), learning=Learning(None))
    assert pretrained is not None
    assert any("pretrained" in doubt for doubt in pretrained.doubts)
    own = Learning(2000, own_models=True)
    assert expect("text", contexts=92_160, bits=equal(40.0), learning=own) is None
    differing = expect("labels", contexts=92_160, bits=equal(40.0), learning=own)
    assert differing is not None
    assert differing.texts == 1


def test_presets_have_what_their_runs_came_to() -> None:
    """The range of `rivals` holds the kept runs of its settings on all three texts, in nats."""
    expected = planned_expectation(forecast(read_plan_source("rivals").inputs))
    assert expected is not None
    assert expected.gain is not None
    for name in ("rivals", "wikipedia-labels", "hospitals-labels"):
        kept = json.loads((ROOT / f"docs/results/{name}.json").read_text())["rows"]
        losses = {row["method"]: row["heldout_loss"] for row in kept}
        assert expected.gain.low < losses["base"] - losses["fpld"] < expected.gain.high


def test_a_configuration_says_what_is_known_of_its_learning() -> None:
    def learning(**overrides: object) -> Learning | None:
        return read_plan_source(configuration.read_config("rivals", overrides=overrides)[0]).inputs.learning

    assert learning() == USUAL
    for key, value in (("local.steps", 60), ("student.width", 96), ("tokenizer.vocab", 2048), ("run.rounds", 2)):
        assert learning(**{key: value, "baselines.methods": []}) != USUAL
        changed = learning(**{key: value, "baselines.methods": []})
        assert changed is not None
        assert not changed.usual
    rounds = learning(**{"run.rounds": 2, "baselines.methods": []})
    assert rounds is not None
    assert any("one round" in caveat for caveat in rounds.caveats)
    assert read_plan_source("private").inputs.learning is None


def test_rows_page_and_charts_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    made = forecast(plan())
    expected = planned_expectation(made)
    assert expected is not None
    policy = policy_rows(made)[0]
    assert policy["expected_share"] == expected.share.value
    assert all(row["next_megabyte_share"] > 0 for row in site_rows(made))
    page = plan_page({"plan": made})
    assert expected.short in page
    assert "noise of the mean target" not in page
    chart = plan_charts(made)[1]
    assert chart.name == "expected-by-total"
    assert [series.name for series in chart.series][-3:] == ["90 % range: low", "90 % range: high", "this plan"]
    found = rows(capsys, "plan", "rivals", "--base", "3.94", "--mixture", "3.39")
    (labels,) = [row for row in found if row["table"] == "expected" and row["sends"] == "labels"]
    assert labels["loss_low"] < labels["loss"] < labels["loss_high"] < 3.94
    assert labels["loss"] == pytest.approx(3.94 - 0.55 * labels["share"])
    assert labels["planned"]


def test_the_page_shows_what_is_printed() -> None:
    inputs = read_plan_source("rivals").inputs
    told = replace(USUAL, base=3.94, mixture=3.39)
    expected = planned_expectation(forecast(replace(inputs, learning=told)))
    line, separator, _ = f"expected held-out loss: {expected}".partition("; ")
    assert f"`{line}{separator}...)`" in (ROOT / "docs/planning.md").read_text("utf-8")
