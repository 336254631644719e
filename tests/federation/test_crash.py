"""Crashes: SIGKILL at any moment, a disk that refuses, an interrupt; then --resume gives the very same student."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.kill_and_resume import Undisturbed, command, damaged, differing, finish, undisturbed
from tests.federation.conftest import CONFIG, write_texts

pytestmark = [pytest.mark.slow, pytest.mark.long]


class Long(NamedTuple):
    """A federation with a worker and enough rounds that there is something to interrupt, and what it comes to."""

    config: Path
    expected: Undisturbed


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Long:
    folder = tmp_path_factory.mktemp("long")
    write_texts(folder)
    text = CONFIG.format(folder=folder).replace("rounds = 3", "rounds = 5").replace("workers = 0", "workers = 1")
    text = text.replace("contexts = 480", "contexts = 96").replace("steps = 60", "steps = 20")
    (folder / "config.toml").write_text(text + '\n[baselines]\nmethods = ["fedavg"]\n')
    return Long(folder / "config.toml", undisturbed(folder / "config.toml", folder))


def test_sigkill_at_random_moments_gives_identical_students(long: Long, tmp_path: Path) -> None:
    """Some here; `python -m benchmarks.kill_and_resume` kills 200 times."""
    kills, found = differing(long.config, tmp_path, long.expected, kills=3, seed=11)
    assert kills >= 3
    assert found == []


def test_a_run_that_loses_a_worker_says_so_and_is_resumed_to_the_same_student(long: Long, tmp_path: Path) -> None:
    """Some here; `python -m benchmarks.kill_and_resume --workers` kills as many as wanted."""
    kills, found = differing(long.config, tmp_path, long.expected, kills=2, seed=3, workers=True)
    assert kills >= 2
    assert found == []


def limited() -> None:
    """Limit files to 150 kB: writes of checkpoints fail as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))


def test_a_disk_that_refuses_is_said_and_loses_nothing(long: Long, tmp_path: Path) -> None:
    out = tmp_path / "full"
    stopped: Any = subprocess.run(command(long.config, out), capture_output=True, text=True, preexec_fn=limited)
    assert stopped.returncode == 2
    assert "cannot be written (File too large)" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert finish(long.config, out) == long.expected.result


def test_an_unwritable_folder_is_said(config_file: Path) -> None:
    stopped = subprocess.run(command(config_file, Path("/proc/fpld")), capture_output=True, text=True)
    assert stopped.returncode == 2
    assert "/proc/fpld cannot be written" in stopped.stderr


def test_an_interrupt_ends_cleanly_and_can_be_resumed(long: Long, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for rounds, how in enumerate((signal.SIGINT, signal.SIGTERM), 1):
        running = subprocess.Popen(
            command(long.config, out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        trace = out / "fpld/trace.jsonl"
        while not trace.exists() or len(trace.read_text().splitlines()) < rounds:
            time.sleep(0.05)
            assert running.poll() is None
        os.killpg(running.pid, how)
        said = running.communicate(timeout=60)[1]
        assert running.returncode == 128 + how
        assert said == "stopped; --resume continues from the last closed round\n"
    assert finish(long.config, out) == long.expected.result


def test_a_damaged_file_gives_the_same_result_or_an_error(long: Long, tmp_path: Path) -> None:
    """Two cases here, of the newest states; `python -m benchmarks.kill_and_resume --damage 50` does every kind."""
    outcomes = [outcome for _, _, outcome in damaged(long.config, tmp_path, long.expected, cases=2, seed=3)]
    assert set(outcomes) <= {"identical", "identical, and said", "refused"}
