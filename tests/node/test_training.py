"""A run whose nodes promise privacy: what they spend, what the folder and the page say, what repeats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld.cli import main
from fpld.errors import InputError
from fpld.node.training import record_dp_steps, run_epsilon
from fpld.privacy import DpSteps, epsilon
from fpld.report.page import report_page
from fpld.report.run import read_run_data
from fpld.storage.arrays import read_arrays
from tests.audit.test_audit import SMALL
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]


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
    assert "What each node&#39;s training has spent of its promise" in page
    assert "epsilon 2.0 for a document" in page


def test_a_round_is_spent_once_and_rounds_add_up(tmp_path: Path) -> None:
    assert run_epsilon(tmp_path, 1e-5) is None
    one = DpSteps(8.0, 0.5, 20)
    for round in (1, 2, 2):
        record_dp_steps(tmp_path, round, one)
    assert run_epsilon(tmp_path, 1e-5) == epsilon([one._replace(steps=40)], 1e-5)
    (tmp_path / "privacy.json").write_text("[{}]")
    with pytest.raises(InputError, match=r"privacy\.json is damaged"):
        run_epsilon(tmp_path, 1e-5)
