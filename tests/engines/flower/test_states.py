"""What a site says of its connection: in our words, and how states follow its log."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest

from fpld.cli import main
from fpld.engines.flower.credentials import make_certificates
from fpld.engines.flower.launch.connection import (
    ConnectionWatch,
    SiteState,
    not_admitted,
    read_state,
    try_connection,
)
from fpld.engines.flower.launch.processes import free_port
from fpld.engines.flower.log import last_texts
from fpld.engines.flower.site.folder import site_lock
from fpld.federation.callbacks import RoundLog
from fpld.federation.record import Incident
from fpld.protocol import Receipt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engines.flower.conftest import Deployment


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """A server with a certificate of `tmp_path/certs`, for the name localhost alone."""
    make_certificates(tmp_path / "certs", "localhost:1", ["localhost"], days=2)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certs/server.pem", tmp_path / "certs/server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(client, server_side=True) as secured:
                    secured.recv(1000)
                    secured.sendall(
                        b"HTTP/1.1 403 No\r\nDate: Tue, 17 Nov 2015 12:00:00 GMT\r\nContent-Length: 0\r\n\r\n"
                    )
            except OSError:
                client.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"localhost:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_what_is_wrong_with_a_connection_is_said_in_our_words(served: str, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other", served, ["localhost"], days=2)
    port = served.rpartition(":")[2]
    ca = tmp_path / "certs/ca.pem"
    trial = try_connection(served, ca)
    assert trial.problem is None
    assert "ahead of the aggregator's" in trial.clock
    for address, authority, state, words in (
        (served, tmp_path / "other/ca.pem", "certificate refused", "ca.pem is not this aggregator's: fetch federation"),
        (f"127.0.0.1:{port}", ca, "certificate refused", "certificate is not for 127.0.0.1"),
        (served, None, "connecting", "wants TLS"),
        (f"localhost:{free_port()}", ca, "connecting", "nothing listens at localhost:"),
        ("no-such-host.invalid:1", ca, "connecting", "the name no-such-host.invalid is unknown"),
    ):
        problem = try_connection(address, authority).problem
        assert problem is not None, words
        assert problem.state == state
        assert words in problem.reason
        assert "SSL" not in problem.reason


def test_an_aggregator_without_tls_is_named(tmp_path: Path) -> None:
    make_certificates(tmp_path, "localhost:1", ["localhost"], days=2)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        problem = try_connection(f"127.0.0.1:{listener.getsockname()[1]}", tmp_path / "ca.pem").problem
        thread.join(5)
    assert problem is not None
    assert "does not speak TLS" in problem.reason


def test_states_follow_the_log_of_the_site(tmp_path: Path) -> None:
    watch = ConnectionWatch(tmp_path, "north", "localhost:1", None)
    assert read_state(tmp_path) == SiteState("connecting", "to localhost:1")
    for text, state, reason in (
        ("north is connected", "waiting", "joined"),
        ("round 3: training, at most 10 bytes to send", "training", "round 3"),
        ("nats per token on the held-out text", "training", "round 3"),
        ("round 3: sending 9 bytes", "waiting", "round 3 is sent"),
        ("round 4: training, at most 10 bytes to send", "training", "round 4"),
        ("train failed: OSError: no such file", "waiting", "train failed: OSError"),
    ):
        watch._read(text)
        found = read_state(tmp_path)
        assert found.state == state
        assert reason in found.reason
    watch.set(SiteState("stopped", "told to stop"))
    watch.set(SiteState("stopped", "told to stop"))  # said once
    assert last_texts(tmp_path) == ["connecting: to localhost:1", "stopped: told to stop"]


def test_a_trial_is_for_a_nodes_file_and_disturbs_no_site_that_runs(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "demo", "--connect"]) == 2
    assert "connect is for a node's file" in capsys.readouterr().err
    file = deployment.node_files[0]
    with site_lock(file.parent, "north"):
        ConnectionWatch(file.parent, "north", "localhost:1", None).set(SiteState("stopped", "told to stop"))
        assert main(["check", str(file), "--connect", "--json"]) == 2
        assert "stopped" in capsys.readouterr().out


def test_a_node_that_is_turned_away_is_told_which_file_to_look_for() -> None:
    state = not_admitted("north")
    assert state.state == "not admitted"
    assert "north.pub" in state.reason
    assert "NAME" not in state.reason


def test_the_bar_of_a_deployment_has_rounds_nodes_and_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes and three rounds of ten seconds each: what the bar shows, and how far it stands."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    log = RoundLog("fpld", ["north", "east"], 3)
    log.opened(1, [1.0, 1.0])
    log.answered(Receipt(1, 0, "accepted"), 10, 1)
    now += 10.0
    log.answered(Receipt(1, 1, "accepted"), 10, 0)
    log.phase(1, "closed")
    log.opened(2, [1.0, 1.0])
    now += 4.0
    log.answered(Receipt(2, 0, "accepted"), 10, 1)
    log.missing(2, Incident("east", "absent", "not connected"))
    log.phase(2, "evaluating")
    positions = [vars(record)["position"] for record in caplog.records if "position" in vars(record)]
    assert [position.state for position in positions] == [
        "round 1 of 3, 0 of 2 nodes",
        "round 1 of 3, 1 of 2 nodes",
        "round 1 of 3, 2 of 2 nodes",
        "round 2 of 3, 0 of 2 nodes, 20 s left",
        "round 2 of 3, 1 of 2 nodes, 16 s left",
        "round 2 of 3, 1 of 2 nodes, 16 s left",
    ]
    assert [position.done for position in positions] == [0.0, 0.5, 1.0, 1.0, 1.5, 1.5]
    assert "round 2 continues without east" in caplog.text
