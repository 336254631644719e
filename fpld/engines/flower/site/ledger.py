"""A site's ledger: every answer about its text that ever left it, and the limits that the site keeps by it.

The ledger is a file with one line of JSON for each answer, flushed to the disk before the answer leaves: when, which
run asked for what in which round, and how many bytes. For a frame it names codec and probe set, for an evaluation the
student. A frame with written text also has what the site's check found in it. A query that was answered before is
answered again: the same bytes disclose nothing new.

The ledger also bounds what all answers over all runs disclose about each unit of the text. An answer of private
training is post-processing of steps of DP-SGD, whose noise, sampling rate and number are in the ledger; their epsilon
composes. Private training has a line of its own from the moment when it begins, whatever becomes of it. An answer of
training that was not private has no epsilon at all, that is, an infinite one.

Several runs may ask a site at the same time. So what an answer may take is reserved before the work: the limits are
checked over the ledger and all reservations, and the new reservation is written, under one lock. A reservation is a
file in the folder `reserved`, which the working process keeps locked: it ends with the work or, when the process is
killed, with its lock.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from filelock import FileLock, Timeout

from fpld.errors import BudgetError, InputError
from fpld.privacy.accounting import DpSteps, epsilon
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.storage.files import storage_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from fpld.engines.flower.site.config import Terms
    from fpld.engines.flower.site.disclosure import WrittenCounts
    from fpld.protocol import Task

    Entry = Mapping[str, Any]

LEDGER = "ledger.jsonl"
LEDGER_LOCK = "ledger.lock"
RESERVED = "reserved"
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
        most = OVERHEAD_BYTES + plan.budget_bytes
        return cls("frame", session, plan.round, task.identity, most, task.codec, plan.probe.hex())

    @classmethod
    def loss(cls, session: str, round: int, student: str) -> Self:
        """Return the query for a student's loss on the site's held-out text."""
        return cls("loss", session, round, student, MAX_LOSS_MESSAGE_BYTES)

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies a query, whenever it is asked."""
        return self.kind, self.session, self.asked


