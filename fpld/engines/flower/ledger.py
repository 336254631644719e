"""A site's ledger: every answer that ever left it, in a file of its own, and the limits that it must keep.

One line of JSON an answer, flushed to the disk before the answer leaves: when, to which run and round, under which
codec and probe set, and how many bytes.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from fpld.errors import BudgetError, InputError
from fpld.storage.files import storage_error

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.engines.flower.home import Terms
    from fpld.protocol import Task

LEDGER = "ledger.jsonl"


class Ledger:
    """What has left a site; `folder` is the node's."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER
        self.entries = self._read()

    def allow(self, terms: Terms, session: str, task: Task) -> None:
        """Refuse a round that goes beyond the site's limits; one that was answered before is answered again."""
        key = session, task.plan.round
        rounds = {(entry["session"], entry["round"]) for entry in self.entries}
        if key in rounds:
            return
        sent = sum(entry["bytes"] for entry in self.entries)
        for name, most, found in (
            ("most_bytes", terms.most_bytes, task.plan.budget_bytes),
            ("most_total_bytes", terms.most_total_bytes, sent + task.plan.budget_bytes),
            ("most_rounds", terms.most_rounds, len(rounds) + 1),
        ):
            if most is not None and found > most:
                raise BudgetError(f"the task would make it {found}, this node's file allows {most} ({name})")
        if terms.codecs is not None and task.codec not in terms.codecs:
            raise BudgetError(f"the task's codec is {task.codec}, this node's file allows {', '.join(terms.codecs)}")

    def enter(self, session: str, task: Task, size: int) -> None:
        """Write an answer down before it leaves."""
        known = any((entry["session"], entry["round"]) == (session, task.plan.round) for entry in self.entries)
        entry = {
            "time": round(time.time(), 3),
            "session": session,
            "round": task.plan.round,
            "codec": task.codec,
            "probe": task.plan.probe.hex(),
            "bytes": 0 if known else size,  # the same bytes once more tell nothing new
        }
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(self.path, error) from error
        self.entries.append(entry)

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # cut off while it was written: that answer never left
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        return [self._entry(number, line) for number, line in enumerate(whole.splitlines(), 1)]

    def _entry(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = json.loads(line)
            sound = all(isinstance(entry[name], int) and entry[name] >= 0 for name in ("bytes", "round"))
            sound = sound and isinstance(entry["session"], str)
        except (ValueError, KeyError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise InputError(f"{self.path}, line {number} is damaged: this site answers nothing until it is mended")
        return entry
