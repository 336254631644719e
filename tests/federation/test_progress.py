"""The file of the round in progress: whole, soon, and not written for each of many answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fpld.federation.progress import FILE, Progress
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NODES = 300


def test_many_answers_are_few_files_and_the_last_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, written = RunFolder(tmp_path), []
    write = RunFolder.write_json

    def counted(folder: RunFolder, name: str, value: Any) -> None:
        written.append(name)
        write(folder, name, value)

    monkeypatch.setattr(RunFolder, "write_json", counted)
    progress = Progress(store, [f"node {k}" for k in range(NODES)], 1, None)
    progress.open(1, [1.0] * NODES)
    for node in range(NODES):
        progress.answered(node, "accepted", "", 10)
    assert len(written) < 30
    end = time.monotonic() + 20
    while any(node["state"] != "accepted" for node in store.read_json(FILE)["nodes"]):
        assert time.monotonic() < end  # nothing else happens, and yet the file is brought up to date
        time.sleep(0.05)


def test_few_nodes_are_written_at_once(tmp_path: Path) -> None:
    store = RunFolder(tmp_path)
    progress = Progress(store, ["north", "east"], 1, None)
    progress.open(1, [1.0, 1.0])
    time.sleep(0.01)
    progress.answered(1, "accepted", "", 10)
    assert [node["state"] for node in store.read_json(FILE)["nodes"]] == ["working", "accepted"]
