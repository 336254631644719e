"""Ctrl-C and SIGTERM in commands that have children to end: an exception, so that what is open gets closed."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stopped(BaseException):
    """The user or the system asked this process to stop."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.code = 128 + number


@contextmanager
def stop_on_signals(text: str) -> Iterator[None]:
    """Raise `Stopped` at the first signal; further ones are ignored while things are being closed."""

    def stop(number: int, _frame: object) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number, text)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
