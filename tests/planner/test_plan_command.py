"""`fpld plan` as its users call it: tables, JSON, a configuration that runs, errors that say what would be feasible."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from fpld import config as configuration
from fpld.cli import main
from fpld.federation import cost
from fpld.planner import forecast
from fpld.planner.inputs import read_plan_source
from tests.federation.conftest import config_file
from tests.helpers import check_refused

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]

LINKS = ["--links", "2Mbit/s,2 Mbit/s,384kbit/s,256 kbit/s"]
SIZES = ["--contexts", "16384", "--vocab", "1024"]
PLAN = ["plan", *LINKS, *SIZES, "--clips", "4,4,8,8", "--deadline", "300"]


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    table: list[dict[str, Any]] = json.loads(captured.out)["rows"]
    assert all(not isinstance(value, (dict, list)) for row in table for value in row.values())
    return table


def test_json_has_sites_and_policies(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, *PLAN, "--total", "20", "--rounds", "4", "--samples", "30000")
    sites = [row for row in table if row["table"] == "sites"]
    policies = {row["policy"]: row for row in table if row["table"] == "policies"}
    assert [row["held_by"] for row in sites] == [None, None, None, "link"]
    assert sum(row["bits"] for row in sites) == pytest.approx(20)
    assert set(policies) == {"optimal", "uniform", "inverse"}
    best = policies["optimal"]
    assert best["noise"] < policies["uniform"]["noise"] < policies["inverse"]["noise"]
    assert not {"lower", "upper", "kl_at_most"} & set(best)  # (SE) fails at these clip levels: no number for a bound
    assert all(any(row[name] is not None for row in sites) for name in sites[0])
    fine = rows(capsys, *PLAN[:-1], "3000", "--total", "40", "--samples", "30000")
    best = next(row for row in fine if row["table"] == "policies")
    assert best["kl_at_most"] == pytest.approx(best["upper"] + 0.5 / (4 * 30000))


def test_a_size_is_a_total_too(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, *PLAN, "--total", "40MB", "--caps", "12MB")
    sites = [row for row in table if row["table"] == "sites"]
    assert 40e6 - 4 <= sum(row["round_bytes"] for row in sites) <= 40e6  # frames and all
    assert max(row["round_bytes"] for row in sites) <= 12e6


def test_the_inverse_question(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, *PLAN, "--target", "0.01")
    answers = {row["answer"].partition(" (")[0]: row for row in table if row.get("policy") == "optimal"}
    assert set(answers) == {"least total", "shortest deadline"}
    assert all(row["kl_at_most"] <= 0.01 for row in answers.values())
    assert answers["least total"]["round_bytes"] <= answers["shortest deadline"]["round_bytes"]
    assert answers["shortest deadline"]["round_seconds"] <= answers["least total"]["round_seconds"]


def test_words_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--total", "20"]) == 0
    text = capsys.readouterr().out
    for part in ("at their cap: node-4 (link)", "the next megabyte", "caution: (SE) fails", "there is no lower b"):
        assert part in text
    assert "\x1b" not in text


def test_what_is_written_is_what_runs(
    capsys: pytest.CaptureFixture[str],
    config_file: Path,
    tmp_path: Path,
) -> None:
    # The uniform codec fills its budget to the byte; others may send less than was planned.
    uniform = config_file.read_text().replace("[engine]", '[codec]\nname = "uniform"\n\n[engine]')
    config_file.write_text(f"# kept comment\n{uniform}")
    planned = tmp_path / "planned.toml"
    arguments = ["plan", str(config_file), "--links", "2kbit/s,4kbit/s,8kbit/s", "--deadline", "120", "--total", "7"]
    table = rows(capsys, *arguments, "--caps", "4", "--rounds", "2", "--write", str(planned))
    bits = [row["bits"] for row in table if row["table"] == "sites"]
    config, text = configuration.read_config(planned)
    assert [node.context_bits for node in config.nodes] == [row["context_bits"] for row in table if "site" in row]
    assert "# kept comment" in text
    assert config.run.rounds == 2
    planned.write_text(text.replace("[engine]", "[baselines]\nmethods = []\n\n[engine]"))
    assert main(["run", str(planned), "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "run/trace.jsonl").read_text().splitlines()]
    assert lines[0]["bits_allotted"] == pytest.approx(bits)
    planned_bytes = [row["round_bytes"] for row in table if row["table"] == "sites"]
    assert lines[0]["node_bytes"] == planned_bytes

    # The finished run, as a warm-up: at its own bits the planner gives the bracket that was found there.
    again = forecast(read_plan_source(str(tmp_path / "run")).inputs)
    assert again.upper is not None
    assert again.lower is not None
    assert again.upper.bandwidth == pytest.approx(lines[-1]["bandwidth_upper"], rel=1e-6)
    assert again.lower.bandwidth == pytest.approx(lines[-1]["bandwidth_lower"], rel=1e-6)
    more = [row for row in rows(capsys, "plan", str(tmp_path / "run"), "--caps", "6") if row["table"] == "policies"]
    assert more[0]["noise"] < 2 * again.upper.bandwidth / 10


@pytest.mark.slow
def test_measured_curves_are_planned_by(capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path) -> None:
    """A run that measures loss curves gives a forecast; one that does not gives none, and says what would."""
    text = config_file.read_text().replace("[engine]", '[codec]\nname = "predictive"\n\n[engine]')
    text = text.replace("[engine]", "[baselines]\nmethods = []\n\n[engine]").replace("rounds = 3", "rounds = 2")
    config_file.write_text(text)
    assert main(["plan", str(config_file), "--total", "3"]) == 0
    printed = capsys.readouterr()
    assert "no loss is forecast" in printed.out + printed.err
    assert not any(word in printed.out for word in ("–", "not to be trusted", "bit/s", "noise"))
    config_file.write_text(text + '\n[budget]\ntotal = 3.0\nestimator = "curves"\n')
    assert main(["run", str(config_file), "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "run/trace.jsonl").read_text().splitlines()]
    table = rows(capsys, "plan", str(tmp_path / "run"), "--total", "2")
    best, *others = (row for row in table if row["table"] == "policies")
    assert best["policy"] == "curves"
    assert all(best["coding_loss"] < other["coding_loss"] for other in others)
    inputs = read_plan_source(str(tmp_path / "run")).inputs
    assert inputs.curves == tuple(tuple(pair) for pair in lines[-1]["curves"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "--contexts must be given, or CONFIG"),
        (["plan", *SIZES], "--links must be given"),
        (["plan", *SIZES, "--links", "1Mbit/s,-5kbit/s"], "must be greater than 0 and finite, got '-5kbit/s'"),
        (["plan", *SIZES, "--links", "5 furlong/s"], "must be a rate such as '64 kbit/s'"),
        (["plan", *SIZES, "--links", "5e"], "must be a rate such as"),
        ([*PLAN, "--caps", "20 bananas"], "must be a size such as '20 MB'"),
        ([*PLAN, "--caps", "1,2"], "--caps must have one entry for each of 4 nodes"),
        ([*PLAN, "--names", "one"], "--names must have one entry for each of 4 nodes"),
        ([*PLAN, "--total", "0"], "must be greater than 0, got '0'"),
        ([*PLAN, "--total", "1,2"], "--total must be one number"),
        ([*PLAN[:-1], "20"], "feasible is a deadline of at least 65.6 s, or at most"),
        ([*PLAN[:-1], "-1"], "deadline must be greater than 0"),
        (
            [*PLAN, "--target", "0.0001"],
            "what all nodes at their caps give, got 0.0001: feasible is a deadline of 420.6 s",
        ),
        (
            [*PLAN, "--caps", "4", "--target", "1e-4"],
            "target 0.0001 is out of reach: with all nodes at their caps (SE) fails: raise the caps",
        ),
        (["plan", "hospitals", "--names", "a,b,c,d,e"], "--names is for a plan without CONFIG"),
        ([*PLAN, "--peak", "3"], "--peak must be from 1/V"),
        ([*PLAN, "--policy", "best"], "allocator must be one of"),
        ([*PLAN, "--write", "x.toml"], "--write needs CONFIG"),
        (["plan", "nowhere.toml"], "one of the presets"),
        (["plan", "."], "holds no run"),
        (["plan", "hospitals", "--links", "1Mbit/s,2Mbit/s"], "--links must have one entry for each of 5 nodes"),
    ],
)
def test_nonsense_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(arguments, message, capsys)


def test_bits_per_context_stand_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON keeps its names and has those of users beside them; a bare number is the paper's, and a line says so."""
    table = rows(capsys, *PLAN, "--total", "20", "--caps", "8192bits")
    for row in table:
        if row["table"] == "sites":
            assert row["node"] == row["site"]
            assert row["context_bits"] == pytest.approx(1024 * row["bits"])
            assert row["cap_context_bits"] == pytest.approx(1024 * row["cap"])
        if row["table"] == "policies":
            assert row["total_context_bits"] == pytest.approx(1024 * row["total"]) == pytest.approx(20480)
    assert main([*PLAN, "--total", "20"]) == 0
    assert "--total 20 is taken as bits per coordinate; 20bits would be per context" in capsys.readouterr().out
    assert main([*PLAN, "--total", "20480bits"]) == 0
    assert "per coordinate" not in capsys.readouterr().out


def test_time_is_that_of_the_check(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    """What `fpld check` says of the planned configuration; without the option a line says where to ask."""
    assert main(["plan", str(config_file)]) == 0
    assert f"`fpld plan {config_file} --time` and `fpld check` estimate it" in capsys.readouterr().out
    table = rows(capsys, "plan", str(config_file), "--time")
    (row,) = [row for row in table if row["table"] == "time"]
    assert row["says"].startswith("time: about")
    assert main([*PLAN, "--time"]) == 2
    assert "--time needs CONFIG" in capsys.readouterr().err


def test_a_plan_for_which_memory_is_short_says_so_in_the_place_of_a_time(
    capsys: pytest.CaptureFixture[str], config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "_free_memory", lambda: 1000)
    table = rows(capsys, "plan", str(config_file), "--time")
    (row,) = [row for row in table if row["table"] == "time"]
    assert row["says"].startswith("time: not estimated; memory: about")
    assert row["says"].endswith("are free")
