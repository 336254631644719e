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
    from collections.abc import Iterator, Mapping

    from flwr.proto.message_pb2 import ObjectTree
    from flwr.serverapp import Grid
    from flwr.supercore.runtime import RuntimeHttpClient

log = logging.getLogger(__name__)

LOST = 3  # Flower's code of errors that stand for replies which got lost
_GONE = 5  # Flower's code of errors for a node that is not there any more
REFUSED = 100  # the code of errors that stand for replies which were not received; Flower's own are below
SLACK = 1 << 17  # bytes beyond the right size that are received: Flower's records, and enough to say what is wrong
PATIENCE = 3600.0  # seconds in which a reply that was announced must be whole, if the run has no deadline
_PIECE = 1 << 12  # bytes: pieces of a long reply are at least as long (Flower's own are of 5 MiB)
_FEW = 64  # pieces of a short reply
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

    @property
    def pieces(self) -> int:
        """Return in how many pieces a reply may come at most."""
        return _FEW + self.most // _PIECE

    def check(self, size: int) -> None:
        """Refuse a reply of so many bytes if that is too much."""
        if size > self.room:
            raise ProtocolError(f"its reply holds {size} bytes, at most {self.most} are wanted")


def look(grid: Grid, pulls: Mapping[str, Pull]) -> list[Message]:
    """Ask once for the replies to some messages, by their ids; return those that are here, or that cannot be used.

    Replies over HTTP are only announced: their pulls then fetch the pieces. If the answer is too long to be read, one
    node is to blame, and nobody knows which: of several replies each counts as lost, so that it is asked for again.
    """
    try:
        if not isinstance(grid, HttpGrid):
            replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(list(pulls))}
            return [pulls[identity].checked(reply) for identity, reply in replies.items() if identity in pulls]
        with _at_most(SLACK + sum(100 * pull.asked.pieces for pull in pulls.values())):
            found = _client(grid).PullMessages(PullAppMessagesRequest(message_ids=list(pulls)))
        heads = zip(found.messages_list, found.message_object_trees, strict=True)
    except (RunNotRunningException, httpx.TransportError):  # the SuperLink's trouble, and no node's
        raise
    except Exception as error:  # Flower's readers raise what they like on hostile bytes
        return [_unusable(pull.asked, error, LOST if len(pulls) > 1 else REFUSED) for pull in pulls.values()]
    refused = []
    for head, tree in heads:
        pull = pulls.get(head.metadata.reply_to_message_id)
        if pull is not None and (refusal := pull.announce(head.metadata.message_id, tree)) is not None:
            refused.append(refusal)
    return refused


class Pull:
    """The reply to a message on its way to us: a step at a time, and no step waits for a node.

    What cannot be used is a message with an error.
    """

    __slots__ = "_contents", "_end", "_grid", "_identity", "_left", "_names", "_pause", "asked"  # one for each node

    def __init__(self, grid: Grid, asked: Asked) -> None:
        self.asked, self._grid = asked, grid
        self._identity, self._names = "", list[str]()  # of pieces, the next one last
        self._contents: dict[str, bytes] = {}
        self._left, self._end, self._pause = asked.room, 0.0, _PAUSES[0]

    @property
    def announced(self) -> bool:
        """Return whether there is a reply, of which pieces are still to come."""
        return bool(self._identity)

    @property
    def pause(self) -> float:
        """Return after how many seconds to look again for a piece: longer each time."""
        pause, self._pause = self._pause, min(2 * self._pause, _PAUSES[1])
        return pause

    def announce(self, identity: str, tree: ObjectTree) -> Message | None:
        """Note the pieces of the reply; return an error if they are too many."""
        self._identity, self._end = identity, time.monotonic() + PATIENCE
        self._names = list(dict.fromkeys(piece.object_id for piece in iterate_object_tree(tree)))[::-1]
        if len(self._names) <= self.asked.pieces:
            return None
        self.drop()
        most = self.asked.pieces
        return _error(self.asked, REFUSED, f"its reply is in {len(self._names)} pieces, at most {most} are wanted")

    def step(self) -> Message | None:
        """Fetch the pieces that are there; return the reply if it is whole by now."""
        try:
            if not self._pieces():
                return None
            identity = self._identity
            self.drop()
            return self.checked(self._message(identity))
        except (RunNotRunningException, httpx.TransportError):  # the SuperLink's trouble, and no node's
            raise
        except Exception as error:  # Flower's readers raise what they like on hostile bytes
            self.drop()
            return _unusable(self.asked, error, _GONE if isinstance(error, LostError) else REFUSED)

    def drop(self) -> None:
        """Let the SuperLink forget the reply, whatever it was."""
        if self.announced and isinstance(self._grid, HttpGrid):
            identity, self._identity = self._identity, ""
            node, run = self._grid.node, self._grid.run.run_id
            _client(self._grid).ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=identity)
            )

    def checked(self, reply: Message) -> Message:
        """Return a reply if it is to what was asked, of the node that was asked, and short enough; else an error."""
        try:
            _check(reply, self.asked)
        except Exception as error:  # as above
            return _unusable(self.asked, error)
        return reply

    def _pieces(self) -> bool:
        """Fetch the pieces that are there; return whether all are."""
        grid: HttpGrid = self._grid  # type: ignore[assignment]  # others announce nothing
        while self._names:
            with _at_most(self._left):
                request = PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=self._names[-1])
                found = _client(grid).PullObject(request)
            if not found.object_found:
                raise ProtocolError("its reply was announced, and pieces of it never came")
            if not found.object_available:
                if time.monotonic() > self._end:
                    raise ProtocolError(f"its reply was announced, and not whole within {PATIENCE:g} s")
                if self.asked.node not in grid.get_node_ids():
                    raise LostError("it went away while it sent its reply")
                return False
            self._contents[self._names.pop()] = found.object_content
            self._left, self._pause = self._left - len(found.object_content), _PAUSES[0]
        return True

    def _message(self, identity: str) -> Message:
        self.asked.check(_unfolded(self._contents))
        message = inflate_object_from_contents(identity, self._contents)
        if not isinstance(message, Message):
            raise ProtocolError("its reply is no message")
        message.metadata.__dict__["_message_id"] = identity
        return message


def _client(grid: HttpGrid) -> RuntimeHttpClient:
    """Return Flower's client, which from now on refuses answers that are too long."""
    client = grid._runtime_client
    hooks = client._client.event_hooks
    if _within not in hooks["response"]:
        client._client.event_hooks = {**hooks, "response": [*hooks["response"], _within]}
    return client


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


def _unusable(asked: Asked, error: Exception, code: int = REFUSED) -> Message:
    """Return what stands in the place of a reply that cannot be used."""
    if isinstance(error, ProtocolError):
        return _error(asked, code, str(error))
    log.debug("a reply cannot be read", exc_info=error)
    return _error(asked, code, f"its reply cannot be read ({type(error).__name__})")


def _error(asked: Asked, code: int, reason: str) -> Message:
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
