"""Flower's SuperLink with long polls, as `fpld aggregator` starts it.

    python -m fpld.engines.flower.patches.superlink ...      (arguments: those of flower-superlink)

Flower's nodes poll every few seconds. Over a thin link that costs more than the messages do, and a thousand nodes leave
a SuperLink no time for anything else. With a long poll a node asks once, and is answered when there is a message. It is
a heartbeat with one more header:

    node       POST send-node-heartbeat, header `fpld-wait: SECONDS`
    SuperLink  checks it like any heartbeat; 200, header `fpld-wait`
               `.` every three seconds: the connection is alive
               `!` a message is stored for this node: poll for it;  `-` none came within SECONDS

The answer never holds a message, so none is lost with a connection. Only this SuperLink knows the header. Any other one
answers the heartbeat at once, and nodes poll as `patches.polling` says.

`LongPollApp` wraps Flower's ASGI application: a heartbeat with the header is answered by Flower first, which checks who
sent it. Then the answer is held until `MessageEvents`, which wraps the SuperLink's store of messages, sees a message
for that node.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import os
import resource
import threading
import time
from collections import Counter
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fpld.engines.flower.log import FolderLogHandler
from fpld.engines.flower.patches import RUN_VARIABLE, is_on
from fpld.federation.telemetry import listen

with contextlib.suppress(ImportError):  # in another version of Flower: the patch `long_poll` is then off
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEARTBEAT_PATH = "/v1/fleet/send-node-heartbeat"
WAIT_HEADER = "fpld-wait"
KEEPALIVE_SECONDS = 3.0  # between two dots
DEAD_AFTER_SECONDS = 10.0  # a connection without a dot for so long is gone
KEEPALIVE = b"."
MESSAGE_STORED = b"!"
NO_MESSAGE = b"-"
_MAX_HOLD_SECONDS = 120.0
_MAX_HEARTBEAT_BYTES = 1 << 10
_IDLE_CONNECTION_SECONDS = 75  # longer than nodes keep theirs
_MAX_OPEN_FILES = 1 << 16  # two connections for each node, and Flower's own
_PIECES_SECONDS = 0.3  # after a message its pieces are stored: a node that comes earlier asks for each in vain
_SHUTDOWN_SECONDS = 2  # for requests that are open when the SuperLink is told to end


class MessageEvents:
    """Events of nodes for which a message was stored since they last polled in vain.

    Two counters avoid lost wakeups: how many messages were stored for a node, and how many of them had been stored
    when it last found nothing. A node may wait only while the two are equal.
    """

    def __init__(self, state: Any) -> None:
        self._stored = Counter[int]()
        self._stored_when_empty = dict[int, int]()
        self._waiting: dict[int, asyncio.Event] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store = state.store_message_and_object_tree
        self._get = state.get_message_ins
        state.store_message_and_object_tree = self._storing
        state.get_message_ins = self._getting

    def _storing(self, message: Any, *arguments: Any, **named: Any) -> Any:
        result = self._store(message, *arguments, **named)
        self._notify(message.metadata.dst_node_id)  # only now: a node that polls must find it
        return result

    def _getting(self, node_id: int, limit: int | None, **named: Any) -> Any:
        stored = self._stored[node_id]  # before looking: a message that is stored meanwhile must wake the node
        messages = self._get(node_id, limit, **named)
        if not messages:
            self._stored_when_empty[node_id] = stored
        return messages

    def _notify(self, node: int) -> None:
        with self._lock:
            self._stored[node] += 1
            event = self._waiting.get(node)
        if event is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all that waited with it
                self._loop.call_soon_threadsafe(self._loop.call_later, _PIECES_SECONDS, event.set)

    @contextlib.contextmanager
    def waiting(self, node: int) -> Any:
        """Give the event of a node that waits; a second long poll of the same node ends the first."""
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        with self._lock:
            previous = self._waiting.get(node)
            self._waiting[node] = event
            # Also true for a node that has not polled this process yet.
            if self._stored_when_empty.get(node) != self._stored[node]:
                event.set()
        if previous is not None:
            previous.set()
        try:
            yield event
        finally:
            with self._lock:
                if self._waiting.get(node) is event:
                    del self._waiting[node]


class LongPollApp:
    """The SuperLink's ASGI application, with long polls."""

    def __init__(self, app: ASGIApp, events: MessageEvents) -> None:
        self._app = app
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as Flower does, unless it is a long poll."""
        seconds = _hold_seconds(scope)
        if seconds is None:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            await send({"type": "http.response.start", "status": HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "headers": []})
            await send({"type": "http.response.body"})
            return
        answer: list[Message] = []
        await self._app(scope, _replay(body, receive), _collect(answer))
        if not answer or answer[0]["status"] != HTTPStatus.OK:
            for message in answer:
                await send(message)
            return
        node = SendNodeHeartbeatRequest.FromString(body).node.node_id
        with self._events.waiting(node) as event:
            await _hold(event, seconds, receive, send)


def _hold_seconds(scope: Scope) -> float | None:
    """Return for how long the answer to a request may be held; None if it is not a long poll."""
    if scope["type"] != "http" or scope["path"] != HEARTBEAT_PATH:
        return None
    value = dict(scope["headers"]).get(WAIT_HEADER.encode(), b"")
    return min(float(value), _MAX_HOLD_SECONDS) if value.isdigit() and len(value) < 9 else None


async def _body(receive: Receive) -> bytes | None:
    """Read a request's body; None if it is longer than any heartbeat."""
    body = b""
    more = True
    while more and len(body) <= _MAX_HEARTBEAT_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body if len(body) <= _MAX_HEARTBEAT_BYTES else None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which was read already."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Message:
        return left.pop() if left else await receive()

    return first


