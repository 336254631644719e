"""Callbacks: what looks at the rounds of a federation, and changes no result.

A `Callback` is told what happens in a round and may add to the round's record what it has measured: how long each phase
took, a few lines that the student writes. `default_callbacks` are those of every run: a file for whoever watches, lines
in the log, sample texts, and the best student of all rounds. Without any of them the students, frames and losses are
the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import students
from fpld.data import load_tokenizer
from fpld.data.token_stream import open_text
from fpld.errors import StorageError
from fpld.federation.record import SampleText, best_round
from fpld.federation.telemetry import RESULT, Position
from fpld.node.training import open_student
from fpld.progress import ProgressLabel, followed_by, run_labelled, show_seconds
from fpld.seeds import derive_seed
from fpld.storage.run_folder import BEST_STUDENT, PROGRESS, PUBLIC, TOKENIZER
from fpld.students.generate import continuation
from fpld.units import show_count
from fpld.validation import shortened_list

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from fpld.data import Tokenizer
    from fpld.federation.record import Incident, RoundRecord
    from fpld.federation.state import Setup, State
    from fpld.protocol import Combined, Receipt
    from fpld.storage.run_folder import RunFolder
    from fpld.students import Student
    from fpld.types import Arrays

log = logging.getLogger(__name__)

MAX_PROMPT_WORDS = 5
SAMPLE_TOKENS = 40
SAMPLE_TEMPERATURE = 0.8
_PROMPT_WINDOW = 64  # tokens of public text that a prompt is cut from
_SECONDS_PER_NODE = 0.001  # between two writes of the progress file at least, for each node in it
_PHASE_SECONDS = {"collecting": "local", "combining": "combine", "distilling": "distill", "evaluating": "evaluate"}
_NEXT_PHASE = {"collecting": "combining", "combining": "distilling", "distilling": "evaluating"}


class Callback:
    """What is told of a federation's rounds; each method does nothing unless it is overridden."""

    def begin(self) -> None:
        """Note that a round is about to be opened."""

    def opened(self, round: int, bits: Sequence[float]) -> None:
        """Note that a round is open: all nodes are at work, each may send so many bits per coordinate."""

    def worked(self, node: int, seconds: float) -> None:
        """Note how long a node has worked, its wait for a worker aside."""

    def answered(self, receipt: Receipt, size: int, left: int) -> None:
        """Note that a frame of `size` bytes came, and that `left` nodes have not answered yet."""

    def missing(self, round: int, incident: Incident) -> None:
        """Note that a node does not answer in this round."""

    def phase(self, round: int, name: str) -> None:
        """Note that the aggregator enters a phase: combining, distilling, evaluating, closed."""

    def combined(self, combined: Combined) -> None:
        """Note what the frames of a round were combined into."""

    def distilled(self, state: State) -> None:
        """Note that the student of a round is there, and about to be evaluated."""

    def annotate(self, record: RoundRecord) -> RoundRecord:
        """Return the record of a round with what was measured; it is about to be committed."""
        return record

    def completed(self, trace: Sequence[RoundRecord], student: Arrays) -> None:
        """Note that the last record of a trace has its held-out losses, which are those of `student`."""

    def ended(self, *, failed: bool) -> None:
        """Note that this process makes no more rounds: all are made, or one has failed."""


