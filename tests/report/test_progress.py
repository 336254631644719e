"""The round in progress: what is written while nodes answer, fail or are late, and what the live page says of it."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING

from fpld.federation.callbacks import ProgressFile
from fpld.federation.record import Incident, RoundRecord
from fpld.protocol import Receipt
from fpld.report.run import read_run_data
from fpld.storage.run_folder import RunFolder
from fpld.web.state import RunIndex

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_leaves_its_last_round_closed(finished: Path) -> None:
    run = read_run_data(finished)
    assert run.progress is not None
    assert (run.progress.round, run.progress.rounds, run.progress.phase) == (2, 2, "closed")
    assert [node.state for node in run.progress.nodes] == ["accepted"] * 3
    last = run.trace[-1]
    assert [node.bytes for node in run.progress.nodes] == last.node_bytes
    assert sum(last.node_bytes) == last.sent
    assert all(seconds is not None and seconds > 0 for seconds in last.answers)
    assert all(noise is not None and noise > 0 for noise in last.noise)


def test_who_answered_who_failed_who_is_late(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    for name in ("config.toml", "versions.json"):
        shutil.copy(finished / name, folder / name)
    state = RunIndex(tmp_path)
    assert state.runs()[0]["state"] == "preparing"
    progress = ProgressFile(RunFolder(folder / "fpld"), ["north", "east", "south", "west"], rounds=2, deadline=9.0)
    progress.opened(1, [1.5, 4.0, 4.0, 4.0])
    stamp = state.stamp("live")
    progress.answered(Receipt(1, 0, "accepted"), 1234, 3)
    progress.answered(Receipt(1, 1, "refused", "payload must be 5 bytes"), 99, 3)
    progress.missing(1, Incident("south", "late", "no answer within 9 s"))
    progress.missing(1, Incident("west", "busy", "with an earlier round"))
    progress.missing(1, Incident("nobody", "failed", "x"))  # not of this run: no one's line
    end = time.monotonic() + 10
    while "busy" not in (folder / "fpld/progress.json").read_text():  # a moment later, for all at once
        assert time.monotonic() < end
    assert state.stamp("live") != stamp
    nodes = json.loads((folder / "fpld/progress.json").read_text())["nodes"]
    assert [(node["state"], node["reason"]) for node in nodes] == [
        ("accepted", ""),
        ("refused", "payload must be 5 bytes"),
        ("late", "no answer within 9 s"),
        ("busy", "with an earlier round"),
    ]
    empty = RoundRecord(1, [], [], [], 0, 0)
    assert progress.annotate(empty).answers[2] is None
    live = state.run("live")["live"]
    for part in (
        "Round 1 of 2: collecting",
        "1 of 4 nodes have answered",
        "1,333 bytes",
        "late",
        "no answer within 9 s",
    ):
        assert part in live
    assert state.runs()[0]["state"] == "round 1 of 2: collecting"
