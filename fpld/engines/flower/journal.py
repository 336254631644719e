"""A log of plain lines in a folder: one process writes what it does, another shows it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOG = "log.txt"


def note(folder: Path, text: str) -> None:
    """Add a line to a folder's log."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(json.dumps({"time": round(time.time(), 3), "text": text}) + "\n")


def follow(folder: Path) -> Iterator[list[str]]:
    """Give, at each step, the lines that the log has got since the last one; what was there before is old."""
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
            said = [str(json.loads(line)["text"]) for line in whole.splitlines()]
        yield said