class Callbacks(Callback):
    """Several callbacks as one, called in their order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)

    def begin(self) -> None:
        for each in self._callbacks:
            each.begin()

    def opened(self, round: int, bits: Sequence[float]) -> None:
        for each in self._callbacks:
            each.opened(round, bits)

    def worked(self, node: int, seconds: float) -> None:
        for each in self._callbacks:
            each.worked(node, seconds)

    def answered(self, receipt: Receipt, size: int, left: int) -> None:
        for each in self._callbacks:
            each.answered(receipt, size, left)

    def missing(self, round: int, incident: Incident) -> None:
        for each in self._callbacks:
            each.missing(round, incident)

    def phase(self, round: int, name: str) -> None:
        for each in self._callbacks:
            each.phase(round, name)

    def combined(self, combined: Combined) -> None:
        for each in self._callbacks:
            each.combined(combined)

    def distilled(self, state: State) -> None:
        for each in self._callbacks:
            each.distilled(state)

    def annotate(self, record: RoundRecord) -> RoundRecord:
        for each in self._callbacks:
            record = each.annotate(record)
        return record

    def completed(self, trace: Sequence[RoundRecord], student: Arrays) -> None:
        for each in self._callbacks:
            each.completed(trace, student)

    def ended(self, *, failed: bool) -> None:
        for each in self._callbacks:
            each.ended(failed=failed)


def default_callbacks(setup: Setup) -> list[Callback]:
    """Return the callbacks of every run."""
    run = setup.config.run
    names = setup.settings.names
    chosen = [
        ProgressFile(setup.store, names, run.rounds, run.deadline),
        RoundLog(setup.method, names, run.rounds),
        BestStudent(setup),
    ]
    return [*chosen, SampleTexts(setup)] if run.continuations else chosen


class ProgressFile(Callback):
    """Write `progress.json` of a federation whenever something happens; times are seconds since the epoch.

    Nothing reads it back: a run does not depend on it. The file has an entry for each node. With many nodes it is not
    written for each answer, but a moment later for all that came meanwhile.
    """

    def __init__(self, store: RunFolder, names: Sequence[str], rounds: int, deadline: float | None) -> None:
        self._store = store
        self._names = names
        self._state: dict[str, Any] = {"rounds": rounds, "deadline": deadline, "phase": ""}
        self._nodes: list[dict[str, Any]] = []
        self._started = self._lap = time.monotonic()
        self._laps: dict[str, float] = {}
        self._lock = threading.Lock()
        self._written = 0.0
        self._later = False

    def begin(self) -> None:
        """Start the clock of a round."""
        self._started = self._lap = time.monotonic()
        self._laps = {}

    def opened(self, round: int, bits: Sequence[float]) -> None:
        """Begin a round: all nodes are at work, each may send so many bits per coordinate."""
        self._started = time.monotonic()
        self._state.update(round=round, opened=time.time(), phase="collecting")
        self._nodes = [
            {"name": name, "state": "working" if allotted else "not asked", "bits": float(allotted), "bytes": 0}
            | {"reason": ""}
            | {"seconds": None, "work": None}
            for name, allotted in zip(self._names, bits, strict=True)
        ]
        self._write()

    def answered(self, receipt: Receipt, size: int, left: int) -> None:
        """Note what became of a node's frame of so many bytes: accepted, duplicate or refused, and why."""
        seconds = round(time.monotonic() - self._started, 3)
        self._nodes[receipt.node].update(state=receipt.verdict, reason=receipt.reason, bytes=size, seconds=seconds)
        self._write_soon()

    def worked(self, node: int, seconds: float) -> None:
        """Add to the time for which a node was at work in this round, its wait for a worker aside."""
        self._nodes[node]["work"] = round((self._nodes[node]["work"] or 0.0) + seconds, 3)

    def missing(self, round: int, incident: Incident) -> None:
        """Note a node that does not answer in this round."""
        for node in self._nodes:
            if node["name"] == incident.node:
                node.update(state=incident.state, reason=incident.reason)
                self._write_soon()

    def phase(self, round: int, name: str) -> None:
        """Record the aggregator's phase: combining, distilling, evaluating, closed."""
        self._laps = self._measured()
        self._lap = time.monotonic()
        self._state["phase"] = name
        self._write()

    def annotate(self, record: RoundRecord) -> RoundRecord:
        """Add how long each phase has taken, when each node answered, and how long it was at work.

        None: it has not answered, or only the node itself can measure it.
        """
        by_node = {"nodes": [node["seconds"] for node in self._nodes], "work": [node["work"] for node in self._nodes]}
        return dataclasses.replace(record, seconds={**self._measured(), **by_node})

    def _measured(self) -> dict[str, float]:
        phase = self._state["phase"]
        now = {_PHASE_SECONDS[phase]: round(time.monotonic() - self._lap, 3)} if phase in _PHASE_SECONDS else {}
        return {**self._laps, **now}

    def _write_soon(self) -> None:
        """Write the file now, or a moment later if it was just written."""
        wait = self._written + _SECONDS_PER_NODE * len(self._nodes) - time.monotonic()
        if wait <= 0:
            self._write()
        elif not self._later:
            self._later = True
            timer = threading.Timer(wait, self._write_later)
            timer.daemon = True
            timer.start()

    def _write_later(self) -> None:
        with contextlib.suppress(StorageError):  # said by the next write
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._later = False
            self._store.write_json(PROGRESS, {**self._state, "nodes": self._nodes, "updated": time.time()})
            self._written = time.monotonic()


