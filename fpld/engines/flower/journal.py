"""A log of plain lines in a folder: one process writes what it does, another shows it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from fpld._check import printable
from fpld.errors import StorageError
from fpld.federation.log import RESULT
from fpld.storage.files import storage_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LOG = "log.txt"
LONG = 10_000_000  # bytes of a log after which a new one is begun; the one before it is kept
_LONGEST = 2000  # characters of a line
_FLOWER = "flwr"
log = logging.getLogger(__name__)


def note(folder: Path, text: str, **more: bool) -> None:
    """Add a line to a folder's log."""
    line = json.dumps({"time": round(time.time(), 3), "text": printable(text, _LONGEST), **more}) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rotate(folder / LOG)
        with (folder / LOG).open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise storage_error(folder / LOG, error) from error


def rotate(path: Path) -> None:
    """Put a log that has grown long aside, in the place of the one that was put aside before."""
    if path.exists() and path.stat().st_size > LONG:
        path.replace(path.with_name(f"{path.stem}-1{path.suffix}"))


class Journal(logging.Handler):
    """Add what is logged to a folder's log: by all threads, or only by the one that makes the journal."""

    def __init__(self, folder: Path, *, own: bool = False) -> None:
        super().__init__(logging.INFO)
        self._folder, self._thread = folder, threading.get_ident() if own else None

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record's line."""
        if self._thread is not None and record.thread != self._thread:
            return
        with contextlib.suppress(StorageError):  # a line of a log is not worth a run; who writes results says it
            note(self._folder, record.getMessage(), **(RESULT if hasattr(record, "result") else {}))


class FlowerLog(logging.Handler):
    """Hand what is logged on to Flower's logger, so that `flwr log` shows it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record's text on."""
        logging.getLogger(_FLOWER).log(record.levelno, "%s", printable(record.getMessage(), _LONGEST))


def follow(folder: Path) -> Iterator[list[Mapping[str, Any]]]:
    """Yield, at each step, the lines that the log has got since the last one; what was there before is old."""
    path = folder / LOG
    place = path.stat().st_size if path.exists() else 0
    while True:
        said = []
        if path.exists():
            if path.stat().st_size < place:  # a new one was begun
                place = 0
            with path.open("rb") as file:
                file.seek(place)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            place += len(whole)
            said = [found for line in whole.splitlines() if (found := _parsed(line)) is not None]
        yield said


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    """Return what a line says, None if it is torn: a process was killed, or a disk was full, in the middle of it."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("text"), str) else None


def retell(lines: Iterator[list[Mapping[str, Any]]]) -> None:
    """Log in this process what another one has written since the last time."""
    for line in next(lines):
        log.info("%s", printable(line["text"], _LONGEST), extra=RESULT if line.get("result") else None)
