"""SIGKILL in the middle of a sequence that a model writes: the resumed run has the same trace, text and student."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from benchmarks.kill_and_resume import command, finish
from tests.federation import test_updates, test_written

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.long]

IN_THE_FIRST = 8  # draws: in the middle of the sequences of 16 tokens that the first model of a process writes
IN_THE_SECOND = 15 + 8


def killed(config: Path, out: Path, whom: str, draws: int) -> subprocess.CompletedProcess[str]:
    """Run a configuration until the kill; return the ended process."""
    arguments = command(config, out)[3:]
    program = [sys.executable, "-m", "tests.federation.killed_writer", whom, str(draws), str(out), *arguments]
    return subprocess.run(program, capture_output=True, text=True, start_new_session=True)


def wrote(out: Path) -> list[str]:
    """Return what each node has noted of its writing."""
    return [path.read_text() for path in sorted((out / "fpld").rglob("written.json"))]


class Undisturbed(NamedTuple):
    """A configuration whose nodes write, what it comes to, and what each node notes of its writing."""

    config: Path
    result: dict[str, object]
    wrote: list[str]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = test_written.configured(folder)
    return Undisturbed(config, finish(config, folder / "run"), wrote(folder / "run"))


@pytest.mark.parametrize(
    ("whom", "workers", "draws"),
    [("run", 0, IN_THE_SECOND), ("run", 2, IN_THE_FIRST), ("worker", 2, IN_THE_FIRST)],
    ids=["the run", "the run with its workers", "a node's worker"],
)
def test_a_kill_while_nodes_write(
    undisturbed: Undisturbed, tmp_path: Path, whom: str, workers: int, draws: int
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(undisturbed.config.read_text().replace("workers = 0", f"workers = {workers}"))
    out = tmp_path / "killed"
    ended = killed(config, out, whom, draws)
    if whom == "run":
        assert ended.returncode == -signal.SIGKILL
    else:
        assert ended.returncode == 2
        assert "a worker process was killed" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert len(test_written.trace(out)) == 1
    # The kill came while text was written in the second round: some node has noted none of it yet.
    notes = [[row["round"] for row in json.loads(note)] for note in wrote(out)]
    assert [1] in notes
    assert finish(config, out) == undisturbed.result
    assert wrote(out) == undisturbed.wrote


@pytest.mark.parametrize(("whom", "workers"), [("run", 0), ("worker", 2)], ids=["the run", "a worker"])
def test_a_kill_while_rebuilt_models_write(tmp_path: Path, whom: str, workers: int) -> None:
    config = test_updates.configured(tmp_path)
    expected = finish(config, tmp_path / "undisturbed")
    config.write_text(config.read_text().replace("workers = 0", f"workers = {workers}"))
    out = tmp_path / "killed"
    ended = killed(config, out, whom, IN_THE_FIRST)
    assert ended.returncode == (-signal.SIGKILL if whom == "run" else 2)
    assert len(test_updates.trace(out)) == 1
    assert finish(config, out) == expected
