"""A node whose trainings have two processes, by its node.toml: the payload of one process, and one limit on memory."""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from fpld.engines.flower.site.resources import run_sandboxed, tree_bytes
from fpld.errors import ResourceError
from fpld.seeds import derive_key
from fpld.storage.run_folder import RunFolder
from tests.engines.flower.conftest import Deployment
from tests.federation.test_processes_in_runs import ONE, ONE_ROUND, STUDENT, TWO, payloads

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 400_000_000  # bytes that a child of the work takes


@pytest.mark.slow
def test_a_node_in_two_processes_sends_the_same_labels(tmp_path: Path) -> None:
    sent = []
    for name, compute in (("one", ONE), ("two", TWO)):
        folder = tmp_path / name
        folder.mkdir()
        deployment = Deployment(folder, [STUDENT, ONE_ROUND])
        # A deployment draws its key at random, and dither depends on it.
        RunFolder(folder / "flower").write_json("session.json", {"session": "ab" * 32, "key": derive_key(1).hex()})
        deployment.allow(["labels"], "north", more=compute)
        deployment.serve(deployment.grid())
        sent.append(payloads(folder / "nodes/north"))
    assert len(sent[0]) == 1
    assert sent[0] == sent[1]


def _grow() -> None:
    held = bytearray(SIZE)
    held[::4096] = b"x" * len(held[::4096])  # touched, or it is not there
    time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_the_processes_of_a_training_counts_too() -> None:
    def work() -> list[bytes]:
        child = multiprocessing.get_context("fork").Process(target=_grow, daemon=True)
        child.start()
        child.join()
        return []

    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"most_memory in node\.toml allows"):
        run_sandboxed(work, str, memory=SIZE)
    assert time.monotonic() - started < 50
    assert tree_bytes(2**22 + 1) == 0  # no such process
