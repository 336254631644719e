"""A node whose trainings have two processes, by its node.toml: the payload of one process, and one limit on memory."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")

from fpld.engines.flower.site.resources import own_bytes, run_sandboxed, tree_bytes
from fpld.errors import ResourceError
from fpld.seeds import derive_key
from fpld.storage.run_folder import RunFolder
from fpld.students.configs import Compute, TransformerConfig
from fpld.students.processes import _RENDEZVOUS
from fpld.students.transformer import Transformer
from tests.engines.flower.conftest import Deployment
from tests.federation.test_processes_in_runs import ONE, ONE_ROUND, STUDENT, TWO, payloads

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _start(target: Callable[[], None], note: Path) -> None:
    """Start a child, and write down its number."""
    child = multiprocessing.get_context("fork").Process(target=target, daemon=True)
    child.start()
    note.write_text(str(child.pid))


def _ended(process: int) -> bool:
    """Return whether a process has ended within a second, though perhaps nobody has reaped it."""
    stat = Path(f"/proc/{process}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_the_processes_of_a_training_counts_too(tmp_path: Path) -> None:
    def work() -> list[bytes]:
        _start(_grow, tmp_path / "child")
        time.sleep(60)
        return []

    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"most_memory in node\.toml allows"):
        run_sandboxed(work, str, memory=own_bytes(os.getpid()) + SIZE // 2)
    assert time.monotonic() - started < 50
    assert _ended(int((tmp_path / "child").read_text()))
    assert tree_bytes(2**22 + 1) == 0  # no such process


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_killed_sandbox_has_started_is_waited_for_by_nobody_and_ends(tmp_path: Path) -> None:
    def work() -> list[bytes]:
        _start(partial(time.sleep, 60), tmp_path / "child")
        time.sleep(1.5)  # the sandbox is looked at
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    started = time.monotonic()
    with pytest.raises(ResourceError, match="was ended by SIGKILL"):
        run_sandboxed(work, str)
    assert time.monotonic() - started < 50
    assert _ended(int((tmp_path / "child").read_text()))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_training_leaves_nothing_of_the_model_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while its processes start, nor when they have begun to train."""
    forkserver.ensure_running()  # as where this process has trained in several before: the sandbox starts its own
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    student = Transformer(TransformerConfig(vocab=64, layers=1, width=32, heads=2, length=16, batch=8), seed=0)
    student.compute_with(Compute(processes=2))
    begun = tmp_path / "begun"

    class Noticing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            begun.touch()

    def work(patience: float) -> list[bytes]:
        logging.getLogger("fpld").setLevel(logging.INFO)
        logging.getLogger("fpld.progress").addHandler(Noticing())
        threading.Thread(target=_kill_self_when, args=(begun, patience), daemon=True).start()
        student.finetune(np.zeros(2000, np.int32), steps=10**7, seed=1)
        return []

    with pytest.raises(ResourceError, match="was ended by SIGKILL"):
        run_sandboxed(partial(work, 0.2), str)
    first = set(tmp_path.glob("fpld-*"))
    assert {path.name for folder in first for path in folder.iterdir()} <= {_RENDEZVOUS}
    process = multiprocessing.get_context("fork").Process(target=work, args=(300.0,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert begun.exists()
    end = time.monotonic() + 60
    while set(tmp_path.glob("fpld-*")) - first:
        assert time.monotonic() < end
        time.sleep(0.1)


def _kill_self_when(begun: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end and not begun.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