class RoundLog(Callback):
    """Write a line to the log when something begins or ends, each with the federation's position."""

    def __init__(self, method: str, names: Sequence[str], rounds: int) -> None:
        self._method = method
        self._names = names
        self._rounds = rounds
        self._round = 0
        self._answered = 0
        self._asked = len(names)
        self._missing: list[Incident] = []
        self._started = time.monotonic()
        self._measured = 0  # the last round whose time is known
        self._seconds: list[float] = []  # that rounds have taken, since this process began

    def opened(self, round: int, bits: Sequence[float]) -> None:
        """Log that nodes are at work."""
        self._round = round
        self._answered = 0
        self._asked = sum(allotted > 0 for allotted in bits)
        self._missing = []
        self._started = time.monotonic()
        self._log(f"local training at {show_count(self._asked, 'node')}; next: {_NEXT_PHASE['collecting']}")

    def answered(self, receipt: Receipt, size: int, left: int) -> None:
        """Log what became of a frame."""
        why = f" ({receipt.reason})" if receipt.reason else ""
        self._answered = self._asked - left
        self._log(f"{self._names[receipt.node]} {receipt.verdict}{why}; {show_count(left, 'node')} to come")

    def missing(self, round: int, incident: Incident) -> None:
        """Note who did not answer; the next phase warns of all of them."""
        self._missing.append(incident)

    def phase(self, round: int, name: str) -> None:
        """Log a phase, and what follows it."""
        if self._missing:
            absent = shortened_list(list(map(str, self._missing)))
            log.warning("%s, round %d continues without %s", self._method, self._round, absent)
            self._missing = []
        if name == "closed":
            self._measure(round)
        else:
            after = f"round {round + 1}" if round < self._rounds else "the result"
            self._log(f"{name}; next: {_NEXT_PHASE.get(name, after)}")

    def completed(self, trace: Sequence[RoundRecord], student: Arrays) -> None:
        """Log the loss of a round, over which sites if not all, and how long the rounds that are left will take."""
        record = trace[-1]
        self._measure(record.round)
        sites = record.heldout_sites or []
        if record.heldout_loss is None:
            text = "nobody evaluated the student"
        else:
            text = f"held-out loss {record.heldout_loss:.4f} nats per token"
            if any(each.asked is not None for each in trace):
                text += f" (over the {show_count(len(sites), 'node')} that evaluated it)"
            elif len(sites) < len(self._names):
                text += f" (over {', '.join(sites)}, who evaluated every round)"
        to_go = self._rounds - record.round
        if to_go:
            text += f"; {to_go} to go, about {show_seconds(to_go * self._mean_seconds)}"
        log.info("%s, round %d: %s", self._method, record.round, text, extra=RESULT)

    def _measure(self, round: int) -> None:
        """Note how long a round has taken that this process opened, once.

        Its record is complete before it closes on one machine, and in the next round over a network.
        """
        if round == self._round > self._measured:
            self._measured = round
            self._seconds.append(time.monotonic() - self._started)

    @property
    def _mean_seconds(self) -> float:
        """Return the mean time of a round so far, 0 before the first has ended."""
        # The first one of a process also loads libraries and compiles kernels: it counts only while it is the only one.
        usual = self._seconds[1:] or self._seconds
        return sum(usual) / max(len(usual), 1)

    def _position(self) -> Position:
        part = self._answered / self._asked
        words = [f"round {self._round} of {self._rounds}", f"{self._answered} of {show_count(self._asked, 'node')}"]
        if self._seconds:
            passed = min(time.monotonic() - self._started, self._mean_seconds)
            words.append(f"{show_seconds((self._rounds - self._round + 1) * self._mean_seconds - passed)} left")
        return Position(self._round - 1 + part, self._rounds, ", ".join(words))

    def _log(self, text: str) -> None:
        log.info("%s, round %d: %s", self._method, self._round, text, extra={"position": self._position()})


