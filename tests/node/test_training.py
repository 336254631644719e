"""A run whose nodes promise privacy: what they spend, what the folder and the page say, what repeats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld.cli import main
from fpld.config import PrivacySection, read_config
from fpld.config.sections import TrainSection
from fpld.data import ProbeSet
from fpld.errors import InputError
from fpld.node.round import NodePaths, learn_from_student
from fpld.node.spec import NodeFiles, NodeSpec
from fpld.node.training import make_student, record_dp_steps, run_epsilon
from fpld.privacy import DpSteps, epsilon
from fpld.report.page import report_page
from fpld.report.run import read_run_data
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.storage.run_folder import ADOPTED_MODEL, OWN_MODEL
from fpld.students.configs import parse_student
from tests.audit.test_audit import SMALL
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]

TINY_TRANSFORMER = {"kind": "transformer", "layers": 1, "width": 16, "heads": 2, "length": 8, "batch": 4}


def configure(file: Path, section: str) -> None:
    """Make the small federation one of tiny transformers, two rounds, a node's own training beside it."""
    text = file.read_text().replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', SMALL)
    for old, new in (("rounds = 3", "rounds = 2"), ("steps = 25", "steps = 5"), ("steps = 60", "steps = 20")):
        text = text.replace(old, new)
    file.write_text(f'{text}\n[codec]\nname = "uniform"\n\n[baselines]\nmethods = ["alone"]\n{section}')


@pytest.mark.slow
def test_a_private_run_keeps_its_promise_and_says_so(config_file: Path, tmp_path: Path) -> None:
    configure(config_file, "\n[privacy]\nepsilon = 2.0\nbatch = 3\n")
    for out in ("one", "two"):
        assert main(["run", str(config_file), "--out", str(tmp_path / out), "--json"]) == 0
    rows = json.loads((tmp_path / "one/privacy.json").read_text())
    assert [row["node"] for row in rows] == ["north", "east", "south"]
    for row in rows:
        assert row["steps"] == 10
        assert row["epsilon"] == pytest.approx(epsilon([DpSteps(row["noise"], row["rate"], 10)], 1e-5))
        assert 1.9 < row["epsilon"] <= row["promised"] == 2.0
    # The draws of a simulation follow from its seed.
    states = [read_arrays(tmp_path / out / "student.safetensors")[0] for out in ("one", "two")]
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
    # Which student is best is not asked of private text.
    best = read_arrays(tmp_path / "one/student-best.safetensors")[0]
    assert all(np.array_equal(states[0][name], best[name]) for name in best)
    page = report_page([read_run_data(tmp_path / "one")])
    assert "What each node&#39;s training has spent of its guarantee" in page
    assert "epsilon 2.0 for a document" in page


@pytest.mark.slow
def test_few_numbers_are_trained_with_all_units_in_each_step(config_file: Path, tmp_path: Path) -> None:
    section = '\n[privacy]\nepsilon = 50.0\ntrained = "subspace"\nnumbers = 200\nbatch = "full"\naverage = 0.5\n'
    configure(config_file, section)
    changed = config_file.read_text().replace('methods = ["alone"]', 'methods = ["alone", "pooled"]')
    config_file.write_text(changed)
    with pytest.raises(InputError, match=r"probe\.contexts must be at least 512"):
        read_config(config_file)
    config_file.write_text(changed.replace("contexts = 480", "contexts = 640"))
    assert main(["run", str(config_file), "--out", str(tmp_path / "run"), "--json"]) == 0
    for row in json.loads((tmp_path / "run/privacy.json").read_text()):
        assert (row["rate"], row["steps"]) == (1.0, 10)
        assert row["epsilon"] == pytest.approx(epsilon([DpSteps(row["noise"], 1.0, 10)], 1e-5))
        assert 45 < row["epsilon"] <= row["promised"] == 50.0
    losses = {row["method"]: row["heldout_loss"] for row in json.loads((tmp_path / "run/result.json").read_text())}
    assert len(losses) == 6
    assert all(loss < 2 * losses["base"] for loss in losses.values())


@pytest.mark.parametrize("private", [True, False])
def test_with_privacy_a_nodes_own_model_learns_from_the_last_student_alone(private: bool, tmp_path: Path) -> None:
    """Its text has no noise here: with [privacy] the model must be the same whatever that text is."""
    ProbeSet(np.arange(64, dtype=np.int32).reshape(8, 8) % 16, 16, "0" * 64).save(tmp_path / "probe.json")
    own, shared = (make_student(parse_student(TINY_TRANSFORMER), 16, seed) for seed in (1, 2))
    own.save(tmp_path / "base")
    shared.save(tmp_path / "student")
    train = TrainSection(steps=4, rate=0.01)
    spec = NodeSpec(
        name="north",
        index=0,
        seed=0,
        rounds=2,
        local=train,
        distill=train,
        length=8,
        heldout=0.1,
        heldout_tokens=16,
        files=NodeFiles(probe="probe.json", tokenizer="tokenizer.json", base="base", student="student"),
        privacy=PrivacySection(epsilon=3.0) if private else None,
    )
    adopted = []
    for seed in (3, 4):
        folder = tmp_path / f"node-{seed}"
        text = folder / "text.safetensors"
        write_arrays(text, {"tokens": np.random.default_rng(seed).integers(0, 16, 400)}, {})
        own.save(folder / OWN_MODEL, run="ab")
        learn_from_student(spec, NodePaths(folder, tmp_path, text), shared.state(), "ab")
        adopted.append(read_arrays(folder / ADOPTED_MODEL)[0])
    assert any(not np.array_equal(adopted[0][name], value) for name, value in own.state().items())
    assert all(np.array_equal(adopted[0][name], adopted[1][name]) for name in adopted[0]) == private


def test_a_round_is_spent_once_and_rounds_add_up(tmp_path: Path) -> None:
    assert run_epsilon(tmp_path, 1e-5) is None
    one = DpSteps(8.0, 0.5, 20)
    for round in (1, 2, 2):
        record_dp_steps(tmp_path, round, one)
    assert run_epsilon(tmp_path, 1e-5) == epsilon([one._replace(steps=40)], 1e-5)
    (tmp_path / "privacy.json").write_text("[{}]")
    with pytest.raises(InputError, match=r"privacy\.json is damaged"):
        run_epsilon(tmp_path, 1e-5)
