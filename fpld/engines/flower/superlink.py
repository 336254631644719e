"""Flower's SuperLink, as `fpld aggregator` starts it: nodes can wait there for their messages.

    python -m fpld.engines.flower.superlink ...      (arguments: those of flower-superlink)

How they wait, and why, is said in `fpld.engines.flower.waiting`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import resource
import threading
import time
from collections import Counter
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import uvicorn
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

from fpld.engines.flower.waiting import ASK, DOT, LIFE, NOTHING, SIGN, WAITS
from fpld.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LONGEST = 120.0  # seconds for which an answer is held
_LARGEST = 1 << 10  # bytes of a sign of life
_KEPT = 75  # seconds for which a connection is kept that has nothing to do: longer than nodes keep it
_HANDLES = 1 << 16  # open files at most: two connections for each node, and Flower's own
_PIECES = 0.3  # seconds after which a message's pieces are stored too: who comes earlier asks for each in vain
_LAST = 2  # seconds that requests have left when the SuperLink is told to end


class Bell:
    """Who is to be woken: nodes with messages that were stored since they last asked in vain."""

    def __init__(self, state: Any) -> None:
        self._stored, self._seen = Counter[int](), dict[int, int]()
        self._waiting: dict[int, asyncio.Event] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store, self._get = state.store_message_and_object_tree, state.get_message_ins
        state.store_message_and_object_tree, state.get_message_ins = self._storing, self._getting

    def _storing(self, message: Any, *arguments: Any, **named: Any) -> Any:
        found = self._store(message, *arguments, **named)
        self._ring(message.metadata.dst_node_id)  # only now: whoever asks must find it
        return found

    def _getting(self, node_id: int, limit: int | None, **named: Any) -> Any:
        stored = self._stored[node_id]  # before looking: what is stored meanwhile rings again
        found = self._get(node_id, limit, **named)
        if not found:
            self._seen[node_id] = stored
        return found

    def _ring(self, node: int) -> None:
        with self._lock:
            self._stored[node] += 1
            event = self._waiting.get(node)
        if event is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: so have those who wait
                self._loop.call_soon_threadsafe(self._loop.call_later, _PIECES, event.set)

    @contextlib.contextmanager
    def waiting(self, node: int) -> Any:
        """Give the event of a node that waits; a second question of the same node ends the first."""
        self._loop, event = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            before, self._waiting[node] = self._waiting.get(node), event
            if self._seen.get(node) != self._stored[node]:  # or it never asked this process
                event.set()
        if before is not None:
            before.set()
        try:
            yield event
        finally:
            with self._lock:
                if self._waiting.get(node) is event:
                    del self._waiting[node]


class Waiting:
    """The SuperLink's application, with answers to signs of life that are held."""

    def __init__(self, app: ASGIApp, bell: Bell) -> None:
        self._app, self._bell = app, bell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: Flower's own way, but for a sign of life of a node that waits."""
        longest = _longest(scope)
        if longest is None:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            await send({"type": "http.response.start", "status": HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "headers": []})
            await send({"type": "http.response.body"})
            return
        answer: list[Message] = []
        await self._app(scope, _again(body, receive), _collect(answer))
        if not answer or answer[0]["status"] != HTTPStatus.OK:
            for message in answer:
                await send(message)
            return
        node = SendNodeHeartbeatRequest.FromString(body).node.node_id
        with self._bell.waiting(node) as event:
            await _hold(event, longest, receive, send)


def _longest(scope: Scope) -> float | None:
    """Return for how long the answer to a request may be held, None if at once."""
    if scope["type"] != "http" or scope["path"] != LIFE:
        return None
    asked = dict(scope["headers"]).get(WAITS.encode(), b"")
    return min(float(asked), _LONGEST) if asked.isdigit() and len(asked) < 9 else None


async def _body(receive: Receive) -> bytes | None:
    """Read a request's body, None if it is longer than any sign of life."""
    body, more = b"", True
    while more and len(body) <= _LARGEST:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body if len(body) <= _LARGEST else None


def _again(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Message:
        return left.pop() if left else await receive()

    return first


def _collect(answer: list[Message]) -> Send:
    async def send(message: Message) -> None:
        answer.append(message)

    return send


async def _hold(event: asyncio.Event, longest: float, receive: Receive, send: Send) -> None:
    """Answer when the event is set, the time is over, or whoever asked has gone."""
    clock = asyncio.get_running_loop().time
    end = clock() + longest
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": [(WAITS.encode(), b"1")]})
    gone, rung = asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(event.wait())
    try:
        while not (rung.done() or gone.done()) and clock() < end:
            await asyncio.wait({gone, rung}, timeout=min(SIGN, end - clock()), return_when=asyncio.FIRST_COMPLETED)
            if not rung.done():
                await send({"type": "http.response.body", "body": DOT, "more_body": True})
    finally:
        gone.cancel()
        rung.cancel()
    await send({"type": "http.response.body", "body": ASK if event.is_set() else NOTHING})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def clean_seldom(state: Any, seconds: float = 1.0) -> None:
    """Let a SuperLink look for tasks that have expired once a second, and not with every piece of a message.

    Each look writes to its database, which one request can do at a time.
    """
    clean: Callable[[], None] | None = getattr(state, "_cleanup_expired_task_tokens", None)
    if clean is None:  # a SuperLink that does otherwise
        return
    last = -math.inf

    def cleaning() -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            clean()

    state._cleanup_expired_task_tokens = cleaning


def _serve(app: Any, **named: Any) -> None:
    """Serve the SuperLink's application, in the place of uvicorn's own function."""
    state = app.state.linkstate_factory.state()
    clean_seldom(state)
    if not (hasattr(state, "store_message_and_object_tree") and hasattr(state, "get_message_ins")):
        raise ProtocolError("this version of Flower keeps messages in another way")
    waiting = Waiting(app, Bell(state))
    uvicorn.run(waiting, timeout_keep_alive=_KEPT, timeout_graceful_shutdown=_LAST, **named)


def main() -> None:
    """Run Flower's program, with as many open connections as this machine lets it have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HANDLES if most == resource.RLIM_INFINITY else min(most, _HANDLES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    program: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    if not hasattr(program, "uvicorn"):
        raise ProtocolError("this version of Flower serves in another way")
    program.uvicorn = SimpleNamespace(run=_serve)
    program.flower_superlink()


if __name__ == "__main__":
    main()
