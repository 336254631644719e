"""What long loops say: lines every few seconds, points of curves, from worker processes too; and no result changes."""

from __future__ import annotations

import json
import logging
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld import progress
from fpld.cli import main
from fpld.engines.pool import make_pool
from fpld.federation.telemetry import loop_files
from fpld.progress import LoopProgress, ProgressLabel, followed_by, labelled, report_elapsed, run_labelled
from fpld.storage.run_folder import CURVES, NOW, RunFolder
from fpld.students.ngram import NGram, NGramConfig
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]


def loop(steps: int) -> None:
    """Take steps with losses 1, 2, 3, ..."""
    counted = LoopProgress("training", steps, tokens=8)
    for step in range(steps):
        counted.add(loss=float(step + 1))


def train() -> dict[str, np.ndarray]:
    student = NGram(NGramConfig(vocab=4, buckets=16))
    student.finetune(np.tile(np.arange(4, dtype=np.int32), 50), steps=30, seed=0)
    return student.state()


def points(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / CURVES).read_text().splitlines()]


def test_a_line_says_step_loss_speed_time_left_and_what_is_next(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(np.arange(0.0, 1000.0, 0.5).tolist())
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, "fpld"), labelled(ProgressLabel("fpld", 2, "north")), followed_by("coding"):
        loop(40)
    first = caplog.records[0]
    assert first.getMessage().startswith("fpld, round 2, north: training, step 6 of 40, loss 6.0000, ")
    assert first.getMessage().endswith(" left; next: coding")
    said = vars(first)["progress"]
    assert said["tokens_per_second"] == pytest.approx(8 * 6 / (said["left"] / (40 / 6 - 1)))
    assert said["next"] == "coding"
    assert 3 < len(caplog.records) < 10  # every few seconds of this clock, and not at every step


def test_what_cannot_be_counted_says_that_it_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.05)
    with caplog.at_level(logging.INFO, "fpld"), labelled(ProgressLabel("fpld", 2)), followed_by("distilling"):
        with report_elapsed("combining"):
            time.sleep(0.2)
        said = len(caplog.records)
        time.sleep(0.2)
    assert 1 <= said == len(caplog.records)  # and no more when it has ended
    assert caplog.records[0].getMessage() == "fpld, round 2: combining, 0 s so far; next: distilling"
    assert (vars(caplog.records[0])["progress"]["total"], vars(caplog.records[0])["progress"]["left"]) == (None, None)


@pytest.mark.parametrize("steps", [1, 7, 100, 101, 5003])
def test_a_curve_has_at_most_a_hundred_points_and_loses_no_step(steps: int, tmp_path: Path) -> None:
    with loop_files(RunFolder(tmp_path)):
        loop(steps)
    found = points(tmp_path)
    assert len(found) == min(steps, 100)
    assert found[-1]["step"] == steps
    ends = [0, *(int(str(point["step"])) for point in found)]
    means = [(a + 1 + b) / 2 for a, b in pairwise(ends)]  # of the losses between two points
    assert [point["loss"] for point in found] == means


def test_worker_processes_tell_and_results_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train()
    with loop_files(RunFolder(tmp_path)), make_pool(1) as pool:
        there = pool.submit(run_labelled, ProgressLabel("fpld", 1, "north"), train).result()
        pool.submit(logging.getLogger("fpld.test").warning, "from a worker").result()
    assert all(np.array_equal(alone[name], there[name]) for name in alone)
    assert [point["step"] for point in points(tmp_path)] == list(range(1, 31))
    assert {point["model"] for point in points(tmp_path)} == {"north"}
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.0)
    with loop_files(RunFolder(tmp_path)):
        here = run_labelled(ProgressLabel("fpld", 2, "east"), train)
    assert all(np.array_equal(alone[name], here[name]) for name in alone)
    (last,) = json.loads((tmp_path / NOW).read_text())["loops"]
    assert (last["model"], last["done"], last["total"], last["left"]) == ("east", 30, 30, 0.0)


def test_a_disk_that_refuses_stops_no_training(tmp_path: Path) -> None:
    with loop_files(RunFolder(tmp_path / "missing")):
        loop(3)
    assert not (tmp_path / "missing").exists()


@pytest.mark.slow
def test_every_loop_of_a_run_says_what_is_next(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "fpld"):
        assert main(["run", str(config_file), "--out", str(tmp_path / "out"), "--json"]) == 0
    said = [vars(record)["progress"] for record in caplog.records if hasattr(record, "progress")]
    following = {(each["method"], each["what"], each["next"]) for each in said}
    assert all(line for *_, line in following)
    assert {
        ("", "training", "the first round"),
        ("fpld", "predicting the probe set", "local training at the nodes"),
        ("fpld", "training", "coding the probe set's logits"),
        ("fpld", "computing logits", "sending them"),
        ("fpld", "distillation", "measuring its distance to the target"),
        ("fpld", "computing logits", "noting its loss"),
        ("baseline", "training", "evaluating it"),
    } <= following


@pytest.mark.slow
def test_a_run_leaves_the_curves_of_base_nodes_and_student(config_file: Path, tmp_path: Path) -> None:
    assert main(["run", str(config_file), "--out", str(tmp_path / "out"), "--json"]) == 0
    found = {(p["method"], p["round"], p["model"], p["what"]) for p in points(tmp_path / "out")}
    assert ("", 0, "base-0", "training") in found
    for number in (1, 2, 3):
        assert ("fpld", number, "student", "distillation") in found
        assert {("fpld", number, name, "training") for name in ("north", "east", "south")} <= found
