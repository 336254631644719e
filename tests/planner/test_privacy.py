"""`fpld plan --epsilon`: what it reads from a configuration, what it refuses, and the numbers of the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import load_config, plan
from fpld.cli import main
from fpld.errors import InputError
from fpld.federation.prepare import deal, read_corpus
from fpld.planner.expected import expect
from fpld.planner.inputs import read_plan_source
from fpld.planner.privacy import PrivateTraining, count_documents, privacy_rows, private_training
from fpld.privacy import forecast_noise, noise_for
from tests.federation.conftest import config_file
from tests.helpers import check_refused
from tests.planner.test_plan_command import rows

if TYPE_CHECKING:
    from fpld.config import Config

__all__ = ["config_file"]

pytest.importorskip("dp_accounting")
DOCS = Path(__file__).parents[2] / "docs"
CASE = ["plan", "--epsilon", "8,1", "--units", "300,1000", "--numbers", "32768", "--nodes", "5"]
ABSTRACTS = (1007, 928, 741, 466, 305)  # of the nodes of the kept private run


def private_config(file: Path, **overrides: Any) -> Config:
    terms = {"epsilon": 8.0, "unit": "document", "batch": 2}
    student = {"kind": "transformer", "layers": 1, "width": 16, "heads": 2, "length": 16, "batch": 4}
    return load_config(str(file), overrides={"privacy": terms, "student": student, "local.rate": 1e-3, **overrides})


def test_the_page_has_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, *CASE)
    section = (DOCS / "planning.md").read_text("utf-8").partition("## What a guarantee of privacy costs")[2]
    lines = re.findall(r"^\| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    names = [name.strip("` ") for name in lines[0].split("|")]
    whole = ("units", "numbers", "units_needed")
    printed = [[f"{row[name]:,}" if name in whole else f"{row[name]:.4g}" for name in names] for row in found]
    assert sorted(line.split(" | ") for line in lines[1:]) == sorted(printed)


def test_names_of_earlier_versions_go_on_working(capsys: pytest.CaptureFixture[str]) -> None:
    for row in rows(capsys, *CASE):
        assert row["sites"] == row["nodes"] == 5
        assert row["over_sites"] == row["over_nodes"]
    assert main(CASE) == 0
    assert not re.search(r"\bsites\b|over_sites", capsys.readouterr().out)


def test_a_smaller_batch_is_sampled_and_louder() -> None:
    """Half of the units in a step: the noise multiplier of that rate, over the mean of half as many gradients."""
    case = {"units": 400, "numbers": 1000, "steps": 2, "sites": 1}
    half = forecast_noise(3.0, 1e-5, batch=200, **case)
    assert half.noise == noise_for(3.0, 1e-5, rate=0.5, steps=2)
    assert half.norm == pytest.approx(half.noise * np.sqrt(1000 / 2) / 200)
    assert half.norm > forecast_noise(3.0, 1e-5, **case).norm
    assert forecast_noise(3.0, 1e-5, batch=400, **case) == forecast_noise(3.0, 1e-5, **case)


def test_the_share_of_the_gain_is_that_of_the_best_noisy_step() -> None:
    """One step on a quadratic loss: the best mean gain of 4,000 drawn noises is the formula's within 3 %."""
    rng = np.random.default_rng(2)
    signal = np.full(400, 0.1 / 20)  # of norm 0.1
    for ratio in (0.5, 2.0):
        noise = rng.normal(0.0, ratio * 0.1 / 20, (4000, 400))
        noisy = signal + noise
        slope = float((noisy @ signal).mean())
        square = float(np.square(noisy).sum(axis=1).mean())
        best = slope**2 / (2 * square)  # of a slope - a^2 square / 2
        exact = float(signal @ signal) / 2
        assert best / exact == pytest.approx(1 / (1 + ratio**2), rel=0.03)


def test_nodes_with_unequal_text_are_averaged() -> None:
    training = PrivateTraining({"a": 300, "b": 1000, "c": 1000}, 1000, 2, None, 1e-5)
    few, many = privacy_rows(training, [8.0], 0.5)
    assert (few["node"], many["node"]) == ("a", "b, c")
    mean = np.sqrt((few["noise_over_signal"] ** 2 + 2 * many["noise_over_signal"] ** 2) / 9)
    assert few["over_nodes"] == many["over_nodes"] == pytest.approx(mean)
    assert few["gain"] == pytest.approx(0.5 / (1 + mean**2))


def test_documents_are_counted_in_the_nodes_texts(config_file: Path) -> None:
    config = private_config(config_file)
    counts = count_documents(config)
    texts = deal(config, read_corpus(config))
    for node in config.nodes:
        assert 1 <= counts[node.name] <= len(texts[node.name])
    found = private_training(config, 5000, units=None)
    assert found == PrivateTraining(counts, 5000, config.local_steps, 2, 1e-5)
    assert private_training(config, 5000, units=70).units == dict.fromkeys(counts, 70)


