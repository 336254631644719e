"""Send messages over a Grid, and take the replies as they come.

One thread asks the SuperLink for many replies at once. Flower fetches them whole; with the patch `receive` a few other
threads fetch the pieces of those that are announced, each reply in turns: a slow one holds up no other. Messages are
made as they are sent, and replies are handed over one by one, so the number of nodes costs no memory.

A reply that cannot be used is replaced by an `UnusableReply`, so it affects no other node. Only public names of
Flower's are used here.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import re
import threading
import time
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, NamedTuple

import httpx
from flwr.app import Error, Message, Metadata

from fpld.engines.flower.messages import content_bytes
from fpld.engines.flower.patches import is_on
from fpld.errors import ProtocolError
from fpld.federation.record import Incident
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from flwr.serverapp import Grid


log = logging.getLogger(__name__)

LOST_CODE = 3  # Flower's code of an error that stands for a lost reply
REFUSED_CODE = 100  # our code of an error that stands for a refused reply; Flower's own codes are below
SLACK_BYTES = 1 << 17  # received beyond the right size: for Flower's records, and to say what is wrong

_PAUSE_SECONDS = 0.5  # between two polls for replies; Flower's own loop takes three
_PAUSE_SECONDS_PER_POLL = 0.25  # a poll for a batch of replies takes a SuperLink 12 ms and more
_SLICE_SECONDS = 1.0  # of a wait for a reply
_FETCH_THREADS = 8
_MAX_PUSHES = 5  # of the same messages
_BATCH = 50  # messages that are made and sent, or replies that are polled for, at a time
_REASONS: dict[int, tuple[str, str]] = {
    3: ("lost", "its reply got lost"),
    4: ("lost", "its reply got lost"),
    5: ("lost", "its SuperNode stopped or died"),
    8: ("failed", "its process crashed"),
}


class SentMessage(NamedTuple):
    """A message that was sent: its id, Flower's id of the node, and the largest size of a right reply in bytes."""

    identity: str
    node: int
    max_bytes: int

    @property
    def max_received_bytes(self) -> int:
        """Return how many bytes of a reply are received at most."""
        return self.max_bytes + SLACK_BYTES

    def check_size(self, size: int) -> None:
        """Refuse a reply of so many bytes if that is too large."""
        if size > self.max_received_bytes:
            raise ProtocolError(f"its reply holds {size} bytes, at most {self.max_bytes} are wanted")


class UnusableReply(Message):
    """An error in the place of a reply. Flower makes messages of its own process only: this is one of a node."""

    def __init__(self, sent: SentMessage, code: int, reason: str) -> None:  # not Flower's, which would look for a run
        self._replaced = Metadata(
            run_id=0,
            message_id="",
            src_node_id=sent.node,
            dst_node_id=0,
            reply_to_message_id=sent.identity,
            group_id="",
            created_at=time.time(),
            ttl=0.0,
            message_type="system",
        )
        self._reason = Error(code, reason)

    @property
    def metadata(self) -> Metadata:
        """Which message it answers, and of which node."""
        return self._replaced

    @property  # type: ignore[misc]  # nobody sets it
    def error(self) -> Error:
        """Why the reply cannot be used."""
        return self._reason

    def has_error(self) -> bool:
        """Return True."""
        return True

    def has_content(self) -> bool:
        """Return False."""
        return False


class ReplyPull:
    """The reply to one message, which Flower fetches whole; `patches.receive` fetches it in pieces."""

    __slots__ = ("sent",)  # one for each node

    def __init__(self, grid: Grid, sent: SentMessage) -> None:  # noqa: ARG002 - pieces are asked for over the Grid
        self.sent = sent

    @property
    def announced(self) -> bool:
        """Return whether there is a reply of which pieces are still to come."""
        return False

    @property
    def pause(self) -> float:
        """Return after how many seconds to ask again for a piece."""
        return 0.0

    def step(self) -> Message | None:
        """Fetch the pieces that are there; return the reply if it is complete."""
        return None

    def drop(self) -> None:
        """Let the SuperLink delete the reply."""

    def checked(self, reply: Message) -> Message:
        """Return a reply if it is to the right message, of the right node and not too large; else an error."""
        try:
            _check(reply, self.sent)
        except Exception as error:  # Flower's parsers raise all kinds of errors on hostile bytes
            return unusable(self.sent, error)
        return reply


