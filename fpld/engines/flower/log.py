"""A log of lines of JSON in a folder: processes of Flower's write it, and the command that started them shows it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from fpld.errors import StorageError
from fpld.federation.telemetry import RESULT, Position
from fpld.storage.files import storage_error
from fpld.storage.run_folder import LOG
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MAX_LOG_BYTES = 10_000_000  # a longer log is put aside, in the place of the one that was put aside before
OWN_MODEL_PREFIX = "own model: "  # of the line about a site's own model, at the end of a run
_MAX_LINE_CHARACTERS = 2000
_TAIL_BYTES = 1 << 16
_FLOWER_LOGGER = "flwr"
log = logging.getLogger(__name__)


def append_log(folder: Path, text: str, **more: object) -> None:
    """Add a line to a folder's log."""
    line = json.dumps({"time": round(time.time(), 3), "text": printable(text, _MAX_LINE_CHARACTERS), **more}) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rotate_log(folder / LOG)
        with (folder / LOG).open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise storage_error(folder / LOG, error) from error


def rotate_log(path: Path) -> None:
    """Put a log aside that has grown too long."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(f"{path.stem}-1{path.suffix}"))


class FolderLogHandler(logging.Handler):
    """Add what is logged to a folder's log: by all threads, or only by the one that makes the handler."""

    def __init__(self, folder: Path, *, this_thread: bool = False) -> None:
        super().__init__(logging.INFO)
        self._folder = folder
        self._thread = threading.get_ident() if this_thread else None

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record's line."""
        if self._thread is not None and record.thread != self._thread:
            return
        more: dict[str, object] = dict(RESULT) if hasattr(record, "result") else {}
        if record.levelno >= logging.WARNING:
            more["warning"] = True
        if isinstance(position := vars(record).get("position"), Position):
            more["position"] = position._asdict()
        with contextlib.suppress(StorageError):  # a line of a log is not worth a run
            append_log(self._folder, record.getMessage(), **more)


class FlowerLogHandler(logging.Handler):
    """Pass what is logged to Flower's logger, so that `flwr log` shows it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record's text on."""
        text = printable(record.getMessage(), _MAX_LINE_CHARACTERS)
        logging.getLogger(_FLOWER_LOGGER).log(record.levelno, "%s", text)


def follow_log(folder: Path) -> Iterator[list[Mapping[str, Any]]]:
    """Yield, at each step, the lines that were added since the last one; the first step starts at the end."""
    path = folder / LOG
    offset = path.stat().st_size if path.exists() else 0
    while True:
        lines = []
        if path.exists():
            if path.stat().st_size < offset:  # the log was put aside, and a new one begun
                offset = 0
            with path.open("rb") as file:
                file.seek(offset)
                added = file.read()
            complete = added[: added.rfind(b"\n") + 1]
            offset += len(complete)
            lines = _parse_lines(complete)
        yield lines


def last_texts(folder: Path) -> list[str]:
    """Return the texts of the last lines of a folder's log."""
    path = folder / LOG
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        return [str(line["text"]) for line in _parse_lines(file.read())]


def _parse_lines(content: bytes) -> list[Mapping[str, Any]]:
    """Parse lines of a log; skip torn ones: a process was killed, or the disk was full, in the middle of them."""
    lines: list[Mapping[str, Any]] = []
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("text"), str):
            lines.append(line)
    return lines


def relay_log(lines: Iterator[list[Mapping[str, Any]]]) -> list[str]:
    """Log in this process what was added to a log since the last call, and return it; `lines` is from `follow_log`."""
    texts = []
    for line in next(lines):
        texts.append(printable(line["text"], _MAX_LINE_CHARACTERS))
        more = {**(RESULT if line.get("result") else {}), **(line.get("position") or {})}
        log.log(logging.WARNING if line.get("warning") else logging.INFO, "%s", texts[-1], extra=more)
    return texts
