"""How often a SuperNode asks: as its time without a message says, and less often the more nodes there are."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fpld.engines.flower.patches import polling
from fpld.engines.flower.patches.polling import (
    MAX_FLEET_SIZE,
    PendingReplies,
    PollingClock,
    read_fleet_size,
    write_fleet_size,
)
from tests.engines.flower.conftest import Deployment

if TYPE_CHECKING:
    from pathlib import Path


def test_many_nodes_ask_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    pauses = PollingClock(tmp_path)
    pauses.sleep(3.0)
    write_fleet_size(tmp_path, 200)
    pauses.sleep(3.0)
    write_fleet_size(tmp_path, 10**12)  # a lie: half a minute, and no more
    pauses.sleep(3.0)
    assert slept == pytest.approx([0.4, 6.0, 30.0], abs=0.1)
    for wrong in (None, "7", -3):
        write_fleet_size(tmp_path, wrong)
    assert read_fleet_size(tmp_path) == 1
    (tmp_path / "crowd").write_text("many")
    assert (read_fleet_size(tmp_path), read_fleet_size(None)) == (1, 1)
    assert MAX_FLEET_SIZE * 0.03 <= 30


def test_a_node_that_can_wait_asks_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does what else is to be done meanwhile; an answer at once, or an error, leads to a pause of its own."""
    slept = list[float]()
    looked = list[float]()
    answers = [(0.5, False), (0.5, True), (0.0, True), (0.5, None)]

    def wait() -> bool | None:
        took, found = answers.pop(0)
        real(took)
        return found

    real = time.sleep
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(polling, "_MEANWHILE_SECONDS", 0.1)
    pauses = PollingClock(wait=wait, meanwhile=lambda: looked.append(time.monotonic()))
    pauses.sleep(3.0)
    assert slept == []  # nothing came, then something did
    assert len(looked) >= 5
    pauses.sleep(3.0)
    assert len(slept) == 1
    pauses.sleep(3.0)
    pauses.sleep(3.0)  # the SuperLink lets nobody wait: it is not asked again
    assert (len(slept), answers) == (3, [])
    waits = iter([False] * 9)
    PollingClock(wait=lambda: next(waits)).sleep(3.0)  # from time to time it asks although nobody told it to
    assert (len(slept), len(list(waits))) == (3, 5)


def test_the_reply_stage_is_short_and_says_how_long_messages_take(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    now = [0.0]
    stage = ["idle"]
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = PollingClock(replying=lambda: stage[0] == "reply")
    clock.sleep(3.0)
    now[0] = 2.0
    stage[0] = "reply"
    clock.sleep(0.5)
    stage[0] = "idle"
    clock.sleep(3.0)  # the last message took 2 s to come: most of that time nothing is polled
    assert slept == pytest.approx([0.4, 0.1, 1.4])


def test_an_error_while_a_node_waits_is_no_end_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> bool:
        raise RuntimeError("closed")

    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    PollingClock(wait=wait).sleep(3.0)
    assert slept == pytest.approx([0.4], abs=0.1)


def test_many_nodes_send_fewer_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection

    for module in (heartbeat, fleet_http_connection):
        monkeypatch.setattr(module, "HEARTBEAT_DEFAULT_INTERVAL", 30)
    for nodes, expected in ((1, 30), (250, 30), (1000, 120)):
        polling.set_heartbeat_interval(nodes)
        found = {module.HEARTBEAT_DEFAULT_INTERVAL for module in (heartbeat, fleet_http_connection)}
        assert found == {expected}


def test_the_aggregator_says_how_many_they_are(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 1")])
    deployment.serve(deployment.grid())
    assert [read_fleet_size(file.parent / "flower") for file in deployment.node_files] == [3, 3, 3]


def test_a_reply_that_was_left_behind_is_sent_without_a_message() -> None:
    """As Flower's loop: of two replies the first one alone was there when it looked."""
    sent: list[str] = []
    waiting = [["of the old run"], [], ["of the new run"], []]
    state = SimpleNamespace(get_messages_legacy=lambda **_: waiting.pop(0), run=7)

    def push(*, state: Any, send: Any) -> None:
        assert state.run == 7
        while not (replies := state.get_messages_legacy(is_reply=True)):
            raise AssertionError("it would wait")
        for reply in replies:
            send(reply)

    loop = SimpleNamespace(_push_messages=push)
    leftovers = PendingReplies(loop)
    leftovers.send()  # nothing was ever sent
    loop._push_messages(state=state, send=sent.append)
    for expected in (1, 2, 2):
        leftovers.send()
        assert len(sent) == expected
    assert sent == ["of the old run", "of the new run"]