class SampleTexts(Callback):
    """Let the student of each round write a few lines, while others evaluate it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._texts: Future[list[SampleText]] | None = None

    def distilled(self, state: State) -> None:
        """Begin to write."""
        run = self._setup.config.run
        folder = self._setup.run.path
        files = (folder / TOKENIZER, folder / PUBLIC)
        write = partial(sample_texts, self._setup.base, state.student, *files, run.continuations, run.seed)
        label = ProgressLabel(self._setup.method, state.round, "student")
        self._texts = self._setup.pool.submit(run_labelled, label, write)

    def annotate(self, record: RoundRecord) -> RoundRecord:
        """Add the texts."""
        return record if self._texts is None else dataclasses.replace(record, continuations=self._texts.result())


def sample_texts(base: Path, state: Arrays, tokenizer: Path, public: Path, count: int, seed: int) -> list[SampleText]:
    """Let a student continue a few pieces of the public text.

    They are for people to read. Prompts and draws follow from the run's seed and are the same in all rounds.
    """
    student = open_student(base, state)
    words = load_tokenizer(tokenizer, vocab=student.vocab)
    texts = prompts(open_text(public).tokens, words, count=count, seed=seed)
    with followed_by("noting them"):
        return write_samples(student, words, texts, seed=seed)


def prompts(public: np.ndarray[Any, Any], tokenizer: Tokenizer, *, count: int, seed: int) -> list[str]:
    """Return the beginnings of lines, or else of words, at random places of a public text."""
    rng = np.random.default_rng(derive_seed(seed, "continuations"))
    starts = rng.integers(max(len(public) - _PROMPT_WINDOW, 1), size=count)
    return [_beginning(tokenizer.decode(public[start : start + _PROMPT_WINDOW])) for start in starts]


def _beginning(text: str) -> str:
    r"""Return the first words of a piece of text that may begin within a word, and end within one.

    >>> _beginning("itizens of the House.\nThe state of the Union is strong, my fel")
    'The state of the Union'
    >>> _beginning("untrymen and the Senate")
    'and the'
    """
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) > MAX_PROMPT_WORDS:
            return " ".join(words[:MAX_PROMPT_WORDS])
    return " ".join(text.split()[1:-1][:MAX_PROMPT_WORDS]) or text


def write_samples(student: Student, tokenizer: Tokenizer, texts: list[str], *, seed: int) -> list[SampleText]:
    """Return each prompt and how the student continues it."""
    seeds = [derive_seed(seed, "continuations", i) for i in range(len(texts))]
    return [
        SampleText(
            text,
            continuation(student, tokenizer, text, tokens=SAMPLE_TOKENS, seed=each, temperature=SAMPLE_TEMPERATURE),
        )
        for text, each in zip(texts, seeds, strict=True)
    ]


class BestStudent(Callback):
    """Keep the student of the round with the lowest held-out loss, in a file of the federation's folder.

    Which round is best is asked of held-out text, which a promise of privacy does not cover: then it is the last.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._run = setup.identity

    def completed(self, trace: Sequence[RoundRecord], student: Arrays) -> None:
        """Write the student if none of the rounds before was better."""
        compared = trace if self._setup.config.privacy is None else trace[-1:]
        if best_round([record.heldout_by_node for record in compared]) == len(compared) - 1:
            path = self._setup.store.path / BEST_STUDENT
            students.write_state(path, student, like=self._setup.base, run=self._run)
