"""A run whose trainings have two processes: the frames, the trace and the student of one process, bit for bit.

Two processes that each compute half a minibatch add up as one does that computes half a minibatch at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import fpld
from fpld.protocol.wire import payload_of
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import MAIN, NODE_STATE
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
STUDENT = (
    'kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128',
    'kind = "transformer"\nlayers = 1\nwidth = 16\nheads = 2\nlength = 16\nbatch = 8',
)
ONE_ROUND = ("rounds = 3", "rounds = 1")
ONE = "at_once = 4\n"
TWO = "processes = 2\n"


def payloads(folder: Path) -> list[bytes]:
    """Return the payload of the frame that each node has sent last: the rest names the run, and is sealed for it."""
    kept = sorted(folder.glob(f"**/{NODE_STATE}"))
    return [bytes(payload_of(memoryview(read_arrays(path)[0]["frame"].tobytes()))) for path in kept]


def test_a_run_in_two_processes_sends_the_same_frames(tmp_path: Path) -> None:
    write_texts(tmp_path)
    text = CONFIG.format(folder=tmp_path).replace(*STUDENT).replace(*ONE_ROUND)
    assert "workers = 0\n" in text
    for name, compute in (("one", ONE), ("two", TWO)):
        config = tmp_path / f"{name}.toml"
        config.write_text(text.replace("workers = 0\n", f"workers = 0\n{compute}") + "\n[baselines]\nmethods = []\n")
        fpld.run(config, out=tmp_path / name)
    sent = payloads(tmp_path / "one" / MAIN)
    assert len(sent) == 3
    assert sent == payloads(tmp_path / "two" / MAIN)
    students = [(tmp_path / name / "student.safetensors").read_bytes() for name in ("one", "two")]
    assert students[0] == students[1]
