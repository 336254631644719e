"""A site's ledger: every answer about its text that ever left it, in a file of its own, and the limits that it keeps.

One line of JSON an answer, flushed to the disk before the answer leaves: when, what was asked by which run in which
round, and how many bytes. Of a frame it names codec and probe set, of an evaluation the student.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from fpld.errors import BudgetError, InputError
from fpld.storage.files import storage_error

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.engines.flower.home import Terms
    from fpld.privacy import Spent
    from fpld.protocol import Task

LEDGER = "ledger.jsonl"
LOSS_BYTES = 512  # the most that the letter with a student's loss has


@dataclass(frozen=True, slots=True)
class Question:
    """What an aggregator asks a site for: a frame under a task, or the loss of a student.

    `asked` is the digest of the task or of the student, `most` the bytes that the answer may have. `spent` and `unit`
    are of private training (`fpld.engines.flower.spending`).
    """

    kind: Literal["frame", "loss"]
    session: str
    round: int
    asked: str
    most: int
    codec: str | None = None
    probe: str | None = None
    spent: Spent | None = None
    unit: str | None = None

    @classmethod
    def frame(cls, session: str, task: Task) -> Self:
        """Return the question that a task is."""
        plan = task.plan
        return cls("frame", session, plan.round, task.identity, plan.budget_bytes, task.codec, plan.probe.hex())

    @classmethod
    def loss(cls, session: str, round: int, student: str) -> Self:
        """Return the question what a student is worth on the site's held-out text."""
        return cls("loss", session, round, student, LOSS_BYTES)

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what the same question has, whenever it is asked."""
        return self.kind, self.session, self.asked


class Ledger:
    """What has left a site; `folder` is the node's."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER
        self.entries = self._read()

    def allow(self, terms: Terms, question: Question) -> None:
        """Refuse what goes beyond the site's limits; a question that was answered before may be asked again."""
        if question.key in {(entry["kind"], entry["session"], entry["asked"]) for entry in self.entries}:
            return
        frames = [entry for entry in self.entries if entry["kind"] == "frame"]
        sent = sum(entry["bytes"] for entry in self.entries)
        limits = [("most_total_bytes", terms.most_total_bytes, sent + question.most)]
        if question.kind == "frame":
            rounds = {(entry["session"], entry["round"]) for entry in frames} | {(question.session, question.round)}
            probes = {entry["probe"] for entry in frames} | {question.probe}
            limits += [
                ("most_bytes", terms.most_bytes, question.most),
                ("most_rounds", terms.most_rounds, len(rounds)),
                ("most_probe_sets", terms.most_probe_sets, len(probes)),
            ]
            if terms.codecs is not None and question.codec not in terms.codecs:
                allowed = ", ".join(terms.codecs)
                raise BudgetError(f"the task's codec is {question.codec}, this node's file allows {allowed}")
        else:
            limits += [("most_evaluations", terms.most_evaluations, len(self.entries) - len(frames) + 1)]
        for name, most, found in limits:
            if most is not None and found > most:
                raise BudgetError(f"the request would make it {found}, this node's file allows {most} ({name})")

    def enter(self, question: Question, answer: bytes) -> None:
        """Write an answer down before it leaves."""
        digest = hashlib.sha256(answer).hexdigest()
        known = any(entry["answer"] == digest for entry in self.entries)
        entry = {"time": round(time.time(), 3), **asdict(question), "answer": digest}
        del entry["most"]
        entry["bytes"] = 0 if known else len(answer)  # the same bytes once more tell nothing new
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
            sound = all(type(entry[name]) is int and entry[name] >= 0 for name in ("bytes", "round"))
            sound = sound and all(isinstance(entry[name], str) for name in ("session", "asked", "answer"))
            sound = sound and entry["kind"] in ("frame", "loss")
            sound = sound and (entry["kind"] == "loss" or isinstance(entry["probe"], str))
            sound = sound and (entry.get("spent") is None or _sound(*entry["spent"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise InputError(f"{self.path}, line {number} is damaged: this site answers nothing until it is mended")
        return entry


def _sound(noise: Any, rate: Any, steps: Any) -> bool:
    """Return whether steps of private training are such."""
    return type(noise) is float and noise > 0 and type(rate) is float and 0 < rate <= 1 and type(steps) is int
