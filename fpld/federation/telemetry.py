"""Telemetry of a run: what goes to the log, and files in its folder for whoever watches. No result depends on it.

The loggers below `fpld` have lines at level INFO when something begins or ends; one with `result` set is the result of
a round. Lines with `done` and `total` move a bar: they count jobs, and `state` says more in words. A line of a round
has its place in the run as `position`. `fpld.progress` adds lines of long loops.

status.json      the state of the run: preparing, running, done, failed with the message, or stopped
heartbeat        touched every few seconds: a process that was killed writes nothing, so a run whose file has not been
                 touched for a while has stopped
now.json         the last line of each loop that goes on
curves.jsonl     points of every training: base, local by node, distillation; at most a hundred each
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from fpld.errors import FpldError, StorageError, exhausted_resource
from fpld.progress import CURVE_LOGGER
from fpld.storage.run_folder import CURVES, HEARTBEAT, NOW, RESERVE, STATUS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from fpld.storage.run_folder import RunFolder

LOGGER = "fpld"
RESULT = {"result": True}
"""What marks a line as a result: `log.info(text, extra=RESULT)`."""
HEARTBEAT_SECONDS = 5.0
LOOP_TIMEOUT_SECONDS = 15.0
"""Seconds after which a loop that logs nothing more has ended."""
_RESERVED_BYTES = 1 << 17  # held back so that the end of a run can be written down on a full disk
StateName = Literal["preparing", "running", "done", "failed", "stopped"]

_open_statuses: list[Status] = []


class Position(NamedTuple):
    """Where a federation is: rounds done, the answers of an open one as a part of it; all rounds; and words."""

    done: float
    total: int
    state: str


@contextmanager
def listen(handler: logging.Handler, name: str = LOGGER, *, level: int | None = None) -> Iterator[None]:
    """Attach a handler to the loggers below a name while the context lasts, down to a level (the handler's own)."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level or handler.level or logging.DEBUG, before or logging.CRITICAL))
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class Status:
    """Write the state of a run while this context is open; how it ends is its last state.

    Nothing is written before the first `set`: a folder that is refused belongs to another run.
    """

    def __init__(self, store: RunFolder) -> None:
        self._store = store
        self._started = False
        self._ended = threading.Event()
        self._handle: int | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def set(self, state: StateName, error: str = "") -> None:
        """Write a state; where disk or file handles have run out, in the place of what was held back for it."""
        status = {"state": state, "error": error, "time": time.time()}
        try:
            self._store.write_json(STATUS, status)
        except StorageError:
            self._release()
            self._store.write_json(STATUS, status)
        if not self._started:
            self._started = True
            self._handle = os.open(os.devnull, os.O_RDONLY)
            self._store.write(RESERVE, bytes(_RESERVED_BYTES))
            self._thread.start()

    def _release(self) -> None:
        """Give up what was held back for the end: room on the disk, and a file handle."""
        (self._store.path / RESERVE).unlink(missing_ok=True)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        _open_statuses.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        _open_statuses.remove(self)
        self._ended.set()
        if not self._started:
            return
        try:
            if error is None:
                self.set("done")
            elif isinstance(error, Exception):
                self.set("failed", _message(error))
            else:
                self.set("stopped")
            self._release()
        except (StorageError, OSError):
            if error is None:
                raise  # else the error that ended the run is the one to show

    def _beat(self) -> None:
        while True:
            try:
                (self._store.path / HEARTBEAT).touch()
            except OSError:
                return  # the folder is gone, or the disk: the run itself meets it
            if self._ended.wait(HEARTBEAT_SECONDS):
                return


def _message(error: Exception) -> str:
    if isinstance(error, FpldError):
        return str(error)
    resource = exhausted_resource(error)
    return f"{type(error).__name__}: {error}" if resource is None else f"{resource.what}: {resource.remedy}"


def mark_stopped() -> None:
    """Write of every run that is open in this process that it was stopped: for a process that ends at once."""
    for status in _open_statuses:
        try:
            status.set("stopped")
        except StorageError:
            continue


class LoopFiles(logging.Handler):
    """Write the log records of loops to files; an error of the disk is left to the run itself, which meets it too."""

    def __init__(self, store: RunFolder) -> None:
        super().__init__(logging.DEBUG)
        self._store = store
        self._loops: dict[str, dict[str, Any]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line or a point; pass over all else."""
        fields = vars(record)
        try:
            if "point" in fields:
                with (self._store.path / CURVES).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(fields["point"]) + "\n")
            elif "progress" in fields:
                self._write_now(fields["progress"])
        except (OSError, StorageError):
            return

    def _write_now(self, progress: dict[str, Any]) -> None:
        now = time.time()
        key = f"{progress['method']} {progress['round']} {progress['model']}"
        self._loops[key] = {**progress, "time": now}
        self._loops = {name: each for name, each in self._loops.items() if now - each["time"] < LOOP_TIMEOUT_SECONDS}
        self._store.write_json(NOW, {"updated": now, "loops": list(self._loops.values())})


@contextmanager
def loop_files(store: RunFolder) -> Iterator[None]:
    """Write the progress of loops into a run's folder while the context lasts."""
    handler = LoopFiles(store)
    with ExitStack() as stack:
        stack.enter_context(listen(handler, level=logging.INFO))
        stack.enter_context(listen(handler, CURVE_LOGGER))
        yield
