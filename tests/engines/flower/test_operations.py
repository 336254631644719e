"""What operators look at and rely on: status, metrics, certificates, clocks, logs, full disks, units, the image."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from fpld.cli import main
from fpld.engines.flower import log
from fpld.engines.flower.credentials import clock_difference, expiry_warnings, make_certificates
from fpld.engines.flower.launch import aggregator
from fpld.engines.flower.launch.aggregator import AggregatorProcesses
from fpld.engines.flower.launch.connection import ConnectionWatch, SiteState
from fpld.engines.flower.launch.processes import ChildProcess, LaunchError
from fpld.engines.flower.log import FolderLogHandler, append_log, follow_log
from fpld.engines.flower.site.folder import site_lock
from fpld.engines.flower.site.resources import report_shortage
from fpld.errors import InputError, ResourceError, StorageError, exhausted_resource, exhausted_resource_in_log
from fpld.federation.record import RoundRecord
from fpld.federation.telemetry import Status
from fpld.report.monitoring import metrics, run_status_row
from fpld.storage.files import read_json, storage_error
from fpld.storage.run_folder import RESERVE, RunFolder
from tests.test_package import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.flower.conftest import Deployment


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main([*map(str, arguments), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return found


def test_node_status_says_how_a_site_stands(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    file = deployment.node_files[0]
    folder = file.parent
    (row,) = rows(capsys, "node", "status", file)
    assert (row["node"], row["state"], row["round"], row["up_bytes"], row["wire"]) == ("north", "stopped", None, 0, 5)
    append_log(folder, "round 3: training, at most 10 bytes to send")
    append_log(folder, "train failed: OSError: no such file")
    with site_lock(folder, "north"):
        assert rows(capsys, "node", "status", file)[0]["state"] == "connecting"
        ConnectionWatch(folder, "north", "localhost:1", None).set(SiteState("connected", "first"))
        (folder / "flower/contact").touch()
        (row,) = rows(capsys, "node", "status", file, "--health")
        assert (row["state"], row["reason"], row["round"]) == ("connected", "first", 3)
        assert row["trouble"] == "train failed: OSError: no such file"
        assert row["last_contact"] < 60
    assert main(["node", "status", str(file), "--health"]) == 1  # it has stopped
    capsys.readouterr()
    assert main(["node", "stats", str(file)]) == 2
    assert "node takes a file, or status or clear before it" in capsys.readouterr().err


def test_aggregator_status_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path / 'a"run')
    run.write("config.toml", b"")
    run.write_json("status.json", {"state": "running", "error": "", "time": time.time()})
    (run.path / "heartbeat").touch()
    nodes = [{"name": "north", "state": "accepted"}, {"name": "east", "state": "working"}]
    progress = {"round": 2, "rounds": 4, "phase": "collecting", "opened": 1.0, "updated": 2.0, "nodes": nodes}
    run.write_json("fpld/progress.json", progress)
    record = RoundRecord(1, ["north"], [2.0], [2.0], 90, 10, downlink_bytes=700, heldout_loss=2.5)
    run.write("fpld/trace.jsonl", json.dumps(record.to_json()).encode() + b"\n")
    (row,) = rows(capsys, "aggregator", "status", run.path)
    found = {name: row[name] for name in ("state", "round", "rounds", "answered", "nodes", "up_bytes", "down_bytes")}
    assert list(found.values()) == ["running", 2, 4, 1, 2, 100, 700]
    text = metrics([run_status_row(run.path)])
    assert 'fpld_run_state{run="a\\"run",state="running"} 1\n' in text
    assert 'fpld_run_up_bytes_total{run="a\\"run"} 100\n' in text
    assert all(re.fullmatch(r"(# (HELP|TYPE) \w+ .+)|(\w+\{.*\} [-+.e\d]+)", each) for each in text.splitlines())
    assert main(["aggregator", "status", str(run.path), "--health"]) == 0
    run.write_json("status.json", {"state": "failed", "error": "no space", "time": time.time()})
    assert main(["aggregator", "status", str(run.path), "--health"]) == 1
    capsys.readouterr()
    assert main(["aggregator", "status", str(tmp_path / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_metrics_are_behind_the_dashboards_token(tmp_path: Path) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from fpld.web.app import make_app

    RunFolder(tmp_path / "one").write("config.toml", b"")
    with testclient.TestClient(make_app(tmp_path, "t" * 20), base_url="http://localhost") as client:
        assert client.get("/metrics").status_code in (401, 403)
        answer = client.get("/metrics", headers={"Authorization": f"Bearer {'t' * 20}"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'fpld_run_state{run="one",state="preparing"} 1' in answer.text


def test_certificates_that_end_are_said_a_month_ahead(tmp_path: Path) -> None:
    make_certificates(tmp_path, "localhost:1", ["localhost"], days=40)
    files = [tmp_path / "ca.pem", tmp_path / "server.pem"]
    now = datetime.now(UTC)
    assert expiry_warnings(files, now) == []
    said = expiry_warnings(files, now + timedelta(days=15))
    assert len(said) == 2
    assert all(
        re.search(r"\.pem ends on \d{4}-\d\d-\d\d, in 2\d days: `fpld certs` makes new ones", each) for each in said
    )
    with pytest.raises(InputError, match=r"ca\.pem has ended on .*: make new ones with `fpld certs`"):
        expiry_warnings(files, now + timedelta(days=41))
    with pytest.raises(InputError, match="set the clock, or wait"):
        expiry_warnings(files, now - timedelta(days=3))
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(InputError, match="must hold a certificate in PEM"):
        expiry_warnings(files, now)


def test_clocks_that_differ_are_named() -> None:
    now = datetime(2026, 11, 17, 12, 0, tzinfo=UTC)
    assert "600 s behind the aggregator's" in clock_difference("Tue, 17 Nov 2026 12:10:00 GMT", now)
    for date in (None, "", "nonsense", "Tue, 17 Nov 2026 12:00:30 GMT"):
        assert clock_difference(date, now) == ""


def test_a_log_that_has_grown_long_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_LOG_BYTES", 500)
    lines = follow_log(tmp_path)
    next(lines)
    seen = []
    for number in range(40):
        append_log(tmp_path, f"line {number}")
        seen += [line["text"] for line in next(lines)]
    assert seen == [f"line {number}" for number in range(40)]  # who follows it misses nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log-1.txt", "log.txt"]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 700


def test_a_run_says_that_its_disk_is_full_in_the_room_that_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write fails until the reserve is gone, as on a full disk; then the end of the run can be written."""
    store = RunFolder(tmp_path)
    write = RunFolder.write

    def full(folder: RunFolder, name: str, content: bytes) -> None:
        if (folder.path / RESERVE).exists():
            raise storage_error(folder.path / name, OSError(errno.ENOSPC, "full"))
        write(folder, name, content)

    def work() -> None:
        with Status(store) as status:
            status.set("running")
            monkeypatch.setattr(RunFolder, "write", full)
            store.write("student", b"x")

    with pytest.raises(StorageError, match="no space left"):
        work()
    said = json.loads((tmp_path / "status.json").read_text())
    assert said["state"] == "failed"
    assert "no space left on the disk; what was written before is intact: free some space" in said["error"]
    assert not (tmp_path / RESERVE).exists()


