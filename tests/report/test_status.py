"""The state of a run: what it writes itself, and what its folder tells of one that was killed or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from fpld.cli import main
from fpld.errors import InputError
from fpld.federation.telemetry import Status, mark_stopped
from fpld.report.run import HEARTBEAT_TIMEOUT_SECONDS, STALL_TIMEOUT_SECONDS, run_state
from fpld.storage.run_folder import HEARTBEAT, STATUS, RunFolder
from fpld.web.state import RunIndex
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_run_writes_its_state(tmp_path: Path) -> None:
    with Status(RunFolder(tmp_path)) as status:
        assert run_state(tmp_path).name == "preparing"  # nothing is written yet
        assert not (tmp_path / STATUS).exists()
        status.set("preparing")
        wait_for(lambda: (tmp_path / HEARTBEAT).exists())
        status.set("running")
        assert run_state(tmp_path) == ("running", "")
        assert run_state(tmp_path).alive
    assert run_state(tmp_path).name == "done"


def test_what_ends_a_run_is_its_last_state(tmp_path: Path) -> None:
    for error, state, why in (
        (InputError("bits must be more"), "failed", "bits must be more"),
        (ZeroDivisionError("by zero"), "failed", "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "stopped", ""),
    ):
        with pytest.raises(type(error)):
            end_with(error, tmp_path)
        assert run_state(tmp_path) == (state, why)
    with Status(RunFolder(tmp_path)) as status:
        status.set("running")
        mark_stopped()
        assert run_state(tmp_path).name == "stopped"


def test_a_folder_of_another_run_keeps_its_state(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text('{"state": "done"}')
    with pytest.raises(InputError), Status(RunFolder(tmp_path)):
        raise InputError("holds a run already")
    assert run_state(tmp_path).name == "done"


def test_silence_is_a_stop_and_standstill_is_a_stall(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text('{"state": "running"}')
    assert run_state(tmp_path).name == "stopped"  # no heartbeat at all
    (tmp_path / HEARTBEAT).touch()
    assert run_state(tmp_path).name == "running"
    old = time.time() - STALL_TIMEOUT_SECONDS - 60
    os.utime(tmp_path / STATUS, (old, old))
    assert run_state(tmp_path).name == "stalled"
    assert "11 min" in run_state(tmp_path).why
    (tmp_path / "fpld").mkdir()
    (tmp_path / "fpld/progress.json").write_text("{}")
    assert run_state(tmp_path).name == "running"
    old = time.time() - HEARTBEAT_TIMEOUT_SECONDS - 1
    os.utime(tmp_path / HEARTBEAT, (old, old))
    assert run_state(tmp_path).name == "stopped"
    for damaged in ("{", "[]", '{"state": 3}', "{}"):
        (tmp_path / STATUS).write_text(damaged)
        assert run_state(tmp_path).name in ("running", "preparing")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_is_shown_as_stopped(number: signal.Signals, tmp_path: Path) -> None:
    write_texts(tmp_path)
    text = CONFIG.format(folder=tmp_path).replace("steps = 25", "steps = 1000000")
    (tmp_path / "config.toml").write_text(text + "\n[baselines]\nmethods = []\n")
    out = tmp_path / "runs/killed"
    command = [sys.executable, "-m", "fpld", "run", str(tmp_path / "config.toml"), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: run_state(out).name == "running" and (out / "fpld/progress.json").exists())
        page = RunIndex(tmp_path / "runs")
        assert page.runs()[0]["state"] == "round 1 of 3: collecting"
        stamp = page.stamp("killed")
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
    if number == signal.SIGKILL:  # nobody wrote that: the silence tells
        old = time.time() - HEARTBEAT_TIMEOUT_SECONDS - 1
        os.utime(out / HEARTBEAT, (old, old))
    assert page.runs()[0]["state"] == "stopped"
    assert page.stamp("killed") != stamp  # the page asks again
    assert "Stopped" in page.run("killed")["live"]
    assert "--resume" in page.run("killed")["live"]


@pytest.mark.slow
def test_a_failed_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path)
    text = CONFIG.format(folder=tmp_path).replace("[distill]\n", "[distill]\nrate = 1e30\n")
    (tmp_path / "config.toml").write_text(text)
    out = tmp_path / "runs/failed"
    assert main(["run", str(tmp_path / "config.toml"), "--out", str(out)]) == 2
    state = run_state(out)
    assert state.name == "failed"
    assert state.why
    assert state.why in capsys.readouterr().err
    assert json.loads((out / STATUS).read_text())["state"] == "failed"
    assert main(["report", str(out), "--no-figures", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["state"] == "failed"


def end_with(error: BaseException, folder: Path) -> None:
    with Status(RunFolder(folder)) as status:
        status.set("running")
        raise error


def wait_for(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)
