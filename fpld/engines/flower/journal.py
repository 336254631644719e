"""A log of plain lines in a folder: one process writes what it does, another shows it."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

from fpld.federation.log import RESULT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LOG = "log.txt"
log = logging.getLogger(__name__)


def note(folder: Path, text: str, **more: bool) -> None:
    """Add a line to a folder's log."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(time.time(), 3), "text": text, **more}) + "\n")


class Journal(logging.Handler):
    """Add what is logged to a folder's log."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.INFO)
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record's line."""
        note(self._folder, record.getMessage(), **(RESULT if hasattr(record, "result") else {}))


def follow(folder: Path) -> Iterator[list[Mapping[str, Any]]]:
    """Yield, at each step, the lines that the log has got since the last one; what was there before is old."""
    path = folder / LOG
    place = path.stat().st_size if path.exists() else 0
    while True:
        said = []
        if path.exists():
            with path.open("rb") as file:
                file.seek(place)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            place += len(whole)
            said = [json.loads(line) for line in whole.splitlines()]
        yield said


def retell(lines: Iterator[list[Mapping[str, Any]]]) -> None:
    """Log in this process what another one has written since the last time."""
    for line in next(lines):
        log.info("%s", line["text"], extra=RESULT if line.get("result") else None)