def test_what_ran_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, what in (
        (errno.EMFILE, "raise the limit"),
        (errno.ENOMEM, "free some memory"),
        (errno.EDQUOT, "space"),
    ):
        assert what in str(storage_error(tmp_path, OSError(number, "x")))

    def work() -> None:
        with Status(RunFolder(tmp_path)) as status:
            status.set("running")
            raise MemoryError

    with pytest.raises(MemoryError):
        work()
    assert "memory ran out: free some" in json.loads((tmp_path / "status.json").read_text())["error"]
    monkeypatch.setattr(aggregator, "MIN_DISK_BYTES", 1 << 62)
    with pytest.raises(StorageError, match="are needed: free some space, and continue with --resume"):
        aggregator.check_disk_space(tmp_path)


def test_what_a_process_lacks_is_written_down_when_its_errors_do_not_say_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Flower's own error for a message that could not be sent hides why."""
    report_shortage()
    assert capfd.readouterr().err == ""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        report_shortage()
        with pytest.raises(StorageError, match="no file handles are left"):
            read_json(ROOT / "pyproject.toml", "any")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    found = exhausted_resource_in_log(capfd.readouterr().err)
    assert found is not None
    assert found.what == "no file handles are left"
    library = ImportError("libx.so: cannot open shared object file: Too many open files")
    assert exhausted_resource(library) == found


def test_a_run_that_is_killed_twice_in_a_round_is_not_started_again(tmp_path: Path) -> None:
    RunFolder(tmp_path).write("fpld/trace.jsonl", b"{}\n")
    assert aggregator._check_progress(tmp_path, -1) == 3
    RunFolder(tmp_path).write("fpld/trace.jsonl", b"{}\n{}\n")
    assert aggregator._check_progress(tmp_path, 3) == 6  # a round further
    with pytest.raises(ResourceError, match=r"killed twice in the same round: most likely memory ran out; free some"):
        aggregator._check_progress(tmp_path, 6)


def test_how_a_runs_process_ended_is_said(deployment: Deployment) -> None:
    """One that was killed is cleared away, to be started again; one that ended by itself is an error with its words."""
    flower = deployment.config.flower
    folder = deployment.folder / "flower"
    assert flower is not None
    folder.mkdir()
    for code in ("import os; os.kill(os.getpid(), 9)", "import sys; sys.exit('ERROR: no key')"):
        children = AggregatorProcesses(flower, folder, insecure=False)
        assert children.runner_exit_code() is None
        children.runner = ChildProcess([sys.executable, "-c", code], folder / "runner.log", folder, name="runner")
        ended = children.runner.process.wait(30)
        assert children.runner_exit_code() == ended
        if ended < 0:
            children.clear_runner(ended)
            assert children.runner.exit_reason() == "ended by SIGKILL"
        else:
            with pytest.raises(LaunchError, match="the run's process ended: ERROR: no key; continue with --resume"):
                children.clear_runner(ended)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_without_memory_notices_it() -> None:
    code = (
        "import resource\nfrom fpld.engines.flower.site.resources import check_memory\ncheck_memory()\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, -1))\n"
        "try:\n    check_memory()\nexcept MemoryError:\n    print('noticed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "noticed\n", done.stderr


def test_commands_that_start_flowers_programs_do_not_wait_for_its_libraries() -> None:
    code = (
        "import sys, fpld.engines.flower.launch.aggregator, fpld.engines.flower.launch.node\n"
        "import fpld.engines.flower.patches.bootstrap\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('flwr', 'torch', 'grpc')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "log.txt").mkdir()
    with pytest.raises(StorageError):
        append_log(tmp_path, "text")
    import logging

    FolderLogHandler(tmp_path).emit(logging.LogRecord("x", logging.INFO, "", 1, "text", (), None))


@pytest.mark.parametrize("name", ["fpld-node.service", "fpld-aggregator.service"])
def test_units_are_ones_that_systemd_takes(name: str, tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("needs systemd-analyze")
    text = (ROOT / "deploy" / name).read_text()
    # The programs and users of a deployment are not here.
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", text).replace("User=fpld", "User=root")
    (tmp_path / name).write_text(text)
    done = subprocess.run([verify, "verify", "--man=no", tmp_path / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if name in line], done.stderr
