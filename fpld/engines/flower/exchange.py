"""Send messages over a Grid and return the replies as they come."""

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
from typing import TYPE_CHECKING

from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from fpld._check import printable
from fpld.engines.flower.receive import Asked, Pull, look
from fpld.federation.engine import Absence

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from flwr.app import Error, Message, Metadata
    from flwr.serverapp import Grid

    from fpld.federation.engine import Why

log = logging.getLogger(__name__)

_PAUSE = 0.5  # seconds between two looks for a reply; Flower's own loop takes three
_PAUSE_EACH = 0.25  # for each question: one takes a SuperLink 12 ms and more, and 50 replies are one question
_THREADS = 8  # that fetch replies
_PUSHES = 5  # how often messages are pushed at most
_SOME = 50  # messages that are made and sent at a time, or replies that are asked for at once
_REASONS: dict[int, tuple[Why, str]] = {
    3: ("lost", "its reply got lost"),
    4: ("lost", "its reply got lost"),
    5: ("lost", "its SuperNode stopped or died"),
    8: ("failed", "its process crashed"),
}


@dataclass(order=True)
class _Turn:
    """When to look next for the pieces of a reply."""

    due: float
    number: int
    pull: Pull = field(compare=False)


class Exchange:
    """Messages that are sent, and their replies as they come.

    One thread asks for many replies at once; a few others fetch the pieces of those that are there. A reply that comes
    slowly is laid aside: it holds up no other, and not the end either. `alone`: ask for each reply by itself, so that
    none is lost by another's fault.
    """

    def __init__(self, grid: Grid, *, alone: bool = False) -> None:
        self.grid, self._at_once = grid, 1 if alone else _SOME
        self._replies: Queue[Message | Exception] = Queue(_THREADS)  # more wait at the SuperLink
        self._over, self._changed = threading.Event(), threading.Condition()
        self._waiting: dict[str, Pull] = {}
        self._turns: list[_Turn] = []
        self._threads = self.left = 0

    def send(self, messages: Iterable[Message], most: Iterable[int]) -> Iterator[None]:
        """Send messages, some at each step, and keep none: their number costs no memory.

        `most` are the bytes that each reply may have: `fpld.engines.flower.receive` says what becomes of longer ones.
        """
        pairs = zip(messages, most, strict=True)
        while some := list(islice(pairs, _SOME)):
            pushed = set(_push(self.grid, [message for message, _ in some]))
            self._await([(message.metadata, size) for message, size in some], pushed)
            yield

    def wait(self, seconds: float | None) -> Message | None:
        """Return the next reply, None if there is none within so many seconds."""
        try:
            reply = self._replies.get(timeout=None if seconds is None else max(seconds, 0.001))
        except Empty:
            return None
        if isinstance(reply, Exception):
            raise reply
        self.left -= 1
        return reply

    def close(self) -> None:
        """Wait for no more."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()

    def _await(self, sent: Sequence[tuple[Metadata, int]], pushed: Collection[str]) -> None:
        """Look for the replies to messages that were sent from now on."""
        for head, size in sent:
            if head.message_id in pushed:
                with self._changed:
                    self._waiting[head.message_id] = Pull(self.grid, Asked(head.message_id, head.dst_node_id, size))
                    self._changed.notify_all()
                self.left += 1
        while self._threads < min(1 + self.left, 1 + _THREADS) and self.left:
            work = self._fetch if self._threads else self._look
            threading.Thread(target=self._do, args=(work,), daemon=True, name=f"reply {self._threads}").start()
            self._threads += 1

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised where the replies are taken
            self._give(error)

    def _give(self, reply: Message | Exception) -> None:
        """Hand a reply over as soon as there is room, unless nobody waits any more."""
        while not self._over.is_set():
            with contextlib.suppress(Full):
                self._replies.put(reply, timeout=_PAUSE)
                return

    def _look(self) -> None:
        """Ask for replies, some at a time, until nobody waits for them any more."""
        while not self._over.is_set():
            with self._changed:
                asked = list(self._waiting.items())
                if not asked:
                    self._changed.wait(_PAUSE)
            for start in range(0, len(asked), self._at_once):
                if not self._over.is_set():
                    self._hear(dict(asked[start : start + self._at_once]))
            questions = -(-len(self._waiting) // self._at_once)
            self._over.wait(max(_PAUSE, _PAUSE_EACH * questions) if self._waiting else 0)

    def _hear(self, asked: dict[str, Pull]) -> None:
        """Ask for some replies; hand over those that are there, and have the others' pieces fetched."""
        for reply in look(self.grid, asked):
            if self._waiting.pop(reply.metadata.reply_to_message_id, None) is not None:
                self._give(reply)
        with self._changed:
            for identity, pull in asked.items():
                if pull.announced and self._waiting.pop(identity, None) is not None:
                    heapq.heappush(self._turns, _Turn(time.monotonic(), len(self._turns), pull))
            self._changed.notify_all()

    def _fetch(self) -> None:
        """Fetch pieces of the reply that is due first, until nobody waits for any more."""
        while (turn := self._next()) is not None:
            reply = turn.pull.step()
            if reply is not None:
                self._give(reply)
                continue
            turn.due = time.monotonic() + turn.pull.pause
            with self._changed:
                heapq.heappush(self._turns, turn)
        while (turn := self._left_over()) is not None:
            turn.pull.drop()

    def _next(self) -> _Turn | None:
        """Wait for the turn that is due first; None if nobody waits any more."""
        with self._changed:
            while not self._over.is_set():
                wait = self._turns[0].due - time.monotonic() if self._turns else _PAUSE
                if wait <= 0:
                    return heapq.heappop(self._turns)
                self._changed.wait(min(wait, _PAUSE))
        return None

    def _left_over(self) -> _Turn | None:
        with self._changed:
            return self._turns.pop() if self._turns else None


def _push(grid: Grid, messages: Sequence[Message]) -> Iterable[str]:
    """Push messages; once more if the SuperLink has stopped on the way: it knows a message that comes again."""
    for _ in range(_PUSHES - 1):
        try:
            return grid.push_messages(messages)
        except ObjectPushError as error:
            log.warning("the SuperLink did not take a message, which is sent again: %s", printable(error))
    return grid.push_messages(messages)


def exchange(
    grid: Grid, messages: Iterable[Message], timeout: float | None, most: Iterable[int], *, alone: bool = False
) -> Iterator[Message]:
    """Push messages, and yield each reply as it comes, until all are there or the time is over: `Exchange`."""
    sent = Exchange(grid, alone=alone)
    try:
        for _ in sent.send(messages, most):
            while (reply := sent.wait(0.0)) is not None:  # the first answer while the last are still to be asked
                yield reply
        end = None if timeout is None else time.monotonic() + timeout
        while sent.left:
            reply = sent.wait(None if end is None else end - time.monotonic())
            if reply is None:
                return
            yield reply
    finally:
        sent.close()


def explain(name: str, error: Error) -> Absence:
    """Return why a node gave no answer."""
    if error.code in _REASONS:
        return Absence(name, *_REASONS[error.code])
    reason = printable(error.reason or f"error {error.code}", 1000)
    found = re.fullmatch(r"<class '[^']*'>:<'(.*)'>", reason, re.DOTALL)
    return Absence(name, "failed", found[1] if found else reason)
