"""A site's ledger: every answer about its text that ever left it, and the limits that the site keeps by it.

The ledger is a file with one line of JSON for each answer, flushed to the disk before the answer leaves: when, which
run asked for what in which round, and how many bytes. For a frame it names codec and probe set, for an evaluation the
student. A frame with written text also has what the site's check found in it. A query that was answered before is
answered again: the same bytes disclose nothing new.

The ledger also bounds what all answers over all runs disclose about each unit of the text. An answer of private
training is post-processing of steps of DP-SGD, whose noise, sampling rate and number are in the ledger; their epsilon
composes. An answer of training that was not private has no epsilon at all, that is, an infinite one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from fpld.errors import BudgetError, InputError
from fpld.privacy.accounting import DpSteps, epsilon
from fpld.storage.files import storage_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from fpld.engines.flower.site.config import Terms
    from fpld.engines.flower.site.disclosure import WrittenCounts
    from fpld.protocol import Task

    Entry = Mapping[str, Any]

LEDGER = "ledger.jsonl"
MAX_LOSS_MESSAGE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Query:
    """What an aggregator asks a site for: a frame under a task, or the loss of a student.

    `asked` is the digest of the task or of the student, `max_bytes` the largest size of the answer. `spent` and `unit`
    are those of private training, `written` is what a frame has of written text. All but `max_bytes` are keys of a line
    of the ledger.
    """

    kind: Literal["frame", "loss"]
    session: str
    round: int
    asked: str
    max_bytes: int
    codec: str | None = None
    probe: str | None = None
    spent: DpSteps | None = None
    unit: str | None = None
    written: WrittenCounts | None = None

    @classmethod
    def frame(cls, session: str, task: Task) -> Self:
        """Return the query of a task."""
        plan = task.plan
        return cls("frame", session, plan.round, task.identity, plan.budget_bytes, task.codec, plan.probe.hex())

    @classmethod
    def loss(cls, session: str, round: int, student: str) -> Self:
        """Return the query for a student's loss on the site's held-out text."""
        return cls("loss", session, round, student, MAX_LOSS_MESSAGE_BYTES)

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies a query, whenever it is asked."""
        return self.kind, self.session, self.asked


class Ledger:
    """The answers that have left a site, in its folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER
        self.entries = self._read()

    def check_limits(self, terms: Terms, query: Query) -> None:
        """Refuse a query whose answer would exceed the site's terms, unless it was answered before.

        Raises
        ------
        BudgetError
            With the limit of `node.toml` that would be exceeded.
        """
        if query.key in {(entry["kind"], entry["session"], entry["asked"]) for entry in self.entries}:
            return
        frames = [entry for entry in self.entries if entry["kind"] == "frame"]
        sent = sum(entry["bytes"] for entry in self.entries)
        limits = [("most_total_bytes", terms.most_total_bytes, sent + query.max_bytes)]
        if query.kind == "frame":
            rounds = {(entry["session"], entry["round"]) for entry in frames} | {(query.session, query.round)}
            probes = {entry["probe"] for entry in frames} | {query.probe}
            limits += [
                ("most_bytes", terms.most_bytes, query.max_bytes),
                ("most_rounds", terms.most_rounds, len(rounds)),
                ("most_probe_sets", terms.most_probe_sets, len(probes)),
            ]
            if terms.codecs is not None and query.codec not in terms.codecs:
                allowed = ", ".join(terms.codecs)
                raise BudgetError(f"the task's codec is {query.codec}, this node's file allows {allowed}")
        else:
            limits += [("most_evaluations", terms.most_evaluations, len(self.entries) - len(frames) + 1)]
        for name, limit, total in limits:
            if limit is not None and total > limit:
                raise BudgetError(f"the request would make it {total}, this node's file allows {limit} ({name})")

    def record(self, query: Query, answer: bytes) -> None:
        """Write an answer into the ledger, before it leaves."""
        digest = hashlib.sha256(answer).hexdigest()
        repeated = any(entry["answer"] == digest for entry in self.entries)
        entry = {"time": round(time.time(), 3), **asdict(query), "answer": digest}
        del entry["max_bytes"]
        entry["bytes"] = 0 if repeated else len(answer)
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
        # A line that was cut off while it was written is of an answer that never left.
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        return [self._entry(number, line) for number, line in enumerate(whole.splitlines(), 1)]

    def _entry(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = json.loads(line)
            valid = all(type(entry[name]) is int and entry[name] >= 0 for name in ("bytes", "round"))
            valid = valid and all(isinstance(entry[name], str) for name in ("session", "asked", "answer"))
            valid = valid and entry["kind"] in ("frame", "loss")
            valid = valid and (entry["kind"] == "loss" or isinstance(entry["probe"], str))
            valid = valid and (entry.get("spent") is None or _valid_steps(*entry["spent"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            valid = False
        if not valid:
            raise InputError(f"{self.path}, line {number} is damaged: this site answers nothing until it is mended")
        return entry


def _valid_steps(noise: Any, rate: Any, steps: Any) -> bool:
    """Return whether these can be the noise, sampling rate and number of DP-SGD steps."""
    return type(noise) is float and noise > 0 and type(rate) is float and 0 < rate <= 1 and type(steps) is int


def spent_steps(entries: Iterable[Entry], terms: Terms) -> list[DpSteps] | None:
    """Return the DP-SGD steps of all frames in a ledger; None if some were not private for the site's unit."""
    frames = {entry["answer"]: entry for entry in entries if entry["kind"] == "frame"}
    if any(entry.get("spent") is None or entry.get("unit") != terms.unit for entry in frames.values()):
        return None
    return [DpSteps(*entry["spent"]) for entry in frames.values()]


def spent_epsilon(entries: Iterable[Entry], terms: Terms) -> float:
    """Return the epsilon of all answers so far, for the site's unit and delta."""
    return _epsilon(spent_steps(entries, terms), [], terms.delta)


def check_epsilon(entries: Iterable[Entry], terms: Terms, query: Query, rounds: int) -> None:
    """Refuse a task if this and all later rounds of its run would exceed the site's epsilon.

    A query that was answered before is answered again with the same bytes, and spends nothing.

    Raises
    ------
    BudgetError
        If the epsilon over all runs would exceed `most_epsilon`, or training is not private for the site's unit.
    """
    answered = {(entry["kind"], entry["session"], entry["asked"]) for entry in entries}
    if terms.most_epsilon is None or query.key in answered:
        return
    limit = f"this node's file allows an epsilon of {terms.most_epsilon:g} for each {terms.unit} (most_epsilon)"
    if query.spent is None:
        raise BudgetError(f"the task asks for training without differential privacy, {limit}")
    if query.unit != terms.unit:
        raise BudgetError(f"the task's unit of privacy is a {query.unit}, {limit}")
    rounds_left = max(rounds - query.round + 1, 1)
    planned = query.spent._replace(steps=rounds_left * query.spent.steps)
    total = _epsilon(spent_steps(entries, terms), [planned], terms.delta)
    if total > terms.most_epsilon:
        raise BudgetError(f"the run would make it an epsilon of {total:.3g} over all runs, {limit}")


def _epsilon(spent: list[DpSteps] | None, planned: list[DpSteps], delta: float) -> float:
    return math.inf if spent is None else epsilon([*spent, *planned], delta)
