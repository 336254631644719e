"""The state of a run, written by the run: preparing, running, done, failed with the message, or stopped.

A process that was killed writes nothing: so a run that goes on touches a file every few seconds, and one whose file
has not been touched for a while has stopped (`fpld.report.status` reads both). Nothing else depends on them.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Literal, Self

from fpld.errors import FpldError, StorageError, ran_out

if TYPE_CHECKING:
    from types import TracebackType

    from fpld.storage.folder import RunFolder

STATUS, BEAT, RESERVE = "status.json", "heartbeat", "reserve"
_RESERVED = 1 << 17  # bytes that are held so that the end of a run can be written down on a full disk
PULSE = 5.0  # seconds between two signs of life
Name = Literal["preparing", "running", "done", "failed", "stopped"]

_open: list[Status] = []


class Status:
    """Write the state of a run while this context is open; what ends it is its last state.

    A run that says nothing leaves no file: a folder that is refused belongs to another run.
    """

    def __init__(self, store: RunFolder) -> None:
        self._store, self._said, self._ended = store, False, threading.Event()
        self._handle: int | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def say(self, state: Name, error: str = "") -> None:
        """Write a state; where disk or file handles have run out, in the place of what was kept for it."""
        said = {"state": state, "error": error, "time": time.time()}
        try:
            self._store.write_json(STATUS, said)
        except StorageError:
            self._release()
            self._store.write_json(STATUS, said)
        if not self._said:
            self._said, self._handle = True, os.open(os.devnull, os.O_RDONLY)
            self._store.write(RESERVE, bytes(_RESERVED))
            self._thread.start()

    def _release(self) -> None:
        """Give up what was kept for the end: room on the disk, and a file handle."""
        (self._store.path / RESERVE).unlink(missing_ok=True)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        _open.remove(self)
        self._ended.set()
        if not self._said:
            return
        try:
            if error is None:
                self.say("done")
            elif isinstance(error, Exception):
                self.say("failed", _words(error))
            else:
                self.say("stopped")
            self._release()
        except (StorageError, OSError):
            if error is None:
                raise  # or else what ended the run is what must be said

    def _beat(self) -> None:
        while True:
            try:
                (self._store.path / BEAT).touch()
            except OSError:
                return  # the folder is gone, or the disk: the run itself will say so
            if self._ended.wait(PULSE):
                return


def _words(error: Exception) -> str:
    if isinstance(error, FpldError):
        return str(error)
    found = ran_out(error)
    return f"{type(error).__name__}: {error}" if found is None else f"{found.what}: {found.remedy}"


def mark_stopped() -> None:
    """Write of every run that is open in this process that it was stopped: for a process that ends at once."""
    for status in _open:
        try:
            status.say("stopped")
        except StorageError:
            continue
