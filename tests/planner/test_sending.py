"""What nodes could send in the same bytes: ranked, with one recommendation, and nothing that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from fpld import load_config
from fpld.cli import main
from fpld.codecs.updates import update_bytes
from fpld.errors import InputError
from fpld.planner import PlanInputs, forecast
from fpld.planner.inputs import read_plan_source
from fpld.planner.render import advice
from fpld.planner.sending import expected_rows, rank_ways, recommend, sending_advice
from fpld.protocol.wire import OVERHEAD_BYTES
from tests.planner.test_expected import plan

if TYPE_CHECKING:
    from fpld.planner import Forecast

WEIGHTS = 1_082_304


def of(name: str, **overrides: object) -> Forecast:
    source = read_plan_source(load_config(name, overrides={"baselines.methods": [], **overrides}))
    return forecast(source.inputs, total=source.total)


def allow(made: Forecast, *names: str) -> Forecast:
    return replace(made, inputs=replace(made.inputs, may_send=names))


def recommended(made: Forecast) -> str:
    rows = [row for row in expected_rows(made) if row["recommended"]]
    assert len(rows) == 1
    return str(rows[0]["sends"])


@pytest.mark.parametrize("name", ["rivals", "policies", "wikipedia", "hospitals"])
def test_one_recommendation_for_a_policy(name: str) -> None:
    """In the order of docs/results.md: updates teach more than text with labels, and these more than labels."""
    made = of(name)
    assert recommended(allow(made, "labels")) == "labels"
    assert recommended(allow(made, "labels", "text")) == "text"
    assert recommended(allow(made, "updates")) == "updates"
    assert recommended(allow(made, "labels", "text", "updates")) == "updates"
    shares = [row["share"] for row in expected_rows(made)]
    assert shares == sorted(shares, reverse=True)


def test_what_is_planned_counts_as_allowed() -> None:
    assert recommended(of("rivals")) == "labels"
    assert recommended(of("policies")) == "text"
    assert recommended(of("policies", **{"send.updates": 3.0})) == "updates"


def test_updates_have_the_bits_that_the_bytes_give() -> None:
    made = of("rivals")
    (row,) = [row for row in expected_rows(made) if row["sends"] == "updates"]
    assert row["round_bytes"] <= sum(made.bytes_sent)
    assert row["round_bytes"] > sum(made.bytes_sent) - 5 * 200
    thin = forecast(made.inputs, total=60.0)
    (row,) = [row for row in expected_rows(thin) if row["sends"] == "updates"]
    assert row["share"] is None
    assert row["round_bytes"] == 5 * (update_bytes(WEIGHTS, 2) + OVERHEAD_BYTES)
    assert any("[send] updates = 2 takes" in line for line in sending_advice(thin))
    assert recommended(allow(thin, "labels", "text", "updates")) != "updates"


def test_text_needs_bits_for_its_tokens() -> None:
    thin = forecast(plan((12.0,) * 5))
    (row,) = [row for row in expected_rows(thin) if row["sends"] == "text"]
    assert row["share"] is None
    assert not any("[written]" in line for line in sending_advice(thin))
    rich = forecast(plan())
    assert any("[written] contexts = 80640 beside probe.contexts = 11520" in line for line in sending_advice(rich))


@pytest.mark.parametrize(
    ("overrides", "barred"),
    [
        ({"combine.rule": "guarded"}, {"updates"}),
        ({"combine.rule": "median"}, {"text", "updates"}),
        ({"budget.estimator": "distortion"}, {"updates"}),
        ({"nodes[0].student": {"kind": "ngram", "order": 2, "buckets": 256}}, {"updates"}),
        ({"labels": {"over": "strings"}}, {"text", "updates"}),
        ({}, set()),
    ],
    ids=["guarded", "median", "estimator", "own model", "strings", "plain"],
)
def test_what_the_configuration_excludes_is_not_offered(overrides: dict[str, object], barred: set[str]) -> None:
    """The reasons are those of the check of the configuration itself."""
    made = of("rivals", **overrides)
    assert {name for name, _ in made.inputs.barred} == barred
    assert all(reason for _, reason in made.inputs.barred)
    assert {row["sends"] for row in expected_rows(made)} == {"labels", "text", "updates"} - barred
    offers = [line for line in advice(made) if line.startswith("if ")]
    assert not any(("[written]" in line and "text" in barred) for line in offers)
    assert not any(("[send]" in line and "updates" in barred) for line in offers)
    assert recommend(rank_ways(made), ("labels", "text", "updates")) is not None


def test_there_is_no_forecast_of_other_codecs_or_with_privacy() -> None:
    assert expected_rows(of("uniform")) == []
    private = of("private")
    assert expected_rows(private) == []
    assert any("with [privacy]" in line for line in advice(private))
    assert expected_rows(forecast(plan(channel="paper"))) == []


def test_the_command_takes_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "rivals", "--may-send", "labels,text,updates"]) == 0
    text = capsys.readouterr().out
    assert "recommended where labels, text, updates may leave the nodes: [send] updates = 3.7 in the same bytes" in text
    assert "may leave the nodes: [written]" not in text
    assert main(["plan", "rivals", "--may-send", "labels,weights"]) == 2
    assert "may_send must be of labels, text, updates" in capsys.readouterr().err
    with pytest.raises(InputError, match="may_send"):
        PlanInputs(plan().sites, 10, 10, may_send=("all",))


def test_links_alone_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a configuration: links, sizes and policy. A way without a forecast has a row all the same."""
    command = ["plan", "--codec", "samples", "--links", "1Mbit/s,1Mbit/s,64kbit/s", "--contexts", "92160"]
    command += ["--vocab", "1024", "--student", "4.3MB", "--base", "4", "--mixture", "3.5"]
    assert main([*command, "--deadline", "9", "--may-send", "labels,updates"]) == 0
    text = capsys.readouterr().out
    assert "recommended where labels, updates may leave the nodes: what is planned" in text
    assert "if text may leave" not in text  # six bits a context at the thin link
    assert main([*command, "--deadline", "90", "--may-send", "labels,updates"]) == 0
    assert "recommended where labels, updates may leave the nodes: [send] updates = 4.0" in capsys.readouterr().out
