"""Nodes that wait at a SuperLink: woken when a message is stored for them, and never in vain left asleep."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.node_pb2 import Node
from flwr.supernode import fleet_http_connection
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from fpld.engines.flower.launch.processes import free_port
from fpld.engines.flower.patches import connection, superlink
from fpld.engines.flower.patches.connection import LongPollClient
from fpld.engines.flower.patches.superlink import HEARTBEAT_PATH, WAIT_HEADER, LongPollApp, MessageEvents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

KNOWN = 7, 8


class Link:
    """A SuperLink as far as it is needed: messages in a list, heartbeats that are checked, and real HTTP."""

    def __init__(self, *, waits: bool = True) -> None:
        self.messages: dict[int, list[str]] = {}
        self.signs = list[int]()
        self._clients = ExitStack()
        self.state = SimpleNamespace(store_message_and_object_tree=self._store, get_message_ins=self._get)
        self.events = MessageEvents(self.state)
        app: Any = Starlette(routes=[Route(HEARTBEAT_PATH, self._life, methods=["POST"])])
        self.port = free_port()
        app = LongPollApp(app, self.events) if waits else app
        self.server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="critical", ws="none"))
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    def _store(self, message: Any, *_pieces: str) -> None:
        self.messages.setdefault(message.metadata.dst_node_id, []).append("message")

    def _get(self, node_id: int, limit: int) -> list[str]:
        found = self.messages.get(node_id, [])[:limit]
        self.messages[node_id] = self.messages.get(node_id, [])[limit:]
        return found

    async def _life(self, request: Request) -> Response:
        sign = SendNodeHeartbeatRequest.FromString(await request.body())
        if sign.node.node_id not in KNOWN:
            return Response(status_code=401)
        self.signs.append(sign.node.node_id)
        return Response(SendNodeHeartbeatResponse(success=True).SerializeToString())

    def store(self, node: int) -> None:
        """Store a message for a node, as the process of a run does."""
        self.state.store_message_and_object_tree(SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node)), "", "")

    def ask(self, node: int) -> Any:
        """Ask for a node's message."""
        return self.state.get_message_ins(node, 1)

    def client(self) -> LongPollClient:
        return self._clients.enter_context(LongPollClient(f"http://127.0.0.1:{self.port}"))

    def stop(self) -> None:
        self._clients.close()
        self.server.should_exit = True
        self._thread.join()


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(superlink, "KEEPALIVE_SECONDS", 0.05)
    found = Link()
    yield found
    found.stop()


def later(action: Any, *arguments: Any) -> threading.Timer:
    timer = threading.Timer(0.3, action, arguments)
    timer.start()
    return timer


def test_a_node_is_woken_by_its_own_message(link: Link) -> None:
    client = link.client()
    other = list[bool | None]()
    for node in KNOWN:
        assert link.ask(node) == []
    thread = threading.Thread(target=lambda: other.append(link.client().wait(8)))
    thread.start()
    later(link.store, 7)
    begun = time.monotonic()
    assert client.wait(7) is True
    assert 0.25 < time.monotonic() - begun < 5
    assert other == []  # it waits on
    assert link.ask(7) == ["message"]
    link.store(8)
    thread.join()
    assert other == [True]


def test_what_was_stored_before_it_waits_wakes_a_node_at_once(link: Link) -> None:
    client = link.client()
    assert client.wait(7) is True  # it has asked nobody yet: something may be there
    assert link.ask(7) == []
    link.store(7)
    link.store(7)
    assert client.wait(7) is True
    assert link.ask(7) == ["message"]
    assert client.wait(7) is True  # there is another one
    assert [link.ask(7), link.ask(7)] == [["message"], []]


def test_a_message_that_is_stored_while_a_node_asks_wakes_it(link: Link) -> None:
    """The question has found nothing, but the message came before it was answered."""
    get = link.events._get

    def slowly(*arguments: Any) -> Any:
        found = get(*arguments)
        link.store(7)
        return found

    link.events._get = slowly
    assert link.ask(7) == []
    assert link.client().wait(7) is True


def test_a_wait_without_a_message_ends_and_a_lost_one_is_an_error(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    link.ask(7)
    monkeypatch.setattr(fleet_http_connection, "HEARTBEAT_DEFAULT_INTERVAL", 1)
    assert link.client().wait(7) is False
    monkeypatch.setattr(connection, "DEAD_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(superlink, "KEEPALIVE_SECONDS", 60.0)  # a connection over which nothing comes any more
    with pytest.raises(httpx.ReadTimeout):
        link.client().wait(7)


def test_of_two_that_wait_as_one_node_the_first_is_answered(link: Link) -> None:
    link.ask(7)
    answers = list[bool | None]()
    thread = threading.Thread(target=lambda: answers.append(link.client().wait(7)))
    thread.start()
    other = later(link.client().wait, 7)
    thread.join()
    assert answers == [True]
    link.store(7)
    other.join()


def test_whoever_is_not_let_in_does_not_wait(link: Link) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        link.client().wait(9)
    url = f"http://127.0.0.1:{link.port}{HEARTBEAT_PATH}"
    header = {WAIT_HEADER: "30"}
    assert httpx.post(url, content=bytes(5000), headers=header).status_code == 413
    body = SendNodeHeartbeatRequest(node=Node(node_id=7)).SerializeToString()
    for wrong in ("", "soon", "-1", "9" * 400):
        assert WAIT_HEADER not in httpx.post(url, content=body, headers={WAIT_HEADER: wrong}).headers


def test_a_node_that_goes_while_it_waits_is_forgotten(link: Link) -> None:
    link.ask(7)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"http://127.0.0.1:{link.port}{HEARTBEAT_PATH}",
            content=SendNodeHeartbeatRequest(node=Node(node_id=7)).SerializeToString(),
            headers={WAIT_HEADER: "30"},
            timeout=0.01,
        )
    end = time.monotonic() + 10
    while link.events._waiting and time.monotonic() < end:
        time.sleep(0.02)
    assert link.events._waiting == {}


def test_a_node_that_waits_gives_no_other_signs_of_life(link: Link) -> None:
    link.ask(7)
    client = link.client()
    sign = SendNodeHeartbeatRequest(node=Node(node_id=7), heartbeat_interval=30)
    thread = threading.Thread(target=client.wait, args=(7,))
    thread.start()
    while not link.signs:
        time.sleep(0.01)
    assert client.SendNodeHeartbeat(sign).success
    assert link.signs == [7]
    link.store(7)
    thread.join()
    assert client.SendNodeHeartbeat(sign).success
    assert link.signs == [7, 7]


def test_at_any_other_superlink_nobody_waits() -> None:
    link = Link(waits=False)
    try:
        assert link.client().wait(7) is None
    finally:
        link.stop()


def test_a_superlink_looks_for_expired_tasks_from_time_to_time() -> None:
    looked = list[int]()
    state = SimpleNamespace(_cleanup_expired_task_tokens=lambda: looked.append(1))
    superlink.throttle_token_cleanup(state, 0.05)
    for _ in range(3):
        state._cleanup_expired_task_tokens()
    assert len(looked) == 1
    time.sleep(0.06)
    state._cleanup_expired_task_tokens()
    assert len(looked) == 2
    superlink.throttle_token_cleanup(SimpleNamespace())  # one that keeps tasks in another way