class Ledger:
    """The answers that have left a site, in its folder; `entries` are those of the last look at it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER
        self._reserved = folder / RESERVED
        self.entries = self._read()

    @contextmanager
    def reserve(self, terms: Terms, query: Query, rounds: int = 1) -> Iterator[Reservation]:
        """Check the site's limits and reserve what an answer may take, until the end of the work.

        Parameters
        ----------
        terms
            The site's limits.
        query
            What the work answers.
        rounds
            The number of rounds of the run, for `check_epsilon`.

        Raises
        ------
        BudgetError
            If the answer would exceed a limit, with those that other processes work on.
        """
        reservation = Reservation(self, query, self._reserved / secrets.token_hex(8))
        with self._lock():
            # The same query in two processes at once has one answer.
            others = [other for other in self._reservations() if other.key != query.key]
            self.check_limits(terms, query, others)
            check_epsilon(self.entries, terms, query, rounds, others)
            reservation.write()
        try:
            yield reservation
        finally:
            with self._lock():
                reservation.remove()

    def check_limits(self, terms: Terms, query: Query, reserved: Iterable[Query] = ()) -> None:
        """Refuse a query whose answer would exceed the site's terms, unless it was answered before.

        Parameters
        ----------
        terms
            The site's limits.
        query
            What would be answered.
        reserved
            Other queries that are being answered.

        Raises
        ------
        BudgetError
            With the limit of `node.toml` that would be exceeded.
        """
        if query.key in _answered(self.entries):
            return
        pending = [*reserved, query]
        frames = [entry for entry in self.entries if entry["kind"] == "frame"]
        losses = [entry for entry in self.entries if entry["kind"] == "loss"]
        sent = sum(entry["bytes"] for entry in self.entries)
        pending_bytes = sum(each.max_bytes for each in pending)
        limits = [("most_total_bytes", terms.most_total_bytes, sent + pending_bytes)]
        if query.kind == "frame":
            asked = [each for each in pending if each.kind == "frame"]
            rounds = {(entry["session"], entry["round"]) for entry in frames}
            rounds |= {(each.session, each.round) for each in asked}
            probes = {entry["probe"] for entry in frames} | {each.probe for each in asked}
            limits += [
                ("most_bytes", terms.most_bytes, query.max_bytes),
                ("most_rounds", terms.most_rounds, len(rounds)),
                ("most_probe_sets", terms.most_probe_sets, len(probes)),
            ]
            if terms.codecs is not None and query.codec not in terms.codecs:
                allowed = ", ".join(terms.codecs)
                raise BudgetError(f"the task's codec is {query.codec}, this node's file allows {allowed}")
        else:
            evaluations = len(losses) + sum(each.kind == "loss" for each in pending)
            limits += [("most_evaluations", terms.most_evaluations, evaluations)]
        for name, limit, total in limits:
            if limit is not None and total > limit:
                raise BudgetError(f"the request would make it {total}, this node's file allows {limit} ({name})")

    def record(self, query: Query, answer: bytes) -> None:
        """Write an answer into the ledger, before it leaves."""
        digest = hashlib.sha256(answer).hexdigest()
        with self._lock():
            repeated = any(entry["answer"] == digest for entry in self.entries)
            self._append(_entry_of(query) | {"answer": digest, "bytes": 0 if repeated else len(answer)})

    def record_training(self, reservation: Reservation) -> None:
        """Write into the ledger what private training is about to spend, and take it out of what is reserved."""
        query = reservation.query
        with self._lock():
            self._append(_entry_of(query) | {"kind": "training", "answer": "", "bytes": 0})
            reservation.update(replace(query, spent=None))

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(self.path, error) from error
        self.entries.append(entry)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the ledger's lock, with its entries as they are now; wait for a process that writes it."""
        path = self.path.parent / LEDGER_LOCK
        lock = FileLock(path)
        try:
            lock.acquire()
        except OSError as error:
            raise storage_error(path, error) from error
        try:
            self._cut_torn_line()
            self.entries = self._read()
            yield
        finally:
            lock.release()

    def _reservations(self) -> list[Query]:
        """Return what other processes have reserved; remove what killed ones have left. Call it under the lock."""
        pending = []
        for path in sorted(self._reserved.glob("*.json")):
            lock = FileLock(path.with_suffix(".lock"), blocking=False)
            try:
                lock.acquire()
            except Timeout:
                pending.append(_read_reservation(path))
                continue
            path.unlink(missing_ok=True)
            lock.release()
            path.with_suffix(".lock").unlink(missing_ok=True)
        return pending

    def _cut_torn_line(self) -> None:
        """Cut off a last line that was not written whole: its answer never left. Call it under the lock."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)

    def _read(self) -> list[dict[str, Any]]:
        """Return all whole lines. A process may be writing the next one."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        return [self._entry(number, line) for number, line in enumerate(whole.splitlines(), 1)]

    def _entry(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = json.loads(line)
            valid = all(type(entry[name]) is int and entry[name] >= 0 for name in ("bytes", "round"))
            valid = valid and all(isinstance(entry[name], str) for name in ("session", "asked", "answer"))
            valid = valid and entry["kind"] in ("frame", "loss", "training")
            valid = valid and (entry["kind"] == "loss" or isinstance(entry["probe"], str))
            valid = valid and (entry["kind"] != "training" or entry["spent"] is not None)
            valid = valid and (entry.get("spent") is None or _valid_steps(*entry["spent"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            valid = False
        if not valid:
            raise InputError(f"{self.path}, line {number} is damaged: this node answers nothing until it is mended")
        return entry


class Reservation:
    """What one answer may take, reserved in a file that is locked as long as the work goes on.

    The file is read and written under the ledger's lock alone.
    """

    def __init__(self, ledger: Ledger, query: Query, path: Path) -> None:
        self.query = query
        self._ledger = ledger
        self._path = path.with_suffix(".json")
        self._lock = FileLock(path.with_suffix(".lock"))

    def write(self) -> None:
        """Write the reservation, and lock it."""
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._lock.acquire()
            self.update(self.query)
        except OSError as error:
            self.remove()
            raise storage_error(self._path, error) from error

    def update(self, query: Query) -> None:
        """Replace what is reserved."""
        self.query = query
        self._path.write_bytes(json.dumps(asdict(query)).encode())

    def begin_training(self) -> None:
        """Enter what private training is about to spend into the ledger: from here on it is spent."""
        if self.query.spent is not None:
            self._ledger.record_training(self)

    def remove(self) -> None:
        """End the reservation."""
        self._path.unlink(missing_ok=True)
        self._lock.release()
        self._path.with_suffix(".lock").unlink(missing_ok=True)


def _read_reservation(path: Path) -> Query:
    """Return what a process has reserved."""
    try:
        fields = json.loads(path.read_bytes())
        spent = fields["spent"]
        return Query(**fields | {"spent": None if spent is None else DpSteps(*spent)})
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: this node answers nothing until the work that holds it ends") from error


def _entry_of(query: Query) -> dict[str, Any]:
    """Return a query as a line of the ledger has it."""
    entry = {"time": round(time.time(), 3), **asdict(query)}
    del entry["max_bytes"]
    return entry


def _answered(entries: Iterable[Entry]) -> set[tuple[str, str, str]]:
    """Return the keys of all queries that were answered."""
    return {(entry["kind"], entry["session"], entry["asked"]) for entry in entries}


def _valid_steps(noise: Any, rate: Any, steps: Any) -> bool:
    """Return whether these can be the noise, sampling rate and number of DP-SGD steps."""
    return type(noise) is float and noise > 0 and type(rate) is float and 0 < rate <= 1 and type(steps) is int


def spent_steps(entries: Iterable[Entry], terms: Terms) -> list[DpSteps] | None:
    """Return the DP-SGD steps of all trainings in a ledger; None if some frames were not private for the site's unit.

    A frame that has no line of its training is of a version that wrote none: its own line says what was spent.
    """
    lines = list(entries)
    trainings = [entry for entry in lines if entry["kind"] == "training"]
    entered = {(entry["session"], entry["asked"]) for entry in trainings}
    frames = {entry["answer"]: entry for entry in lines if entry["kind"] == "frame"}
    others = [entry for entry in frames.values() if (entry["session"], entry["asked"]) not in entered]
    if any(entry.get("spent") is None or entry.get("unit") != terms.unit for entry in [*trainings, *others]):
        return None
    return [DpSteps(*entry["spent"]) for entry in [*trainings, *others]]


def spent_epsilon(entries: Iterable[Entry], terms: Terms) -> float:
    """Return the epsilon of all trainings and answers so far, for the site's unit and delta."""
    return _epsilon(spent_steps(entries, terms), [], terms.delta)


def check_epsilon(
    entries: Iterable[Entry], terms: Terms, query: Query, rounds: int, reserved: Iterable[Query] = ()
) -> None:
    """Refuse a task if this and all later rounds of its run would exceed the site's epsilon, with what is reserved.

    A query that was answered before is answered again with the same bytes, and spends nothing.

    Raises
    ------
    BudgetError
        If the epsilon over all runs would exceed `most_epsilon`, or training is not private for the site's unit.
    """
    if terms.most_epsilon is None or query.kind == "loss" or query.key in _answered(entries):
        return
    limit = f"this node's file allows an epsilon of {terms.most_epsilon:g} for each {terms.unit} (most_epsilon)"
    if query.spent is None:
        raise BudgetError(f"the task asks for training without differential privacy, {limit}")
    if query.unit != terms.unit:
        raise BudgetError(f"the task's unit of privacy is a {query.unit}, {limit}")
    rounds_left = max(rounds - query.round + 1, 1)
    planned = query.spent._replace(steps=rounds_left * query.spent.steps)
    pending = [each.spent for each in reserved if each.spent is not None]
    total = _epsilon(spent_steps(entries, terms), [*pending, planned], terms.delta)
    if total > terms.most_epsilon:
        raise BudgetError(f"the run would make it an epsilon of {total:.3g} over all runs, {limit}")


def _epsilon(spent: list[DpSteps] | None, planned: list[DpSteps], delta: float) -> float:
    return math.inf if spent is None else epsilon([*spent, *planned], delta)
