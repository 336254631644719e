"""Receive replies over HTTP piece by piece, with limits on their size, their number of pieces and their time.

A reply is announced by its head and the ids of its pieces (`poll_announcements`), and then fetched (`PieceByPiece`).
Flower fetches all pieces before anyone can look at their sizes. Here each piece is refused by the length that its HTTP
response states, before the body is read, and pieces that never come are not waited for.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeGuard, cast

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid

from fpld.engines.flower.exchange import (
    REFUSED_CODE,
    SLACK_BYTES,
    ReplyPull,
    SentMessage,
    UnusableReply,
    all_unusable,
    unusable,
)
from fpld.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flwr.proto.message_pb2 import ObjectTree
    from flwr.serverapp import Grid
    from flwr.supercore.runtime import RuntimeHttpClient

_NODE_GONE_CODE = 5  # Flower's code of an error that stands for a node which has gone
MAX_REPLY_SECONDS = 3600.0  # from the head of a reply to its last piece, if the run has no deadline
_PIECE_BYTES = 1 << 12  # pieces of a long reply are at least so long (Flower's own are of 5 MiB)
_MIN_PIECES = 64  # that any reply may have
_HEAD_BYTES_PER_PIECE = 100
_PAUSE_SECONDS = 0.2, 1.0  # between two requests for a piece: the first pause, and the longest
_max_response_bytes: ContextVar[int | None] = ContextVar("max_response_bytes", default=None)


class LostError(ProtocolError):
    """A node has gone while it sent its reply: the rest never comes."""


def in_pieces(grid: Grid) -> TypeGuard[HttpGrid]:
    """Return whether replies of a Grid can be fetched in pieces."""
    return isinstance(grid, HttpGrid)


def max_pieces(sent: SentMessage) -> int:
    """Return in how many pieces a reply may come at most."""
    return _MIN_PIECES + sent.max_bytes // _PIECE_BYTES


def poll_announcements(grid: Grid, pulls: Mapping[str, ReplyPull]) -> list[Message]:
    """Ask once for the heads of the replies to some messages, by their ids; return errors for those that are refused.

    The pulls then fetch the pieces. If the response is too long to be read, one of the nodes is to blame, but not
    known. So each of several replies counts as lost and is asked for again.
    """
    client = _client(cast("HttpGrid", grid))
    try:
        heads_bytes = sum(_HEAD_BYTES_PER_PIECE * max_pieces(pull.sent) for pull in pulls.values())
        with _response_limit(SLACK_BYTES + heads_bytes):
            response = client.PullMessages(PullAppMessagesRequest(message_ids=list(pulls)))
        heads = zip(response.messages_list, response.message_object_trees, strict=True)
    except httpx.TransportError:  # a failure of the SuperLink, not of a node
        raise
    except Exception as error:  # Flower's parsers raise all kinds of errors on hostile bytes
        return all_unusable(pulls, error)
    refused = []
    for head, tree in heads:
        pull = pulls.get(head.metadata.reply_to_message_id)
        if isinstance(pull, PieceByPiece) and (refusal := pull.announce(head.metadata.message_id, tree)) is not None:
            refused.append(refusal)
    return refused


class PieceByPiece(ReplyPull):
    """Fetch the reply to one message in steps, none of which waits for a node.

    A reply that cannot be used becomes a message with an error.
    """

    __slots__ = "_contents", "_end", "_grid", "_identity", "_left", "_names", "_pause"

    def __init__(self, grid: Grid, sent: SentMessage) -> None:
        super().__init__(grid, sent)
        self._grid = cast("HttpGrid", grid)
        self._identity = ""  # of the reply, while it is announced and not dropped
        self._names = list[str]()  # of the pieces to come, the next one last
        self._contents: dict[str, bytes] = {}
        self._left = sent.max_received_bytes
        self._end = 0.0
        self._pause = _PAUSE_SECONDS[0]

    @property
    def announced(self) -> bool:
        """Return whether there is a reply of which pieces are still to come."""
        return bool(self._identity)

    @property
    def pause(self) -> float:
        """Return after how many seconds to ask again for a piece; it doubles each time."""
        pause = self._pause
        self._pause = min(2 * self._pause, _PAUSE_SECONDS[1])
        return pause

    def announce(self, identity: str, tree: ObjectTree) -> Message | None:
        """Note the pieces of the reply; return an error if they are too many."""
        self._identity = identity
        self._end = time.monotonic() + MAX_REPLY_SECONDS
        self._names = list(dict.fromkeys(piece.object_id for piece in iterate_object_tree(tree)))[::-1]
        if len(self._names) <= max_pieces(self.sent):
            return None
        self.drop()
        reason = f"its reply is in {len(self._names)} chunks, at most {max_pieces(self.sent)} are wanted"
        return UnusableReply(self.sent, REFUSED_CODE, reason)

    def step(self) -> Message | None:
        """Fetch the pieces that are there; return the reply if it is complete."""
        try:
            if not self._pieces():
                return None
            identity = self._identity
            self.drop()
            return self.checked(self._message(identity))
        except httpx.TransportError:  # a failure of the SuperLink, not of a node
            raise
        except Exception as error:  # Flower's parsers raise all kinds of errors on hostile bytes
            self.drop()
            return unusable(self.sent, error, _NODE_GONE_CODE if isinstance(error, LostError) else REFUSED_CODE)

    def drop(self) -> None:
        """Let the SuperLink delete the reply."""
        if self.announced:
            identity = self._identity
            self._identity = ""
            node = self._grid.node
            run = self._grid.run.run_id
            request = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=identity)
            _client(self._grid).ConfirmMessageReceived(request)

    def _pieces(self) -> bool:
        """Fetch the pieces that are there; return whether all are."""
        grid = self._grid
        while self._names:
            with _response_limit(self._left):
                request = PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=self._names[-1])
                response = _client(grid).PullObject(request)
            if not response.object_found:
                raise ProtocolError("its reply was announced, and chunks of it never came")
            if not response.object_available:
                if time.monotonic() > self._end:
                    raise ProtocolError(f"its reply was announced, and not whole within {MAX_REPLY_SECONDS:g} s")
                if self.sent.node not in grid.get_node_ids():
                    raise LostError("it went away while it sent its reply")
                return False
            self._contents[self._names.pop()] = response.object_content
            self._left = self._left - len(response.object_content)
            self._pause = _PAUSE_SECONDS[0]
        return True

    def _message(self, identity: str) -> Message:
        self.sent.check_size(_inflated_bytes(self._contents))
        message = inflate_object_from_contents(identity, self._contents)
        if not isinstance(message, Message):
            raise ProtocolError("its reply is no message")
        message.metadata.__dict__["_message_id"] = identity
        return message


def _client(grid: HttpGrid) -> RuntimeHttpClient:
    """Return Flower's client, with a hook that refuses responses which are too long."""
    client = grid._runtime_client
    hooks = client._client.event_hooks
    if _check_length not in hooks["response"]:
        client._client.event_hooks = {**hooks, "response": [*hooks["response"], _check_length]}
    return client


@contextmanager
def _response_limit(size: int) -> Iterator[None]:
    """Refuse longer HTTP responses to this thread."""
    token = _max_response_bytes.set(size)
    try:
        yield
    finally:
        _max_response_bytes.reset(token)


def _check_length(response: httpx.Response) -> None:
    """Refuse a response by the length that it states, before its body is read."""
    limit = _max_response_bytes.get()
    stated = response.headers.get("content-length", "")
    if limit is not None and response.is_success and not (stated.isdecimal() and int(stated) <= limit):
        raise ProtocolError(f"its reply is too long: a chunk of {stated or 'unknown'} bytes, at most {limit} were left")


def _inflated_bytes(contents: dict[str, bytes]) -> int:
    """Return the size of all arrays of a reply once inflated: an array may name the same piece many times."""
    size = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            pieces = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            size += sum(len(contents[children[number]]) for number in pieces)
    return size