def poll_whole(grid: Grid, pulls: Mapping[str, ReplyPull]) -> list[Message]:
    """Ask once for the replies to some messages, by their ids; return those that are there, or unusable.

    If one of them cannot be read, that node is to blame, but not known. So each of several replies counts as lost and
    is asked for again.
    """
    try:
        replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(list(pulls))}
    except httpx.TransportError:  # a failure of the SuperLink, not of a node
        raise
    except Exception as error:  # Flower's parsers
        return all_unusable(pulls, error)
    return [pulls[identity].checked(reply) for identity, reply in replies.items() if identity in pulls]


def all_unusable(pulls: Mapping[str, ReplyPull], error: Exception) -> list[Message]:
    """Return what replaces replies of which one cannot be used."""
    code = LOST_CODE if len(pulls) > 1 else REFUSED_CODE
    return [unusable(pull.sent, error, code) for pull in pulls.values()]


def unusable(sent: SentMessage, error: Exception, code: int = REFUSED_CODE) -> Message:
    """Return the message that replaces a reply which cannot be used."""
    if isinstance(error, ProtocolError):
        return UnusableReply(sent, code, str(error))
    log.debug("a reply cannot be read", exc_info=error)
    return UnusableReply(sent, code, f"its reply cannot be read ({type(error).__name__})")


def _check(reply: Message, sent: SentMessage) -> None:
    """Refuse a reply that is to another message, of another node, or too large."""
    if reply.metadata.reply_to_message_id != sent.identity:
        raise ProtocolError("its reply says that it answers another message")
    if reply.has_error():
        return
    if reply.metadata.src_node_id != sent.node:
        raise ProtocolError("its reply says that it comes from another node")
    sent.check_size(content_bytes(reply.content))


@dataclass(order=True)
class _Turn:
    """When to fetch the next pieces of a reply."""

    due: float
    number: int
    pull: ReplyPull = field(compare=False)


