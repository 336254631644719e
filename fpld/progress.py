"""Progress of long loops: a line in the log every few seconds, and the points of training curves.

A loop counts its steps with `LoopProgress`, and logs a record at level INFO with its numbers as the attribute
`progress`. The caller may say what the loop works on (`labelled`) and what comes after it (`followed_by`). A point of a
curve is a record of the logger `CURVE_LOGGER` with the attribute `point`; only handlers of that logger see it.
No result depends on any of this.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import asdict, dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERVAL_SECONDS = 3.0  # between two lines of a loop; a shorter loop logs nothing
MAX_CURVE_POINTS = 100  # of one training
CURVE_LOGGER = "fpld.progress.points"

log = logging.getLogger(__name__)
points = logging.getLogger(CURVE_LOGGER)
points.propagate = False

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ProgressLabel:
    """What a loop works on: a model (a node's name, "student" or "base"), for a method, in a round (0: in none).

    >>> str(ProgressLabel("fpld", 2, "north"))
    'fpld, round 2, north'
    """

    method: str = ""
    round: int = 0
    model: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.method, f"round {self.round}" if self.round else "", self.model)))


_label: ContextVar[ProgressLabel] = ContextVar("label", default=ProgressLabel())  # it is frozen  # noqa: B039 - it is frozen
_last_line = -INTERVAL_SECONDS  # when the last line was logged, of any loop
_next: ContextVar[str] = ContextVar("next", default="")


@contextmanager
def labelled(label: ProgressLabel) -> Iterator[None]:
    """Label the loops that run in this context."""
    token = _label.set(label)
    try:
        yield
    finally:
        _label.reset(token)


class ProgressContext(NamedTuple):
    """The label of loops and the phase after them, which a process hands to others that do its work."""

    label: ProgressLabel
    phase: str

    @classmethod
    def current(cls) -> Self:
        """Return those of this context."""
        return cls(_label.get(), _next.get())

    def run(self, job: Callable[[], Result]) -> Result:
        """Run a job with this label and this phase."""
        with labelled(self.label), followed_by(self.phase):
            return job()


@contextmanager
def followed_by(phase: str) -> Iterator[None]:
    """Name the phase that comes after the loops in this context."""
    token = _next.set(phase)
    try:
        yield
    finally:
        _next.reset(token)


def run_labelled(label: ProgressLabel, job: Callable[..., Result], *arguments: Any) -> Result:
    """Run a job under a label; a function that can be submitted to a pool of processes."""
    with labelled(label):
        return job(*arguments)


class LoopProgress:
    """Count the units that a loop has done, and log how far it is.

    Parameters
    ----------
    activity
        What the loop does, such as "training".
    total, unit
        How many units it has, and what one is called.
    tokens
        Tokens of one unit, for the speed (0: none is logged).

    >>> progress = LoopProgress("training", 200, tokens=64)
    >>> progress.add(loss=3.2)
    >>> progress.done
    1
    """

    def __init__(self, activity: str, total: int, unit: str = "step", *, tokens: int = 0) -> None:
        self.total = total
        self.done = 0
        self._activity = activity
        self._unit = unit
        self._tokens = tokens
        self._started = monotonic()
        self._logged = self._started
        self._losses: list[float] = []
        self._mean: float | None = None

    def restarted(self) -> LoopProgress:
        """Return the progress of the same loop from its beginning."""
        return LoopProgress(self._activity, self.total, self._unit, tokens=self._tokens)

    def add(self, count: int = 1, loss: float | None = None) -> None:
        """Count units that are done, with the loss of a training step."""
        previous = self.done
        self.done += count
        if loss is not None:
            self._losses.append(loss)
            if self.done * MAX_CURVE_POINTS // self.total > previous * MAX_CURVE_POINTS // self.total:
                self._mean = sum(self._losses) / len(self._losses)
                self._losses = []
                self._log_point()
        if monotonic() - self._logged >= INTERVAL_SECONDS:
            self._logged = monotonic()
            self._log_line()

    def _log_point(self) -> None:
        if points.isEnabledFor(logging.DEBUG):
            point = {**asdict(_label.get()), "what": self._activity, "step": self.done, "loss": self._mean}
            points.debug("%s", point, extra={"point": point})

    def _log_line(self) -> None:
        seconds = monotonic() - self._started
        loss = self._losses[-1] if self._mean is None and self._losses else self._mean
        speed = self._tokens * self.done / seconds
        left = seconds * max(self.total / self.done - 1, 0.0)
        parts = [
            f"{self._unit} {self.done:,} of {self.total:,}",
            "" if loss is None else f"loss {loss:.4f}",
            f"{speed:,.0f} tokens/s" if speed else "",
            f"{show_seconds(left)} left",
        ]
        numbers = {"unit": self._unit, "done": self.done, "total": self.total, "loss": loss}
        _log(self._activity, parts, {**numbers, "tokens_per_second": speed or None, "left": left})


def _log(activity: str, parts: list[str], numbers: dict[str, Any]) -> None:
    """Log a line with its numbers, as text and as the record's `progress`."""
    global _last_line
    _last_line = monotonic()
    label = _label.get()
    phase = _next.get()
    line = ", ".join(filter(None, [f"{label}: {activity}" if str(label) else activity, *parts]))
    record = {**asdict(label), "what": activity, **numbers, "next": phase}
    log.info("%s", f"{line}; next: {phase}" if phase else line, extra={"progress": record})


class ByteProgress:
    """Count the bytes of text that are read or tokenized, and log how far it is, how fast, and how long it will take.

    >>> progress = ByteProgress("tokenizing", 2_000_000)
    >>> progress.add(500_000)
    >>> progress.done
    500000
    """

    def __init__(self, activity: str, total: int) -> None:
        self.total = total
        self.done = 0
        self._activity = activity
        self._started = monotonic()
        self._logged = self._started

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        self.done += count
        now = monotonic()
        if now - self._logged < INTERVAL_SECONDS or not self.done:
            return
        self._logged = now
        seconds = now - self._started
        speed = self.done / seconds
        left = max(self.total - self.done, 0) / speed
        parts = [
            f"{self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB",
            f"{speed / 1e6:,.1f} MB/s",
            f"{show_seconds(left)} left",
        ]
        numbers = {"unit": "MB", "done": self.done // 1_000_000, "total": self.total // 1_000_000, "left": left}
        _log(self._activity, parts, numbers)


@contextmanager
def report_elapsed(activity: str) -> Iterator[None]:
    """Log every few seconds how long an activity has taken whose end cannot be foretold."""
    started = monotonic()
    ended = threading.Event()
    context = copy_context()

    def report() -> None:
        while not ended.wait(INTERVAL_SECONDS):
            if monotonic() - _last_line < INTERVAL_SECONDS:  # a loop within the activity says more
                continue
            seconds = monotonic() - started
            numbers = {"unit": "second", "done": round(seconds), "total": None, "left": None}
            context.run(_log, activity, [f"{show_seconds(seconds)} so far"], numbers)

    thread = threading.Thread(target=report, name=f"progress of {activity}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def show_seconds(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> show_seconds(48.2), show_seconds(200), show_seconds(9000)
    ('48 s', '3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
