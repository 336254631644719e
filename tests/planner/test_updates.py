"""The planner where nodes send updates of weights, or labels over strings: bits, bytes and V are those of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fpld
from fpld import config as configuration
from fpld import load_config
from fpld.cli import main
from fpld.codecs.updates import update_bytes
from fpld.errors import BudgetError, InputError
from fpld.federation.state import update_budget
from fpld.planner import forecast
from fpld.planner.inputs import planned_configuration, read_plan_source
from fpld.planner.render import advice, plan_charts, site_rows
from fpld.protocol.wire import OVERHEAD_BYTES
from tests.federation.conftest import config_file
from tests.planner.test_plan_command import rows

if TYPE_CHECKING:
    from fpld.planner.inputs import PlanSource

__all__ = ["config_file"]

RESULTS = Path(__file__).parents[2] / "docs/results"
STUDENT = 'kind = "transformer"\nlayers = 1\nwidth = 16\nheads = 2\nlength = 96\nbatch = 4'
WEIGHTS = 1_082_304  # of the transformer of `policies`


def updates(**overrides: object) -> PlanSource:
    return read_plan_source(load_config("policies", overrides={"send.updates": 3.0, **overrides}))


def test_bits_are_those_of_the_federation() -> None:
    source = updates()
    contexts = 12288 + 79872
    budget = update_budget(source.config, weights=WEIGHTS, contexts=contexts, vocab=1024)
    plan = forecast(source.inputs, total=source.total)
    assert plan.bits.tolist() == budget.bits(1).tolist()
    # Two nodes are held below three bits by the 24 bits that they may send for each context.
    assert plan.held_by == ["cap", "cap", "updates", "updates", "updates"]
    table = site_rows(plan)
    assert [row["weight_bits"] for row in table[2:]] == [3.0] * 3
    assert 2.04 < table[0]["weight_bits"] < 2.05
    assert table[2]["round_bytes"] == update_bytes(WEIGHTS, 3) + OVERHEAD_BYTES
    assert "context_bits" not in table[0]
    assert not any("text may leave" in line or "no noise" in line for line in advice(plan))
    assert [chart.y.label for chart in plan_charts(plan)] == ["bits per weight", "way from base to mixture (%)"]


def test_a_total_is_shared_out_as_in_the_federation() -> None:
    source = updates(**{"budget.context_total": 100.0, "nodes[0].weight": 16.0})
    budget = update_budget(source.config, weights=WEIGHTS, contexts=92160, vocab=1024)
    plan = forecast(source.inputs, total=source.total)
    assert plan.bits.tolist() == pytest.approx(budget.bits(1).tolist())
    assert plan.bits[0] > plan.bits[1]


def test_links_and_deadlines_hold_updates_too() -> None:
    source = updates(**{"nodes[0].context_bits": None, "nodes[0].uplink": "256 kbit/s", "budget.deadline": 9.0})
    plan = forecast(source.inputs)
    assert plan.held_by[0] == "link"
    assert plan.seconds[0] == pytest.approx(9, abs=0.01)
    short = updates(**{"nodes[0].context_bits": None, "nodes[0].uplink": "256 kbit/s", "budget.deadline": 3.0})
    with pytest.raises(BudgetError, match=r"'1790-1849' may send .* bytes a round, an update of 1082304 weights takes"):
        forecast(short.inputs)


def test_what_is_written_has_the_same_budget() -> None:
    source = updates()
    plan = forecast(source.inputs)
    config = configuration.parse_config(planned_configuration(source, plan), "planned")
    budget = update_budget(config, weights=WEIGHTS, contexts=92160, vocab=1024)
    assert budget.bits(1).tolist() == pytest.approx(plan.bits.tolist(), rel=1e-6)
    assert [int(bits * WEIGHTS / 8) + OVERHEAD_BYTES for bits in budget.bits(1)] == plan.bytes_sent


def test_bytes_of_kept_updates() -> None:
    """The baseline `updates` of `policies` sends three bits from every node; what is saved by entropy is 1 %."""
    kept = {row["method"]: row for row in json.loads((RESULTS / "policies.json").read_text())["rows"]}
    source = updates(**{f"nodes[{node}].context_bits": 44.0 for node in range(5)})
    plan = forecast(source.inputs)
    assert kept["updates, 3 bits"]["uplink_bytes"] == pytest.approx(sum(plan.bytes_sent), rel=0.01)


def test_adapters_of_a_named_model_are_counted() -> None:
    plan = fpld.plan("huggingface-updates")
    assert plan.inputs.updates is not None
    assert plan.inputs.updates.weights == 814_080  # as in `fpld.planner.scale`
    assert plan.inputs.vocab == 49_152
    unknown = load_config("huggingface-updates", overrides={"student.path": "someone/model"})
    with pytest.raises(InputError, match="--vocab must be given"):
        read_plan_source(unknown)
    with pytest.raises(InputError, match="--student must be given"):
        read_plan_source(unknown, vocab=50_000)


def test_a_target_is_not_about_updates(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    config_file.write_text(config_file.read_text() + "[send]\nupdates = 2.0\n")
    assert main(["plan", str(config_file), "--target", "0.1"]) == 2
    assert "not about updates" in capsys.readouterr().err
    half = [row["round_bytes"] for row in rows(capsys, "plan", str(config_file), "--total", "60kB") if "site" in row]
    assert 59_990 <= sum(half) <= 60_000


def test_labels_over_strings_have_an_alphabet(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
) -> None:
    """Before a run V is the most symbols that the alphabet may have, after it the symbols that it has."""
    text = config_file.read_text().replace("contexts = 480", "contexts = 160").replace("rounds = 3", "rounds = 1")
    text = text.replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', STUDENT)
    text = text.replace(
        "[engine]", '[codec]\nname = "samples"\n\n[labels]\nover = "strings"\nsymbols = 400\n\n[engine]'
    )
    config_file.write_text(text + "\n[baselines]\nmethods = []\n")
    source = read_plan_source(str(config_file))
    student = source.inputs.student
    assert source.inputs.vocab == 400
    assert student == read_plan_source(str(config_file), vocab=300).inputs.student  # it has tokens, whatever V
    out = tmp_path / "run"
    assert main(["run", str(config_file), "--out", str(out), "--json"]) == 0
    capsys.readouterr()
    again = read_plan_source(str(out))
    assert 257 <= again.inputs.vocab <= 400
    record = fpld.read_run(out).rounds[0]
    planned = forecast(again.inputs, total=again.total)
    assert sum(planned.bytes_sent) >= sum(record.node_bytes)
    assert main(["aggregator", "status", str(out), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert len(row["probe"]) == 64
    assert row["tokenizer"] is None


DIFFER = Path(__file__).parents[2] / "docs/tutorials/your-models-differ.md"


def test_a_plan_over_strings_changes_no_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The tutorial's configuration: V is that of the alphabet, the tokenizer's vocabulary another thing."""
    file = tmp_path / "differ.toml"
    file.write_text(DIFFER.read_text("utf-8").partition('title="differ.toml"\n')[2].partition("```")[0])
    before = load_config(str(file))
    planned = tmp_path / "planned.toml"
    found = rows(capsys, "plan", str(file), "--caps", "48bits", "--rounds", "2", "--write", str(planned))
    after = load_config(str(planned))
    assert after.tokenizer == before.tokenizer
    assert after.labels == before.labels
    assert [node.context_bits for node in after.nodes] == [48.0] * 3
    assert [node.bits for node in after.nodes] == [None] * 3
    assert after.run.rounds == 2
    unchanged = {"nodes", "run"}
    assert after.model_dump(exclude=unchanged) == before.model_dump(exclude=unchanged)
    assert {row["sends"] for row in found if row["table"] == "expected"} == {"labels"}
    lines = advice(forecast(read_plan_source(str(planned)).inputs))
    assert not any("[written]" in line or "[send]" in line for line in lines)
    assert any("labels over strings" in line for line in lines)
