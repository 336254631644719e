"""Send messages over a Grid and return the replies as they come."""

from __future__ import annotations

import logging
import re
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from fpld._check import printable
from fpld.engines.flower.receive import Asked, receive
from fpld.federation.engine import Absence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from flwr.app import Error, Message
    from flwr.serverapp import Grid

    from fpld.federation.engine import Why

log = logging.getLogger(__name__)

_PAUSE = 0.5  # seconds between two looks for a reply; Flower's own loop takes three
_PAUSE_EACH = 0.02  # for each that is waited for: many nodes are not asked for more often than that
_PUSHES = 5  # how often messages are pushed at most
_REASONS: dict[int, tuple[Why, str]] = {
    3: ("lost", "its reply got lost"),
    4: ("lost", "its reply got lost"),
    5: ("lost", "its SuperNode stopped or died"),
    8: ("failed", "its process crashed"),
}


class Exchange:
    """Messages that were sent, and their replies as they come.

    Each reply is received by a thread of its own: one that comes slowly holds up no other, and not the end either.
    `most` are the bytes that each may have: `fpld.engines.flower.receive` says what becomes of longer ones.
    """

    def __init__(self, grid: Grid, messages: Sequence[Message], most: Sequence[int]) -> None:
        pushed = set(_push(grid, messages))
        waiting = [
            Asked(message.metadata.message_id, message.metadata.dst_node_id, size)
            for message, size in zip(messages, most, strict=True)
            if message.metadata.message_id in pushed
        ]
        self._replies: SimpleQueue[Message | Exception] = SimpleQueue()
        self._over, pause = threading.Event(), max(_PAUSE, _PAUSE_EACH * len(waiting))
        self.left = len(waiting)
        for asked in waiting:
            arguments = grid, asked, self._replies, self._over, pause
            threading.Thread(target=_await, args=arguments, daemon=True, name=f"reply {asked.identity[:8]}").start()

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


def _push(grid: Grid, messages: Sequence[Message]) -> Iterable[str]:
    """Push messages; once more if the SuperLink has stopped on the way: it knows a message that comes again."""
    for _ in range(_PUSHES - 1):
        try:
            return grid.push_messages(messages)
        except ObjectPushError as error:
            log.warning("the SuperLink did not take a message, which is sent again: %s", printable(error))
    return grid.push_messages(messages)


def exchange(grid: Grid, messages: Sequence[Message], timeout: float | None, most: Sequence[int]) -> Iterator[Message]:
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


def _await(
    grid: Grid, asked: Asked, replies: SimpleQueue[Message | Exception], over: threading.Event, pause: float
) -> None:
    """Look for the reply to a message until it is there or nobody waits for it any more."""
    try:
        while not over.is_set():
            reply = receive(grid, asked, over)
            if reply is not None:
                replies.put(reply)
                return
            over.wait(pause)
    except Exception as error:  # raised where the replies are taken
        replies.put(error)


def explain(name: str, error: Error) -> Absence:
    """Return why a node gave no answer."""
    if error.code in _REASONS:
        return Absence(name, *_REASONS[error.code])
    reason = printable(error.reason or f"error {error.code}", 1000)
    found = re.fullmatch(r"<class '[^']*'>:<'(.*)'>", reason, re.DOTALL)
    return Absence(name, "failed", found[1] if found else reason)
