"""How far a long loop is: a line in the log every few seconds, and points of a training's curve.

A line is a record at level INFO with the numbers as `pace`. It says what is worked on (`working_on`) and what comes
next (`before`), where whoever began the loop has told. A point is a record of the logger `POINTS`, which only those who
ask for it hear, with the numbers as `point`. No result depends on them.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import asdict, dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVERY = 3.0  # seconds between two lines of a loop; a shorter loop says nothing
MOST_POINTS = 100  # of a training's curve
POINTS = "fpld.pace.points"

log, points = logging.getLogger(__name__), logging.getLogger(POINTS)
points.propagate = False

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is worked on: a model (a node's name, "student" or "base"), for a method, in a round (0: in none).

    >>> str(Subject("fpld", 2, "north"))
    'fpld, round 2, north'
    """

    method: str = ""
    round: int = 0
    model: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.method, f"round {self.round}" if self.round else "", self.model)))


_subject: ContextVar[Subject] = ContextVar("subject", default=Subject())  # noqa: B039  # it is frozen
_next: ContextVar[str] = ContextVar("next", default="")


@contextmanager
def working_on(subject: Subject) -> Iterator[None]:
    """Say what the loops in this context work on."""
    token = _subject.set(subject)
    try:
        yield
    finally:
        _subject.reset(token)


@contextmanager
def before(following: str) -> Iterator[None]:
    """Say what comes after the loops in this context."""
    token = _next.set(following)
    try:
        yield
    finally:
        _next.reset(token)


def run_on(subject: Subject, job: Callable[..., Result], *arguments: Any) -> Result:
    """Run a job that works on a subject: for a pool's `submit`."""
    with working_on(subject):
        return job(*arguments)


class Pace:
    """Count what a loop has done, of `total` units; `tokens` are those of one unit.

    >>> pace = Pace("training", 200, tokens=64)
    >>> pace.add(loss=3.2)
    >>> pace.done
    1
    """

    def __init__(self, what: str, total: int, unit: str = "step", *, tokens: int = 0) -> None:
        self.total, self.done = total, 0
        self._what, self._unit, self._tokens = what, unit, tokens
        self._started = self._said = monotonic()
        self._losses: list[float] = []
        self._mean: float | None = None

    def again(self) -> Pace:
        """Return the pace of the same loop from its beginning."""
        return Pace(self._what, self.total, self._unit, tokens=self._tokens)

    def add(self, count: int = 1, loss: float | None = None) -> None:
        """Count units that are done, with the loss of a training's step."""
        before, self.done = self.done, self.done + count
        if loss is not None:
            self._losses.append(loss)
            if self.done * MOST_POINTS // self.total > before * MOST_POINTS // self.total:
                self._mean, self._losses = sum(self._losses) / len(self._losses), []
                self._point()
        if monotonic() - self._said >= EVERY:
            self._said = monotonic()
            self._line()

    def _point(self) -> None:
        if points.isEnabledFor(logging.DEBUG):
            found = {**asdict(_subject.get()), "what": self._what, "step": self.done, "loss": self._mean}
            points.debug("%s", found, extra={"point": found})

    def _line(self) -> None:
        seconds = monotonic() - self._started
        loss = self._losses[-1] if self._mean is None and self._losses else self._mean
        speed, left = self._tokens * self.done / seconds, seconds * max(self.total / self.done - 1, 0.0)
        parts = [
            f"{self._unit} {self.done:,} of {self.total:,}",
            "" if loss is None else f"loss {loss:.4f}",
            f"{speed:,.0f} tokens/s" if speed else "",
            f"{show_seconds(left)} left",
        ]
        found = {"unit": self._unit, "done": self.done, "total": self.total, "loss": loss}
        _say(self._what, parts, {**found, "tokens_per_second": speed or None, "left": left})


def _say(what: str, parts: list[str], numbers: dict[str, Any]) -> None:
    """Log a line: the subject, what is done, its numbers as text and as a record, and what is next."""
    subject, following = _subject.get(), _next.get()
    said = ", ".join(filter(None, [f"{subject}: {what}" if str(subject) else what, *parts]))
    found = {**asdict(subject), "what": what, **numbers, "next": following}
    log.info("%s", f"{said}; next: {following}" if following else said, extra={"pace": found})


@contextmanager
def lasting(what: str) -> Iterator[None]:
    """Say every few seconds how long something has taken that cannot be counted; whatever is shorter says nothing."""
    started, ended, context = monotonic(), threading.Event(), copy_context()

    def tell() -> None:
        while not ended.wait(EVERY):
            seconds = monotonic() - started
            numbers = {"unit": "second", "done": round(seconds), "total": None, "left": None}
            context.run(_say, what, [f"{show_seconds(seconds)} so far"], numbers)

    thread = threading.Thread(target=tell, name=f"pace of {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def show_seconds(seconds: float) -> str:
    """Write a time to wait for a person.

    >>> show_seconds(48.2), show_seconds(200), show_seconds(9000)
    ('48 s', '3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