def _collect(answer: list[Message]) -> Send:
    async def send(message: Message) -> None:
        answer.append(message)

    return send


async def _hold(event: asyncio.Event, seconds: float, receive: Receive, send: Send) -> None:
    """Answer when the event is set, the time is over, or the node has gone."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": [(WAIT_HEADER.encode(), b"1")]})
    disconnected = asyncio.ensure_future(_disconnect(receive))
    woken = asyncio.ensure_future(event.wait())
    try:
        while not (woken.done() or disconnected.done()) and clock() < end:
            await asyncio.wait(
                {disconnected, woken},
                timeout=min(KEEPALIVE_SECONDS, end - clock()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not woken.done():
                await send({"type": "http.response.body", "body": KEEPALIVE, "more_body": True})
    finally:
        disconnected.cancel()
        woken.cancel()
    await send({"type": "http.response.body", "body": MESSAGE_STORED if event.is_set() else NO_MESSAGE})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def throttle_token_cleanup(state: Any, seconds: float = 1.0) -> None:
    """Let a SuperLink look for expired tasks once in so many seconds, not with every piece of a message.

    Each look writes to its database, which only one request can do at a time.
    """
    clean: Callable[[], None] | None = getattr(state, "_cleanup_expired_task_tokens", None)
    if clean is None:  # the state in memory, which does this in another way
        return
    last = -math.inf

    def throttled() -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            clean()

    state._cleanup_expired_task_tokens = throttled


def _serve(app: Any, **named: Any) -> None:
    """Serve the SuperLink's application in the place of `uvicorn.run`."""
    import uvicorn

    state = app.state.linkstate_factory.state()
    throttle_token_cleanup(state)
    uvicorn.run(
        LongPollApp(app, MessageEvents(state)),
        timeout_keep_alive=_IDLE_CONNECTION_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        **named,
    )


def run_superlink() -> None:
    """Run `flower-superlink` with long polls, and as many open files as this machine allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    program: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    folder = os.environ.get(RUN_VARIABLE)
    with listen(FolderLogHandler(Path(folder))) if folder is not None else contextlib.nullcontext():
        long_polls = is_on("long_poll")
    if long_polls:
        program.uvicorn = SimpleNamespace(run=_serve)
    program.flower_superlink()


if __name__ == "__main__":
    run_superlink()
