"""`python -m benchmarks.rules`: its federations are those of `fpld run`, and it refuses what it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fpld
from benchmarks import rules
from fpld import config as configuration
from fpld.cli import main
from fpld.data import load_probe
from fpld.node.training import make_student
from fpld.protocol import aggregator
from fpld.protocol.fast_paths import combine_replies
from fpld.students.configs import parse_student

if TYPE_CHECKING:
    from fpld.protocol.combine import Replies

PAGE = Path(__file__).parent.parent.parent / "docs/rules.md"


@pytest.fixture
def tiny(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small federation stands for all corpora."""
    monkeypatch.setattr(rules, "CORPORA", {"tiny": lambda: configuration.read_config(config_file)[0]})
    return config_file


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert rules.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows: list[dict[str, Any]] = json.loads(captured.out)["rows"]
    return rows


@pytest.mark.slow
def test_a_rule_ends_where_a_run_with_float32_logits_ends(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(capsys, "--corpora", "tiny", "--seeds", "5", "--rules", "mean,median,mixture", "--rounds", "2")
    assert all(list(row) == ["corpus", "seed", "round", "method", "heldout_loss", "student_loss"] for row in rows)
    text = tiny.read_text().replace("rounds = 3", "rounds = 2")
    text = text.replace("bits = 1.5", "bits = 32.0").replace("bits = 4.0", "bits = 32.0")
    tiny.write_text(text + '\n[codec]\nname = "float32"\n\n[baselines]\nmethods = []\n')
    assert main(["run", str(tiny), "--out", str(tmp_path / "run"), "--json"]) == 0
    run = {row["method"]: row["heldout_loss"] for row in json.loads(capsys.readouterr().out)["rows"]}
    ends = {row["method"]: row["student_loss"] for row in rows if row["round"] == 2}
    assert rows[0]["heldout_loss"] == pytest.approx(run["base"], abs=1e-9)
    assert ends["mixture"] == pytest.approx(run["fpld"], abs=1e-4)
    assert abs(ends["mean"] - ends["mixture"]) > 1e-3  # so the line above can fail
    rounds = [row["round"] for row in rows if row["student_loss"] is not None]
    assert rounds == [1, 1, 1, 2, 2]  # median has no second round


def test_a_run_tells_the_audit_what_follows_each_context(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the view of groups is gone, and a backdoor is not seen."""
    given: list[Replies] = []

    def combine(replies: Replies, *others: Any) -> Any:
        given.append(replies)
        return combine_replies(replies, *others)

    monkeypatch.setattr(aggregator, "combine_replies", combine)
    config_file.write_text(config_file.read_text() + '\n[combine]\nrule = "guarded"\n')
    values = {"run.rounds": 1, "baselines.methods": []}
    fpld.run(config_file, out=tmp_path / "run", overrides=values)
    assert len(given) == 1
    assert given[0].next_tokens is not None
    assert np.array_equal(given[0].next_tokens, load_probe(tmp_path / "run" / "probe.json").following)


def test_of_one_node_every_rule_makes_that_node() -> None:
    student = make_student(parse_student({"kind": "ngram", "order": 2, "buckets": 64, "batch": 8}), 256, 0)
    text = np.random.default_rng(0).integers(0, 256, 200).astype(np.int32)
    student.finetune(text, steps=5, seed=0)
    nats, count = student.loss(text, 16)  # 12 windows, and one of 7 tokens
    losses = rules.ensemble_losses([student], ["mean", "median", "mixture"], [text], 16)
    assert losses == pytest.approx(dict.fromkeys(["mean", "median", "mixture"], nats / count), rel=1e-5)


def test_the_summary_is_means_over_seeds() -> None:
    def row(seed: int, method: str, heldout: float, student: float | None) -> dict[str, Any]:
        return {
            "corpus": "c",
            "seed": seed,
            "round": 1,
            "method": method,
            "heldout_loss": heldout,
            "student_loss": student,
        }

    rows = [row(seed, "node: a", 9.0, None) for seed in (0, 1)]
    rows += [
        row(0, "mean", 1.0, 2.0),
        row(0, "mixture", 1.0, 1.0),
        row(1, "mean", 2.0, 3.0),
        row(1, "mixture", 1.0, 4.0),
    ]
    assert rules.summary(rows) == [
        {"corpus": "c", "round": 1, "rule": "mean", "ensemble": 1.5, "student": 2.5, "best": "1 of 2 seeds"},
        {"corpus": "c", "round": 1, "rule": "mixture", "ensemble": 1.0, "student": 2.5, "best": "1 of 2 seeds"},
    ]


def test_a_table_for_people(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rules.main(["--corpora", "tiny", "--seeds", "5", "--rounds", "1", "--rules", "mixture"]) == 0
    out = capsys.readouterr().out
    assert "node: north" in out
    assert "1 of 1 seeds" in out


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--corpora", "moon", "--corpora must be of sotu, pubmed, wikipedia, pubmed-alike, got 'moon'"),
        ("--seeds", "0,x", "--seeds must be whole numbers of at least 0 with commas between them, got 'x'"),
        (
            "--rules",
            "vote",
            "rule must be one of fitted, geometric, guarded, mean, median, mixture, precision, trimmed, got 'vote'",
        ),
        ("--rounds", "0", "--rounds must be at least 1, got 0"),
    ],
)
def test_bad_input_is_named(option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        rules.main([option, value])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", rules.CORPORA)
def test_configurations_are_sound(name: str) -> None:
    config = rules.CORPORA[name]()
    assert configuration.Config.model_validate(config.model_dump()) == config


def test_the_page_is_about_the_default() -> None:
    said = " ".join(PAGE.read_text().split())
    assert f"The default of `[combine] rule` is `{configuration.CombineSection().rule}`" in said
