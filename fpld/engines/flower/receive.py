"""Receive one reply: with no more bytes than it may have, in no more time than it may take, to what was asked.

Flower names the pieces of a reply but not their sizes, and fetches all of them before anyone can look. Here each piece
is refused by the length that its HTTP answer states, before it is read, and pieces that never come are not waited for.
What is wrong with a reply is an error in its place: one node's trouble, and no one else's.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import httpx
from flwr.app import Array, Error, Message, Metadata
from flwr.app.message import make_message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid.http_grid import HttpGrid

from fpld.engines.flower.payload import content_bytes
from fpld.errors import ProtocolError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from flwr.proto.message_pb2 import ObjectTree
    from flwr.serverapp import Grid

log = logging.getLogger(__name__)

REFUSED = 100  # the code of errors that stand for replies which were not received; Flower's own are below
SLACK = 1 << 17  # bytes beyond the right size that are received: Flower's records, and enough to say what is wrong
PATIENCE = 3600.0  # seconds in which a reply that was announced must be whole, if the run has no deadline
_PIECE = 1 << 12  # bytes: pieces of a long reply are at least as long (Flower's own are of 5 MiB)
_FEW = 64  # pieces of a short reply
_LOST = 5  # the code of Flower's own error for a node that is not there any more
_PAUSES = 0.2, 1.0  # seconds between two looks for a piece, first and at most: shorter than a return takes
_most: ContextVar[int | None] = ContextVar("most", default=None)


class LostError(ProtocolError):
    """The node has gone while it sent its reply: the rest of it never comes."""


class Asked(NamedTuple):
    """A message that was sent: its id, Flower's id of the node, and the most bytes that a right reply has."""

    identity: str
    node: int
    most: int

    @property
    def room(self) -> int:
        """Return how many bytes are received at most."""
        return self.most + SLACK

    def check(self, size: int) -> None:
        """Refuse a reply of so many bytes if that is too much."""
        if size > self.room:
            raise ProtocolError(f"its reply holds {size} bytes, at most {self.most} are wanted")


def receive(grid: Grid, asked: Asked, over: threading.Event) -> Message | None:
    """Return the reply to a message if it is there; what cannot be used is a message with an error."""
    try:
        if isinstance(grid, HttpGrid):
            reply = _Pull(grid, asked, over).reply()
        else:
            reply = next(iter(grid.pull_messages([asked.identity])), None)
        if reply is not None:
            _check(reply, asked)
    except (RunNotRunningException, httpx.TransportError):  # the SuperLink's trouble, and no node's
        raise
    except LostError as error:
        return _refused(asked, str(error), _LOST)
    except ProtocolError as error:
        return _refused(asked, str(error))
    except Exception as error:  # Flower's readers raise what they like on hostile bytes
        log.debug("a reply cannot be read", exc_info=True)
        return _refused(asked, f"its reply cannot be read ({type(error).__name__})")
    return reply


class _Pull:
    """Pull the pieces of a reply over HTTP, one after the other."""

    def __init__(self, grid: HttpGrid, asked: Asked, over: threading.Event) -> None:
        self._asked, self._over, self._grid = asked, over, grid
        self._node, self._run = grid.node, grid.run.run_id
        self._client = grid._runtime_client
        hooks = self._client._client.event_hooks
        if _within not in hooks["response"]:
            self._client._client.event_hooks = {**hooks, "response": [*hooks["response"], _within]}
        self._pieces = _FEW + asked.most // _PIECE

    def reply(self) -> Message | None:
        """Return the reply, None if there is none yet or nobody waits for it any more."""
        with _at_most(SLACK + 100 * self._pieces):
            found = self._client.PullMessages(PullAppMessagesRequest(message_ids=[self._asked.identity]))
        for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            if head.metadata.reply_to_message_id == self._asked.identity:
                identity = head.metadata.message_id
                try:
                    contents = self._contents(tree)
                finally:  # the SuperLink may forget it, whatever it was
                    self._client.ConfirmMessageReceived(
                        ConfirmMessageReceivedRequest(node=self._node, run_id=self._run, message_object_id=identity)
                    )
                return None if contents is None else self._message(identity, contents)
        return None

    def _contents(self, tree: ObjectTree) -> dict[str, bytes] | None:
        """Return the pieces by their ids."""
        names = list(dict.fromkeys(piece.object_id for piece in iterate_object_tree(tree)))
        if len(names) > self._pieces:
            raise ProtocolError(f"its reply is in {len(names)} pieces, at most {self._pieces} are wanted")
        left, contents = self._asked.room, {}
        end = time.monotonic() + PATIENCE
        for name in names:
            found = self._piece(name, left, end)
            if found is None:
                return None
            left, contents[name] = left - len(found), found
        return contents

    def _piece(self, name: str, left: int, end: float) -> bytes | None:
        """Wait for a piece; None if nobody waits for the reply any more."""
        pause, longest = _PAUSES
        while not self._over.is_set():
            with _at_most(left):
                found = self._client.PullObject(PullObjectRequest(node=self._node, run_id=self._run, object_id=name))
            if not found.object_found:
                raise ProtocolError("its reply was announced, and pieces of it never came")
            if found.object_available:
                content: bytes = found.object_content
                return content
            if time.monotonic() > end:
                raise ProtocolError(f"its reply was announced, and not whole within {PATIENCE:g} s")
            if self._asked.node not in self._grid.get_node_ids():
                raise LostError("it went away while it sent its reply")
            self._over.wait(pause)
            pause = min(2 * pause, longest)
        return None

    def _message(self, identity: str, contents: dict[str, bytes]) -> Message:
        self._asked.check(_unfolded(contents))
        message = inflate_object_from_contents(identity, contents)
        if not isinstance(message, Message):
            raise ProtocolError("its reply is no message")
        message.metadata.__dict__["_message_id"] = identity
        return message


@contextmanager
def _at_most(size: int) -> Iterator[None]:
    """Refuse HTTP answers to this thread that are longer."""
    token = _most.set(size)
    try:
        yield
    finally:
        _most.reset(token)


def _within(response: httpx.Response) -> None:
    """Refuse an answer by the length that it states, before its body is read."""
    most, stated = _most.get(), response.headers.get("content-length", "")
    if most is not None and response.is_success and not (stated.isdecimal() and int(stated) <= most):
        raise ProtocolError(f"its reply is too long: a piece of {stated or 'unknown'} bytes, at most {most} were left")


def _unfolded(contents: dict[str, bytes]) -> int:
    """Return the bytes of all arrays of a reply; an array may name the same piece many times."""
    size = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            pieces = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            size += sum(len(contents[children[number]]) for number in pieces)
    return size


def _check(reply: Message, asked: Asked) -> None:
    """Refuse a reply that is to another message, of another node, or too long."""
    if reply.metadata.reply_to_message_id != asked.identity:
        raise ProtocolError("its reply says that it answers another message")
    if reply.has_error():
        return
    if reply.metadata.src_node_id != asked.node:
        raise ProtocolError("its reply says that it comes from another node")
    asked.check(content_bytes(reply.content))


def _refused(asked: Asked, reason: str, code: int = REFUSED) -> Message:
    metadata = Metadata(
        run_id=0,
        message_id="",
        src_node_id=asked.node,
        dst_node_id=0,
        reply_to_message_id=asked.identity,
        group_id="",
        created_at=time.time(),
        ttl=0.0,
        message_type="system",
    )
    return make_message(metadata=metadata, error=Error(code, reason))
