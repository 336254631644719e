"""What a federation is between two rounds, and how it survives a crash: the checkpoint is the state.

The checkpoint before it is kept, and used if the newest is damaged. The trace stands beside it, one line a round. It is
written first: a line whose round has no checkpoint is of a round that never ended, and is dropped when the run goes on.
The checkpoint holds a digest of the lines up to its round. Where nodes evaluate a round's student only with their next
task, the round's line is not whole yet: the checkpoint itself holds it, until their losses are there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fpld.errors import InputError
from fpld.federation.worth import MEANS
from fpld.storage.arrays import read_arrays
from fpld.storage.files import canonical_json, read_utf8
from fpld.storage.kept import recall_kept, write_kept

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from fpld.storage.folder import Arrays, RunFolder

CHECKPOINT, TRACE = "checkpoint.safetensors", "trace.jsonl"
_STUDENT, _TARGET, _LINES, _PENDING = "student/", "target", "trace", "pending"

Line = dict[str, Any]
"""What happened in a round, for a person to read: a line of the trace. No result depends on it."""


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """What the next round needs: the student, what the aggregator has learnt, and what is broadcast besides.

    `learnt` and `known` are the arrays and the JSON object of `Aggregator.state`. `target` are the combined logits of
    the last round, m * V numbers: kept only if they are broadcast.
    """

    student: Arrays
    learnt: Arrays
    known: dict[str, Any]
    target: np.ndarray[Any, np.dtype[np.float32]] | None = None

    @property
    def round(self) -> int:
        """Return how many rounds are behind."""
        return int(self.known["round"])


def commit(store: RunFolder, state: State, trace: Sequence[Line], *, run: str, pending: bool = False) -> None:
    """Write the trace up to the state's round, then the state of this run: with it the round has ended.

    `pending`: nobody has evaluated the student of the last line yet.
    """
    _write_trace(store, trace)
    whole = trace[:-1] if pending else trace
    said = {_LINES: _digest(whole), **({_PENDING: trace[-1]} if pending else {})}
    arrays = {**state.learnt, **{_STUDENT + name: value for name, value in state.student.items()}}
    if state.target is not None:
        arrays[_TARGET] = state.target
    write_kept(store.path / CHECKPOINT, arrays, {**state.known, **said}, run=run)


def recall(store: RunFolder, *, run: str | None) -> tuple[State, list[Line], Line | None] | None:
    """Return the last sound state that was committed in this run (None: whichever) and its trace, if there is one.

    The third is the line of the last round if its student is still to be evaluated; then the trace ends before it.
    """
    found = recall_kept(store.path / CHECKPOINT, run=run)
    if found is None:
        return None
    arrays, known = found
    lines, pending = known.pop(_LINES, None), known.pop(_PENDING, None)
    student = {name.removeprefix(_STUDENT): arrays.pop(name) for name in list(arrays) if name.startswith(_STUDENT)}
    target = arrays.pop(_TARGET, None)
    state = State(student, arrays, known, target)
    trace = _read_trace(store, state.round - (pending is not None))
    if lines not in (None, _digest(trace)):
        raise InputError(f"{store.path / TRACE} is damaged: it is not the trace of {CHECKPOINT}; start the run anew")
    if pending is not None:
        _write_trace(store, [*trace, pending])
    return state, trace, pending


def read_student(path: Path) -> Arrays:
    """Return the student's weights of a checkpoint, for who only looks on."""
    arrays, _ = read_arrays(path)
    return {name.removeprefix(_STUDENT): value for name, value in arrays.items() if name.startswith(_STUDENT)}


def _write_trace(store: RunFolder, trace: Sequence[Line]) -> None:
    store.write(TRACE, "".join(json.dumps(line) + "\n" for line in trace).encode())


def _read_trace(store: RunFolder, rounds: int) -> list[Line]:
    """Return the trace of the rounds that have ended; lines of others are dropped from the file too."""
    path = store.path / TRACE
    try:
        lines = [json.loads(line) for line in read_utf8(path).splitlines()]
        ended = [line for line in lines if line["round"] <= rounds]
        whole = [line["round"] for line in ended] == list(range(1, rounds + 1))
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}): start the run anew") from None
    if not whole:
        raise InputError(f"{path} must have a line for each of rounds 1 to {rounds}: start the run anew")
    if len(ended) < len(lines):
        _write_trace(store, ended)
    return ended


def _digest(trace: Sequence[Line]) -> str:
    """Return a digest of a trace without its means, which later rounds may change and which follow from the rest."""
    lines = [{name: value for name, value in line.items() if name not in MEANS} for line in trace]
    return hashlib.sha256(canonical_json(lines)).hexdigest()
