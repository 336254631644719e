"""Baselines: FedAvg in any number of rounds and in one bit, the mixture as the limit, and no training done twice."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import config as configuration
from fpld import registry, students
from fpld.baselines import baseline_jobs, baseline_work
from fpld.cli import main
from fpld.codecs.updates import encode_update
from fpld.engines.local import run_local
from fpld.engines.pool import Inline, Lanes
from fpld.federation import workers as jobs
from fpld.node.training import average
from fpld.numerics import softmax
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import HELDOUT, OWN_MODEL
from fpld.students.heldout import heldout_losses
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.types import Arrays

__all__ = ["config_file"]

METHODS = '["alone", "pooled", "fedavg", "fedavg-1bit", "ensemble"]'


def changed(file: Path, baselines: str, methods: str = METHODS) -> configuration.Config:
    text = file.read_text().replace("rounds = 3", "rounds = 1").replace("steps = 25", "steps = 24")
    return configuration.parse_config(f"{text}\n[baselines]\nmethods = {methods}\n{baselines}", "test")


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps of every training that baselines ask for."""
    found: list[int] = []
    train = jobs.finetune

    def counted(base: Path, state: Arrays | None, texts: Any, steps: int, *others: Any) -> Arrays:
        found.append(steps)
        return train(base, state, texts, steps, *others)

    monkeypatch.setattr(jobs, "finetune", counted)
    return found


@pytest.mark.parametrize(
    ("method", "section", "jobs", "steps"),
    [
        ("alone", "", 3, 0),  # the federation has trained and kept the models
        ("pooled", "", 2, 24),
        ("pooled-all", "", 2, 3 * 24),
        ("feddf", "", 2, 60),
        ("feddf", "feddf_steps = [10, 30]\n", 4, 40),
        ("feddf-kbit", "update_bits = [1, 3, 32]\n", 4, 2 * 60),
        ("feddf-written", "feddf_steps = [5]\nupdate_bits = [3, 32]\n", 2 * (3 + 2), 2 * 5),
        ("ensemble", "", 3, 0),
        ("fedavg", "", 1, 0),
        ("fedavg", "rounds = [1, 2, 3]\n", 3 + 3 * 5, 2 * 3 * 24),
        ("fedavg-1bit", "fedavg_rate = 0.1\n", 1 + 3, 3 * 24),
        ("float32", "", 5, 3 * 24 + 60),
        ("plain", "", 0, 0),
    ],
)
def test_a_baseline_states_its_jobs_and_steps(
    method: str, section: str, jobs: int, steps: int, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.baselines, "_loaded", dict(registry.baselines._loaded))
    registry.baselines.register("plain", lambda _context: [])  # type: ignore[arg-type]  # states no cost
    config = changed(config_file, section, f'["{method}"]')
    work = baseline_work(config)
    assert (baseline_jobs(config), work.steps + work.distilled + work.taught) == (jobs, steps)


@pytest.mark.slow
def test_one_round_trains_nothing_twice(config_file: Path, tmp_path: Path, trainings: list[int]) -> None:
    out = tmp_path / "run"
    rows = {row["method"]: row for row in run_local(changed(config_file, ""), "", out, resume=False)}
    assert trainings == [24]  # pooled
    base = out / "base-0.safetensors"
    length = 16
    texts = [read_arrays(out / HELDOUT)[0][str(node)] for node in range(3)]
    files = [out / f"fpld/nodes/{node}/{OWN_MODEL}" for node in range(3)]
    models = [students.load(file) for file in files]
    for model, name in zip(models, ("north", "east", "south"), strict=True):
        assert rows[f"alone: {name}"]["heldout_loss"] == np.mean(heldout_losses(model, texts, length))
    mean = students.load(base)
    start = mean.state()
    mean.load_state(average([model.state() for model in models]))
    assert rows["fedavg"]["heldout_loss"] == pytest.approx(np.mean(heldout_losses(mean, texts, length)), rel=1e-5)
    assert rows["fedavg"]["uplink_bytes"] == rows["fedavg"]["downlink_bytes"] == 3 * 4 * mean.parameters
    assert rows["ensemble"]["heldout_loss"] == pytest.approx(np.mean([mixed(models, text) for text in texts]), rel=1e-6)
    bits = len(encode_update(start, bits=1, seed=0))
    assert rows["fedavg-1bit"]["uplink_bytes"] == 3 * bits < rows["fedavg"]["uplink_bytes"] / 30
    assert rows["fedavg-1bit"]["heldout_loss"] < rows["base"]["heldout_loss"]
    behind, error = behind_by_windows(models[0], students.load(out / "student.safetensors"), texts)
    assert rows["alone: north"]["behind"] == pytest.approx(behind, abs=1e-5)
    assert rows["alone: north"]["behind_se"] == pytest.approx(error, rel=1e-3)
    assert all("windows" not in row for row in rows.values())


