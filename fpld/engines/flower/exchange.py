"""Send messages over a Grid and return the replies as they come."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from fpld._check import printable
from fpld.federation.engine import Absence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flwr.app import Error, Message
    from flwr.serverapp import Grid

    from fpld.federation.engine import Why

_PAUSE = 0.5  # seconds between two looks for replies; Flower's own loop takes three
_REASONS: dict[int, tuple[Why, str]] = {
    3: ("lost", "its reply got lost"),
    4: ("lost", "its reply got lost"),
    5: ("lost", "its SuperNode stopped or died"),
    8: ("failed", "its process crashed"),
}


def exchange(grid: Grid, messages: Iterable[Message], timeout: float | None) -> Iterator[Message]:
    """Push messages, and yield each reply as it comes, until all are there or the time is over."""
    waiting = {identity for identity in grid.push_messages(list(messages)) if identity}
    end = None if timeout is None else time.monotonic() + timeout
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        if waiting and end is not None and time.monotonic() >= end:
            return
        if waiting:
            time.sleep(_PAUSE)


def explain(name: str, error: Error) -> Absence:
    """Return why a node gave no answer."""
    if error.code in _REASONS:
        return Absence(name, *_REASONS[error.code])
    reason = printable(error.reason or f"error {error.code}", 1000)
    found = re.fullmatch(r"<class '[^']*'>:<'(.*)'>", reason, re.DOTALL)
    return Absence(name, "failed", found[1] if found else reason)
