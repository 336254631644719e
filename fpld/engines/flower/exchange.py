"""Send messages over a Grid and return the replies as they come."""

from __future__ import annotations

import heapq
import re
import threading
import time
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from fpld._check import printable
from fpld.engines.flower.receive import Asked, Pull
from fpld.federation.engine import Absence

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from flwr.app import Error, Message, Metadata
    from flwr.serverapp import Grid

    from fpld.federation.engine import Why

_PAUSE = 0.5  # seconds between two looks for a reply; Flower's own loop takes three
_PAUSE_EACH = 0.02  # for each that is waited for: many nodes are not asked for more often than that
_THREADS = 8  # that look for replies
_SOME = 50  # messages that are made and sent at a time
_REASONS: dict[int, tuple[Why, str]] = {
    3: ("lost", "its reply got lost"),
    4: ("lost", "its reply got lost"),
    5: ("lost", "its SuperNode stopped or died"),
    8: ("failed", "its process crashed"),
}


@dataclass(order=True)
class _Turn:
    """When to look next for a reply."""

    due: float
    number: int
    pull: Pull = field(compare=False)


class Exchange:
    """Messages that were sent, and their replies as they come.

    A few threads look for replies, each when it is due. One that comes slowly is laid aside: it holds up no other, and
    not the end either. Messages are sent some at a time, and none is kept: their number costs no memory.
    `most` are the bytes that each reply may have: `fpld.engines.flower.receive` says what becomes of longer ones.
    """

    def __init__(self, grid: Grid, messages: Iterable[Message], most: Iterable[int]) -> None:
        self._replies: SimpleQueue[Message | Exception] = SimpleQueue()
        self._over, self._changed = threading.Event(), threading.Condition()
        self._turns: list[_Turn] = []
        self._sending, self.left = True, 0
        pairs = zip(messages, most, strict=True)
        try:
            while some := list(islice(pairs, _SOME)):
                pushed = set(grid.push_messages([message for message, _ in some]))
                self._await(grid, [(message.metadata, size) for message, size in some], pushed)
            self._sending = False
        except BaseException:
            self.close()
            raise

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

    def _await(self, grid: Grid, sent: Sequence[tuple[Metadata, int]], pushed: Collection[str]) -> None:
        """Look for the replies to messages that were sent, one after the other."""
        first, now = self.left, time.monotonic()
        for head, size in sent:
            if head.message_id in pushed:
                pull = Pull(grid, Asked(head.message_id, head.dst_node_id, size))
                with self._changed:
                    heapq.heappush(self._turns, _Turn(now + _PAUSE_EACH * (self.left - first), self.left, pull))
                self.left += 1
        for number in range(first, min(self.left, _THREADS)):
            threading.Thread(target=self._work, daemon=True, name=f"reply {number}").start()

    def _work(self) -> None:
        """Take the turn that is due first, until all replies are there or nobody waits for them any more."""
        try:
            while (turn := self._next()) is not None:
                reply = turn.pull.step()
                if reply is not None:
                    self._replies.put(reply)
                    continue
                pause = turn.pull.pause if turn.pull.announced else max(_PAUSE, _PAUSE_EACH * len(self._turns))
                turn.due = time.monotonic() + pause
                with self._changed:
                    heapq.heappush(self._turns, turn)
            self._drop()
        except Exception as error:  # raised where the replies are taken
            self._replies.put(error)

    def _next(self) -> _Turn | None:
        """Wait for the turn that is due first; None if there is none any more."""
        with self._changed:
            while (self._turns or self._sending) and not self._over.is_set():
                wait = self._turns[0].due - time.monotonic() if self._turns else _PAUSE
                if wait <= 0:
                    return heapq.heappop(self._turns)
                self._changed.wait(min(wait, _PAUSE))
        return None

    def _drop(self) -> None:
        """Forget replies that were announced and nobody waits for."""
        while self._over.is_set():
            with self._changed:
                if not self._turns:
                    return
                turn = self._turns.pop()
            turn.pull.drop()


def exchange(grid: Grid, messages: Iterable[Message], timeout: float | None, most: Iterable[int]) -> Iterator[Message]:
    """Push messages, and yield each reply as it comes, until all are there or the time is over: `Exchange`."""
    sent = Exchange(grid, messages, most)
    end = None if timeout is None else time.monotonic() + timeout
    try:
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
