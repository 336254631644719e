"""Callbacks: the file of the round in progress, and that no result depends on who watches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import config as configuration
from fpld.engines.local import LocalEngine
from fpld.engines.pool import Inline
from fpld.federation.callbacks import ProgressFile, RoundLog
from fpld.federation.prepare import prepare
from fpld.federation.record import RoundRecord
from fpld.federation.rounds import Federation
from fpld.protocol import Receipt
from fpld.storage.run_folder import BEST_STUDENT, PROGRESS, RunFolder

if TYPE_CHECKING:
    from pathlib import Path

NODES = 300


def test_many_answers_are_few_files_and_the_last_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunFolder(tmp_path)
    written = []
    write = RunFolder.write_json

    def counted(folder: RunFolder, name: str, value: Any) -> None:
        written.append(name)
        write(folder, name, value)

    monkeypatch.setattr(RunFolder, "write_json", counted)
    progress = ProgressFile(store, [f"node {k}" for k in range(NODES)], 1, None)
    progress.opened(1, [1.0] * NODES)
    for node in range(NODES):
        progress.answered(Receipt(1, node, "accepted"), 10, 0)
    assert len(written) < 30
    end = time.monotonic() + 20
    while any(node["state"] != "accepted" for node in store.read_json(PROGRESS)["nodes"]):
        assert time.monotonic() < end  # nothing else happens, and yet the file is brought up to date
        time.sleep(0.05)


def test_few_nodes_are_written_at_once(tmp_path: Path) -> None:
    store = RunFolder(tmp_path)
    progress = ProgressFile(store, ["north", "east"], 1, None)
    progress.opened(1, [1.0, 1.0])
    time.sleep(0.01)
    progress.answered(Receipt(1, 1, "accepted"), 10, 0)
    assert [node["state"] for node in store.read_json(PROGRESS)["nodes"]] == ["working", "accepted"]


@pytest.mark.parametrize("network", [False, True])
def test_the_time_left_follows_the_rounds_after_the_first(
    network: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first round takes 30 s, others 20 s: after the first all there is to go by is that one.

    On one machine a record is complete before its round is closed, over a network within the next round.
    """
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level("INFO", logger="fpld")
    rounds = RoundLog("fpld", ["north"], 5)
    trace: list[RoundRecord] = []
    for round, seconds in enumerate((30.0, 20.0, 20.0), 1):
        rounds.opened(round, [1.0])
        if network and trace:
            now += 5.0
            rounds.completed(trace, {})
            now -= 5.0
        now += seconds
        trace.append(RoundRecord(round, [], [], [], 0, 0))
        if not network:
            rounds.completed(trace, {})
        rounds.phase(round, "closed")
    said = [line.partition("; ")[2] for line in caplog.messages if "to go" in line]
    expected = ["4 to go, about 2 min", "3 to go, about 60 s", "2 to go, about 40 s"]
    assert said == expected[: 3 - network]


@pytest.mark.slow
def test_without_callbacks_the_result_is_the_same(config_file: Path) -> None:
    """Two federations of one configuration, one of them watched by nobody: same students, losses and bytes."""
    config = configuration.parse_config(config_file.read_text(), "test")
    store = RunFolder(config_file.parent / "run")
    prepared = prepare(config, store)
    watched = Federation(config, store, prepared, "watched", pool=Inline())
    alone = Federation(config, store, prepared, "alone", pool=Inline(), callbacks=[])
    for federation in (watched, alone):
        federation.run(LocalEngine(federation, prepared.bytes_per_token))
    for name, weights in watched.student.items():
        assert np.array_equal(weights, alone.student[name])
    with_seconds, without = ([record.to_json() for record in federation.trace] for federation in (watched, alone))
    for line in with_seconds:
        assert line.pop("seconds")
        line.pop("continuations")
    for line in without:
        assert not line.pop("seconds")
        assert not line.pop("continuations")
    assert with_seconds == without
    assert not (alone.store.path / PROGRESS).exists()
    assert not (alone.store.path / BEST_STUDENT).exists()
    assert (watched.store.path / BEST_STUDENT).exists()
