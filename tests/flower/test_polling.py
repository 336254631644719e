"""How often a SuperNode asks: as its time without a message says, and less often the more nodes there are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from fpld.engines.flower.polling import MOST_NODES, Pauses, crowd, note_crowd
from tests.flower.conftest import Deployment

if TYPE_CHECKING:
    from pathlib import Path


def test_many_nodes_ask_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    pauses = Pauses(tmp_path)
    pauses.sleep(3.0)
    note_crowd(tmp_path, 200)
    pauses.sleep(3.0)
    note_crowd(tmp_path, 10**12)  # a lie: half a minute, and no more
    pauses.sleep(3.0)
    assert slept == pytest.approx([0.4, 6.0, 30.0], abs=0.1)
    for wrong in (None, "7", -3):
        note_crowd(tmp_path, wrong)
    assert crowd(tmp_path) == 1
    (tmp_path / "crowd").write_text("many")
    assert (crowd(tmp_path), crowd(None)) == (1, 1)
    assert MOST_NODES * 0.03 <= 30


def test_the_aggregator_says_how_many_they_are(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 1")])
    deployment.serve(deployment.grid())
    assert [crowd(file.parent / "flower") for file in deployment.node_files] == [3, 3, 3]
