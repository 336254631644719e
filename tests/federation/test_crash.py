"""Crashes: SIGKILL at any moment, a disk that refuses, an interrupt; then --resume gives the very same student."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_and_resume import command, damaged, differing, finish

pytestmark = pytest.mark.slow


def lengthened(config: Path) -> Path:
    """Two workers, and enough rounds that there is something to interrupt."""
    text = config.read_text().replace("workers = 0", "workers = 2").replace("rounds = 3", "rounds = 5")
    config.write_text(text + '\n[baselines]\nmethods = ["fedavg"]\n')
    return config


def test_sigkill_at_random_moments_gives_identical_students(config_file: Path, tmp_path: Path) -> None:
    """Some here; `python -m benchmarks.kill_and_resume` kills 200 times."""
    kills, found = differing(lengthened(config_file), tmp_path, kills=3, seed=11)
    assert kills >= 3
    assert found == []


def limited() -> None:
    """Limit files to 150 kB: writes of checkpoints fail as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))


def test_a_disk_that_refuses_is_said_and_loses_nothing(config_file: Path, tmp_path: Path) -> None:
    expected = finish(config_file, tmp_path / "undisturbed")
    out = tmp_path / "full"
    stopped: Any = subprocess.run(command(config_file, out), capture_output=True, text=True, preexec_fn=limited)
    assert stopped.returncode == 2
    assert "cannot be written (File too large)" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert finish(config_file, out) == expected


def test_an_unwritable_folder_is_said(config_file: Path) -> None:
    stopped = subprocess.run(command(config_file, Path("/proc/fpld")), capture_output=True, text=True)
    assert stopped.returncode == 2
    assert "/proc/fpld cannot be written" in stopped.stderr


def test_an_interrupt_ends_cleanly_and_can_be_resumed(config_file: Path, tmp_path: Path) -> None:
    config, out = lengthened(config_file), tmp_path / "run"
    expected = finish(config, tmp_path / "undisturbed")
    for rounds, how in enumerate((signal.SIGINT, signal.SIGTERM), 1):
        running = subprocess.Popen(
            command(config, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        trace = out / "fpld/trace.jsonl"
        while not trace.exists() or len(trace.read_text().splitlines()) < rounds:
            time.sleep(0.05)
            assert running.poll() is None
        os.killpg(running.pid, how)
        said = running.communicate(timeout=60)[1]
        assert running.returncode == 128 + how
        assert said == "stopped; --resume goes on from the last closed round\n"
    assert finish(config, out) == expected


def test_a_damaged_file_gives_the_same_result_or_an_error(config_file: Path, tmp_path: Path) -> None:
    """Two cases here, of the newest states; `python -m benchmarks.kill_and_resume --damage 50` does every kind."""
    outcomes = [outcome for _, _, outcome in damaged(lengthened(config_file), tmp_path, cases=2, seed=3)]
    assert set(outcomes) <= {"identical", "identical, and said", "refused"}