class Exchange:
    """Messages that are sent, and their replies as they come.

    Parameters
    ----------
    grid
        Flower's connection to the nodes.
    alone
        Poll for each reply by itself, so that no malformed reply of another node can take it along.
    """

    def __init__(self, grid: Grid, *, alone: bool = False) -> None:
        self.grid = grid
        self._pull: type[ReplyPull] = ReplyPull
        self._poll_replies: Callable[[Grid, Mapping[str, ReplyPull]], list[Message]] = poll_whole
        if is_on("receive"):
            from fpld.engines.flower.patches import receive

            if receive.in_pieces(grid):
                self._pull = receive.PieceByPiece
                self._poll_replies = receive.poll_announcements
        self._batch = 1 if alone else _BATCH
        self._replies: Queue[Message | BaseException] = Queue(_FETCH_THREADS)  # more wait at the SuperLink
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._waiting: dict[str, ReplyPull] = {}
        self._turns: list[_Turn] = []
        self._threads = self.left = 0

    def send(self, messages: Iterable[Message], max_bytes: Iterable[int]) -> Iterator[None]:
        """Send messages, a batch at each step, and keep none.

        `max_bytes` has the largest size of each reply: longer ones are refused.
        """
        pairs = zip(messages, max_bytes, strict=True)
        while batch := list(islice(pairs, _BATCH)):
            pushed = set(_push(self.grid, [message for message, _ in batch]))
            self._await([(message.metadata, size) for message, size in batch], pushed)
            yield

    def wait(self, seconds: float | None) -> Message | None:
        """Return the next reply; None if there is none within so many seconds.

        Flower tells a process to end by raising SIGINT in one of its threads, which wakes no lock that the main thread
        waits for: so this waits in slices, between which signals are seen.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = _SLICE_SECONDS if end is None else end - time.monotonic()
            try:
                reply = self._replies.get(timeout=min(max(left, 0.001), _SLICE_SECONDS))
            except Empty:
                if left <= 0:
                    return None
            else:
                break
        if isinstance(reply, BaseException):
            raise reply
        self.left -= 1
        return reply

    def close(self) -> None:
        """Stop waiting for replies."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()

    def _await(self, sent: Sequence[tuple[Metadata, int]], pushed: Collection[str]) -> None:
        """Poll for the replies to messages that were sent; start the threads that are still missing."""
        for head, size in sent:
            if head.message_id in pushed:
                with self._changed:
                    sent_message = SentMessage(head.message_id, head.dst_node_id, size)
                    self._waiting[head.message_id] = self._pull(self.grid, sent_message)
                    self._changed.notify_all()
                self.left += 1
        while self._threads < min(1 + self.left, 1 + _FETCH_THREADS) and self.left:
            work = self._fetch if self._threads else self._poll
            threading.Thread(target=self._do, args=(work,), daemon=True, name=f"reply {self._threads}").start()
            self._threads += 1

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised where the replies are taken; that a run was stopped is no Exception
            self._give(error)

    def _give(self, reply: Message | BaseException) -> None:
        """Hand a reply over as soon as the queue has room, unless the exchange was closed."""
        while not self._over.is_set():
            with contextlib.suppress(Full):
                self._replies.put(reply, timeout=_PAUSE_SECONDS)
                return

    def _poll(self) -> None:
        """Poll for replies, a batch at a time, until the exchange is closed."""
        while not self._over.is_set():
            with self._changed:
                waiting = list(self._waiting.items())
                if not waiting:
                    self._changed.wait(_PAUSE_SECONDS)
            for start in range(0, len(waiting), self._batch):
                if not self._over.is_set():
                    self._poll_batch(dict(waiting[start : start + self._batch]))
            polls = -(-len(self._waiting) // self._batch)
            self._over.wait(max(_PAUSE_SECONDS, _PAUSE_SECONDS_PER_POLL * polls) if self._waiting else 0)

    def _poll_batch(self, pulls: dict[str, ReplyPull]) -> None:
        """Poll for some replies; hand over those that are complete, and have the pieces of others fetched."""
        for reply in self._poll_replies(self.grid, pulls):
            if self._waiting.pop(reply.metadata.reply_to_message_id, None) is not None:
                self._give(reply)
        with self._changed:
            for identity, pull in pulls.items():
                if pull.announced and self._waiting.pop(identity, None) is not None:
                    heapq.heappush(self._turns, _Turn(time.monotonic(), len(self._turns), pull))
            self._changed.notify_all()

    def _fetch(self) -> None:
        """Fetch pieces of the reply that is due first, until the exchange is closed; then drop the rest."""
        while (turn := self._next()) is not None:
            reply = turn.pull.step()
            if reply is not None:
                self._give(reply)
                continue
            turn.due = time.monotonic() + turn.pull.pause
            with self._changed:
                heapq.heappush(self._turns, turn)
        while (turn := self._remaining()) is not None:
            turn.pull.drop()

    def _next(self) -> _Turn | None:
        """Wait for the turn that is due first; None if the exchange was closed."""
        with self._changed:
            while not self._over.is_set():
                wait = self._turns[0].due - time.monotonic() if self._turns else _PAUSE_SECONDS
                if wait <= 0:
                    return heapq.heappop(self._turns)
                self._changed.wait(min(wait, _PAUSE_SECONDS))
        return None

    def _remaining(self) -> _Turn | None:
        with self._changed:
            return self._turns.pop() if self._turns else None


def _push(grid: Grid, messages: Sequence[Message]) -> Iterable[str]:
    """Push messages, again if the SuperLink stopped meanwhile: it recognizes a message that comes twice."""
    for _ in range(_MAX_PUSHES - 1):
        try:
            return grid.push_messages(messages)
        except Exception as error:  # Flower's errors of pushing are no public names
            log.warning("the SuperLink did not take a message, which is sent again: %s", printable(error))
    return grid.push_messages(messages)


def exchange(
    grid: Grid, messages: Iterable[Message], timeout: float | None, max_bytes: Iterable[int], *, alone: bool = False
) -> Iterator[Message]:
    """Send messages; yield each reply as it comes, until all are there or the time is over (see `Exchange`)."""
    sent = Exchange(grid, alone=alone)
    try:
        for _ in sent.send(messages, max_bytes):
            # The first nodes reply while the last ones are still to be asked.
            while (reply := sent.wait(0.0)) is not None:
                yield reply
        end = None if timeout is None else time.monotonic() + timeout
        while sent.left:
            reply = sent.wait(None if end is None else end - time.monotonic())
            if reply is None:
                return
            yield reply
    finally:
        sent.close()


def explain(name: str, error: Error) -> Incident:
    """Return why a node gave no answer, from the error in its place."""
    if error.code in _REASONS:
        return Incident(name, *_REASONS[error.code])
    reason = printable(error.reason or f"error {error.code}", 1000)
    # Flower wraps the sentence of an exception at the node: <class 'Error'>:<'sentence'>.
    wrapped = re.fullmatch(r"<class '[^']*'>:<'(.*)'>", reason, re.DOTALL)
    return Incident(name, "failed", wrapped[1] if wrapped else reason)