def mixed(models: list[students.Student], text: Any) -> float:
    """The loss of the mean of the models' probabilities, by the definition, in windows of 16 tokens."""
    whole = (len(text) - 1) // 16 * 16
    parts = [text[:whole].reshape(-1, 16), text[whole:-1][None]]
    chances = [np.mean([softmax(model.logits(part)) for model in models], axis=0) for part in parts if part.size]
    return float(-np.log(np.concatenate(chances)[np.arange(len(text) - 1), text[1:]]).mean())


def behind_by_windows(model: students.Student, student: students.Student, texts: list[Any]) -> tuple[float, float]:
    """How far a model is behind the student, window by window, and the standard error of the mean over texts."""
    means = []
    variances = []
    for text in texts:
        cuts = [text[start : start + 17] for start in range(0, len(text) - 16, 16)]
        differences = [(model.loss(cut, 16)[0] - student.loss(cut, 16)[0]) / 16 for cut in cuts]
        means.append(np.mean(differences))
        variances.append(np.var(differences, ddof=1) / len(differences))
    return float(np.mean(means)), float(np.sqrt(np.sum(variances)) / len(texts))


@pytest.mark.slow
def test_rounds_split_the_same_steps_and_share_their_first_round(
    config_file: Path, tmp_path: Path, trainings: list[int]
) -> None:
    rows = run_local(
        changed(config_file, "rounds = [1, 2, 3]\nfedavg_rate = 0.1\n"), "", tmp_path / "run", resume=False
    )
    found = {row["method"]: row for row in rows}
    # Pooled; one round; two rounds, of which the second differs by the channel; three, of which two do.
    assert sorted(trainings) == sorted([24] + 3 * [24] + 3 * 3 * [12] + 5 * 3 * [8])
    for name in ("fedavg", "fedavg-1bit"):
        sent = [found[f"{name}, {label}"]["uplink_bytes"] for label in ("1 round", "2 rounds", "3 rounds")]
        assert sent == [sent[0], 2 * sent[0], 3 * sent[0]]
    assert len({row["heldout_loss"] for name, row in found.items() if name.startswith("fedavg")}) == 6


def test_a_lower_lane_goes_first_and_errors_reach_who_asked() -> None:
    order: list[int] = []
    lanes = Lanes(ThreadPoolExecutor(1), 1)
    gate = threading.Event()
    lanes.allow(1)
    first: Future[Any] = lanes.lane(1).submit(gate.wait, 10)
    waiting: list[Future[Any]] = [lanes.lane(number).submit(order.append, number) for number in (1, 1, 0, 0)]
    failing = lanes.lane(0).submit(int, "x")
    time.sleep(0.01)
    gate.set()
    for future in (first, *waiting):
        future.result(timeout=10)
    assert order == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(timeout=10)
    pool = Inline()
    assert Lanes(pool, 0).lane(1) is pool


def test_the_second_lane_waits_for_its_turn_and_never_has_the_last_worker() -> None:
    lanes = Lanes(ThreadPoolExecutor(2), 2)
    gate = threading.Event()
    held = [lanes.lane(1).submit(gate.wait, 10) for _ in range(3)]
    time.sleep(0.05)
    assert not any(future.done() for future in held)
    assert not lanes.opened.is_set()
    lanes.allow(1)
    assert lanes.opened.is_set()
    assert lanes.lane(0).submit(int, "3").result(timeout=10) == 3  # a worker is left, though three are waiting
    lanes.abandon()
    assert [future.cancelled() for future in held] == [False, True, True]
    assert lanes.lane(1).submit(int, "3").cancelled()
    gate.set()
    assert held[0].result(timeout=10)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_baselines_come_after_the_nodes_of_the_last_round(
    workers: int, config_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config_file.write_text(config_file.read_text().replace("workers = 0", f"workers = {workers}"))
    with caplog.at_level(logging.INFO, "fpld"):
        assert main(["run", str(config_file), "--out", str(tmp_path / "out"), "--json"]) == 0
    said = [record.getMessage() for record in caplog.records]
    first = min(i for i, text in enumerate(said) if text.startswith("baseline"))
    assert first > said.index("fpld, round 3: local training at 3 nodes; next: combining")
    ended = next(i for i, text in enumerate(said) if text.startswith("fpld, round 3: held-out loss"))
    assert workers > 0 or first > ended  # one process has nothing to fill


def test_a_federation_that_fails_begins_no_baseline(config_file: Path, tmp_path: Path) -> None:
    config_file.write_text(config_file.read_text().replace("[distill]\n", "[distill]\nrate = 1e30\n"))
    assert main(["run", str(config_file), "--out", str(tmp_path / "out"), "--json"]) == 2
    assert list((tmp_path / "out").glob("baseline-*")) == []