def test_the_subspace_and_full_batches_are_read(config_file: Path) -> None:
    keys = {"trained": "subspace", "numbers": 700, "batch": "full"}
    changes = {"probe.contexts": 800} | {f"privacy.{name}": value for name, value in keys.items()}
    config = private_config(config_file, **changes)
    found = private_training(config, 5000, units=50)
    assert (found.numbers, found.batch) == (700, None)


def test_what_cannot_be_counted_must_be_given(config_file: Path) -> None:
    with pytest.raises(InputError, match="windows are units"):
        private_training(private_config(config_file, **{"privacy.unit": "window"}), 5000, units=None)
    with pytest.raises(InputError, match=r"--units must be given: .* is not on this machine"):
        private_training(private_config(config_file, **{"nodes[0].data": "nowhere"}), 5000, units=None)
    with pytest.raises(InputError, match=r"must have \[privacy\]"):
        private_training(load_config("rivals"), 5000, units=10)


def test_the_command_reads_the_configuration(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "private.toml"
    config = private_config(config_file)
    file.write_text(config.to_toml())
    command = ["plan", str(file), "--epsilon", "8", "--units", "20"]
    (row,) = rows(capsys, *command)
    assert (row["nodes"], row["steps"], row["batch"]) == (len(config.nodes), config.local_steps, 2)
    assert row["numbers"] > 1000
    assert row["gain_share"] == pytest.approx(1 / (1 + row["over_nodes"] ** 2))
    (row,) = rows(capsys, *command, "--batch", "20", "--steps", "2", "--numbers", "9")
    assert (row["units"], row["batch"], row["steps"], row["numbers"]) == (20, 20, 2, 9)


def test_the_gain_without_privacy_is_that_of_the_same_plan_without_it(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
) -> None:
    """The steps of all rounds count, and nodes with models of their own."""
    losses = ("--base", "4", "--mixture", "3")
    own = {"kind": "transformer", "layers": 1, "width": 32, "heads": 2, "length": 16, "batch": 4}
    larger = {"probe.contexts": 8192, "distill.steps": 300, "run.rounds": 3, "baselines": {"methods": []}}
    private = private_config(config_file, **larger, **{"nodes[0].student": own})
    files = tmp_path / "private.toml", tmp_path / "public.toml"
    for file, config in zip(files, (private, private.model_copy(update={"privacy": None})), strict=True):
        file.write_text(config.to_toml())
    (row,) = rows(capsys, "plan", str(files[0]), "--epsilon", "8", "--units", "20", *losses)
    source = read_plan_source(str(files[1]))
    assert source.inputs.learning is not None
    learning = replace(source.inputs.learning, base=4.0, mixture=3.0)
    bits = plan(source.inputs, total=source.total).bits
    expected = expect("labels", contexts=source.inputs.all_contexts, bits=bits, learning=learning)
    assert expected is not None
    assert expected.gain is not None
    assert row["gain"] == pytest.approx(row["gain_share"] * expected.gain.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*CASE, "--write", "x.toml"], "--write must be left out: it is not for --epsilon"),
        ([*CASE, "--out", "x.html"], "--out must be left out"),
        ([*CASE, "--caps", "60bits"], "--caps must be left out"),
        ([*CASE, "--base", "4"], "--base and --mixture must be given together"),
        ([*CASE, "--base", "4", "--mixture", "3"], "need CONFIG"),
        ([*CASE, "--batch", "500"], "batch must be at most a node's 300 units"),
        (["plan", "--epsilon", "8", "--nodes", "0"], "--nodes must have whole numbers of at least 1, got 0"),
        (["plan", "--epsilon", "8", "--units", "9,1.5"], "--units must have whole numbers of at least 1, got 1.5"),
        (["plan", "--epsilon", "8", "--numbers", "nan"], "--numbers must have whole numbers of at least 1, got nan"),
        (["plan", "--epsilon", "8", "--steps", "0"], "--steps must be an integer from 1"),
        (["plan", "--model", "smollm2-135m", "--nodes", "0"], "--nodes must have whole numbers of at least 1"),
        (["plan", "rivals", "--student", "1B"], "--student must be at least 4 bytes, those of a weight, got 1"),
        (["plan", "rivals", "--epsilon", "8"], "CONFIG must have [privacy]"),
        (["plan", "rivals", "--units", "9"], "--units must be left out: it is not for a plan of bits"),
        (["plan", "rivals", "--model", "smollm2-135m"], "CONFIG must be left out: it is not for --model"),
        (["plan", "--model", "smollm2-135m", "--caps", "9"], "--caps must be left out: it is not for --model"),
    ],
)
def test_nothing_is_ignored(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(arguments, message, capsys)


@pytest.mark.slow
def test_the_page_has_the_forecast_of_the_run_that_it_compares() -> None:
    units = {str(index): count for index, count in enumerate(ABSTRACTS)}
    (row, *_) = privacy_rows(PrivateTraining(units, 1_082_304, 60, 96, 1e-5), [8.0], None)
    assert f"the forecast is {100 * row['gain_share']:.0f} %" in (DOCS / "planning.md").read_text("utf-8")
