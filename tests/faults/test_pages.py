"""The live page under attack: half-open connections, guessed tokens, links that lead out, folders edited by hand."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from fpld.web import app, guard
from fpld.web.state import RunIndex
from tests.report.conftest import finished, serve
from tests.report.test_dashboard import ask

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["finished"]
EDITS = {
    "config.toml": [
        "",
        "[",
        "run = 5",
        "[run]\nrounds = 'x'\n[[nodes]]\nname = 1\n",
        "a=" + "[" * 50_000,
        "nodes = [1]",
    ],
    "versions.json": ["", "[]", '{"a": 1}', "[" * 50_000, "9" * 5000],
    "trace.jsonl": ["{}", '{"round": 1}', "null", "[" * 50_000, '{"round": ' + "9" * 5000 + "}"],
    "result.json": ["{}", "[{}]", "[1]", "[" * 50_000, '[{"method": "fpld", "heldout_loss": 1e999}]'],
    "fpld/progress.json": ["[]", "{}", '{"round": "x"}', "[" * 50_000],
}


def run_folder(folder: Path) -> Path:
    (folder / "fpld").mkdir(parents=True)
    (folder / "config.toml").write_text('[run]\nrounds = 2\n[[nodes]]\nname = "a"\nbits = 2.0\n')
    (folder / "versions.json").write_text("{}")
    return folder


@pytest.mark.slow
def test_half_open_connections_are_closed_and_others_are_served(finished: Path) -> None:
    with serve(finished.parent) as served:
        place = urlsplit(served.url)
        held: list[socket.socket] = []
        for most in (80, 800):  # fewer than are served at a time, and many more
            while len(held) < most:
                held.append(socket.create_connection((place.hostname or "", place.port or 0)))
                held[-1].sendall(b"GET / HTTP/1.1\r\nHost: loc" if len(held) % 2 else b"")
            if most < app.MAX_ADDRESS_CONNECTIONS:
                assert ask(served, "/api/runs").status == 200
        for connection in held:
            assert_closed(connection)
        assert ask(served, "/api/runs").status == 200


def assert_closed(connection: socket.socket) -> None:
    """Check that the other end has closed a connection, whatever it said before."""
    connection.settimeout(3 * app.IDLE_TIMEOUT_SECONDS)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    connection.close()


def test_forms_that_never_come_whole_keep_nobody_out(tmp_path: Path) -> None:
    """The attacker, at 127.0.0.2, sends the first byte of many forms; a user at 127.0.0.1 is served meanwhile."""
    head = (
        b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 50\r\n"
    )
    with serve(run_folder(tmp_path / "runs/one").parent, FPLD_TOKEN="the right token!") as served:  # noqa: S106
        place = urlsplit(served.url)
        to = (place.hostname or "", place.port or 0)
        held: list[socket.socket] = []
        for _ in range(260):
            held.append(socket.create_connection(to, source_address=("127.0.0.2", 0)))
            with contextlib.suppress(ConnectionError):
                held[-1].sendall(head + b"\r\nt")
        bearer = "Bearer the right token!"
        assert ask(served, "/api/runs", Authorization=bearer).status == 200
        begun = time.monotonic()
        for connection in held:
            assert_closed(connection)
        assert time.monotonic() - begun < 2 * guard.FORM_TIMEOUT_SECONDS
        assert ask(served, "/api/runs", Authorization=bearer).status == 200


@pytest.mark.slow
def test_guessing_is_slow_however_many_guess(tmp_path: Path) -> None:
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    with serve(run_folder(tmp_path / "runs/one").parent, FPLD_TOKEN="the right token!") as served:  # noqa: S106

        def guess(number: int) -> int:
            if number % 2:
                return ask(served, "/login", "POST", f"token={number}", **form).status
            return ask(served, "/api/runs", Authorization=f"Bearer {number}").status

        begun = time.monotonic()
        with ThreadPoolExecutor(40) as pool:
            found = list(pool.map(guess, range(40)))
        taken = time.monotonic() - begun
        # Every wrong one that was looked at took half a second; who came besides was sent away.
        assert set(found) <= {401, 429}
        assert found.count(401) <= taken / 0.5 + 1
        assert ask(served, "/login", "POST", "token=the+right+token%21", **form).status == 303


def test_a_link_is_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password = 'hunter2'")
    folder = run_folder(tmp_path / "runs/linked")
    (folder / "config.toml").unlink()
    (folder / "config.toml").symlink_to(secret)
    other = run_folder(tmp_path / "runs/other")
    (other / "result.json").symlink_to(secret)
    state = RunIndex(tmp_path / "runs")
    assert [row["name"] for row in state.runs()] == ["other"]
    assert "hunter2" not in json.dumps(state.run("other"))


@pytest.mark.slow
def test_a_folder_edited_by_hand_is_said_to_be_so(tmp_path: Path) -> None:
    folders = {file: run_folder(tmp_path / f"runs/edited-{number}") for number, file in enumerate(EDITS)}
    with serve(tmp_path / "runs") as served:
        for file, folder in folders.items():
            for text in EDITS[file]:
                (folder / file).write_text(text)
                paths = ["/api/runs", *(f"/api/{what}={folder.name}" for what in ("run?name", "planner?run"))]
                for path in (*paths, f"/api/plan?run={folder.name}&links=1e6&deadline=60&total=0.5"):
                    assert ask(served, path).status in (200, 404), (path, file, text[:50])
