"""The round in progress, in one file for whoever watches: who has answered, who is late, what it cost so far.

Nothing reads it back: a run does not depend on it, and what it says of time is no part of the result. The file has a
line for each node. With many nodes it is not written for each answer, but a moment later for all that came meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from fpld.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.federation.engine import Absence
    from fpld.storage.folder import RunFolder

FILE = "progress.json"
_EACH = 0.001  # seconds between two files at least, for each node in them
_LAPS = {"collecting": "local", "combining": "combine", "distilling": "distill", "evaluating": "evaluate"}

_NEXT = {"collecting": "combining", "combining": "distilling", "distilling": "evaluating"}


def next_phase(phase: str, round: int, rounds: int) -> str:
    """Return what follows a phase of a round.

    >>> next_phase("evaluating", 1, 2), next_phase("evaluating", 2, 2)
    ('round 2', 'the result')
    """
    return _NEXT.get(phase) or (f"round {round + 1}" if round < rounds else "the result")


class Progress:
    """Write `progress.json` of a federation whenever something happens; times are seconds since the epoch."""

    def __init__(self, store: RunFolder, names: Sequence[str], rounds: int, deadline: float | None) -> None:
        self._store, self._names = store, names
        self._state: dict[str, Any] = {"rounds": rounds, "deadline": deadline, "phase": ""}
        self._nodes: list[dict[str, Any]] = []
        self._started = self._lap = time.monotonic()
        self._laps: dict[str, float] = {}
        self._closed: list[float] = []
        self._lock, self._written, self._later = threading.Lock(), 0.0, False

    def start(self) -> None:
        """Start the clock of a round."""
        self._started = self._lap = time.monotonic()
        self._laps = {}

    def open(self, round: int, bits: Sequence[float]) -> None:
        """Begin a round: all nodes are at work, each may send so many bits per coordinate."""
        self._started = time.monotonic()
        self._state.update(round=round, opened=time.time(), phase="collecting")
        self._nodes = [
            {"name": name, "state": "working", "bits": float(allotted), "bytes": 0, "reason": ""}
            | {"seconds": None, "work": None}
            for name, allotted in zip(self._names, bits, strict=True)
        ]
        self._write()

    def answered(self, node: int, verdict: str, reason: str, sent: int) -> None:
        """Note what became of a node's frame of so many bytes: accepted, duplicate or refused, and why."""
        seconds = round(time.monotonic() - self._started, 3)
        self._nodes[node].update(state=verdict, reason=reason, bytes=sent, seconds=seconds)
        self._write_soon()

    def worked(self, node: int, seconds: float) -> None:
        """Add to the time for which a node was at work in this round, its wait for a worker aside."""
        self._nodes[node]["work"] = round((self._nodes[node]["work"] or 0.0) + seconds, 3)

    def missing(self, absence: Absence) -> None:
        """Note a node that does not answer in this round."""
        for node in self._nodes:
            if node["name"] == absence.node:
                node.update(state=absence.state, reason=absence.reason)
                self._write_soon()

    def phase(self, name: str) -> None:
        """Record the aggregator's phase: combining, distilling, evaluating, closed."""
        self._laps = self._measured()
        self._lap = time.monotonic()
        self._state["phase"] = name
        if name == "closed":
            self._closed.append(time.monotonic() - self._started)
        self._write()

    @property
    def mean(self) -> float:
        """Return how many seconds a round has taken on average, since this process began."""
        return sum(self._closed) / max(len(self._closed), 1)

    @property
    def seconds(self) -> dict[str, Any]:
        """Return how long each phase has taken so far, and of each node when it answered and how long it was at work.

        None: it has not answered, or only the node itself knows.
        """
        of_nodes = {"nodes": [node["seconds"] for node in self._nodes], "work": [node["work"] for node in self._nodes]}
        return {**self._measured(), **of_nodes}

    def _measured(self) -> dict[str, float]:
        phase = self._state["phase"]
        now = {_LAPS[phase]: round(time.monotonic() - self._lap, 3)} if phase in _LAPS else {}
        return {**self._laps, **now}

    def _write_soon(self) -> None:
        """Write the file now, or a moment later if it was just written."""
        wait = self._written + _EACH * len(self._nodes) - time.monotonic()
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
            self._store.write_json(FILE, {**self._state, "nodes": self._nodes, "updated": time.time()})
            self._written = time.monotonic()
