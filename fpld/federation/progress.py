"""The round in progress, in one file for whoever watches: who has answered, who is late, what it cost so far.

Nothing reads it back: a run does not depend on it, and what it says of time is no part of the result.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.storage.folder import RunFolder

FILE = "progress.json"


class Progress:
    """Write `progress.json` of a federation whenever something happens; times are seconds since the epoch."""

    def __init__(self, store: RunFolder, names: Sequence[str], rounds: int, deadline: float | None) -> None:
        self._store, self._names = store, names
        self._state: dict[str, Any] = {"rounds": rounds, "deadline": deadline}
        self._nodes: list[dict[str, Any]] = []
        self._started = time.monotonic()

    def open(self, round: int, bits: Sequence[float]) -> None:
        """Begin a round: all nodes are at work, each may send so many bits per coordinate."""
        self._started = time.monotonic()
        self._state.update(round=round, opened=time.time())
        self._nodes = [
            {"name": name, "state": "working", "bits": float(allotted), "bytes": 0, "seconds": None, "reason": ""}
            for name, allotted in zip(self._names, bits, strict=True)
        ]
        self.phase("collecting")

    def answered(self, node: int, verdict: str, reason: str, sent: int) -> None:
        """Note what became of a node's frame of so many bytes: accepted, duplicate or refused, and why."""
        seconds = round(time.monotonic() - self._started, 3)
        self._nodes[node].update(state=verdict, reason=reason, bytes=sent, seconds=seconds)
        self._write()

    def missing(self, text: str) -> None:
        """Note a node that does not answer in this round, as the trace says it: its name, a colon, and why."""
        for node in self._nodes:
            if text.startswith(f"{node['name']}: "):
                why = text.removeprefix(f"{node['name']}: ")
                state = next((word for word in ("late", "failed") if why.startswith(f"{word}: ")), "absent")
                node.update(state=state, reason=why.removeprefix(f"{state}: "))
                self._write()
                return

    def phase(self, name: str) -> None:
        """Note what the aggregator does: collecting, combining, distilling, evaluating, closed."""
        self._state["phase"] = name
        self._write()

    @property
    def seconds(self) -> list[float | None]:
        """Return how long each node took to answer in this round; None: it has not."""
        return [node["seconds"] for node in self._nodes]

    def _write(self) -> None:
        self._store.write_json(FILE, {**self._state, "nodes": self._nodes, "updated": time.time()})
