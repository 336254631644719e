"""The state of a run, as its folder tells it: what the run wrote last, and whether it still lives."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

from fpld.federation.status import BEAT, STATUS
from fpld.federation.watch import NOW
from fpld.storage.files import read_utf8

if TYPE_CHECKING:
    from pathlib import Path

DEAD = 20.0  # seconds without a sign of life after which a run has stopped: four that were missed
STALLED = 600.0  # seconds in which nothing has moved, while the process lives
_MOVES = (
    STATUS, NOW, "trace.jsonl", "fpld/trace.jsonl", "fpld/progress.json", "fpld/checkpoint.safetensors", "log.txt",
)  # fmt: skip
_STATES = ("preparing", "running", "done", "failed", "stopped")


class RunState(NamedTuple):
    """A state (preparing, running, stalled, stopped, failed, done), and why, where there is something to say."""

    name: str
    why: str = ""

    @property
    def alive(self) -> bool:
        """Return whether the run goes on."""
        return self.name in ("preparing", "running", "stalled")


def run_state(folder: Path) -> RunState:
    """Return the state of the run in a folder."""
    try:
        said = json.loads(read_utf8(folder / STATUS))
        name, why = str(said["state"]), str(said.get("error") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return _by_files(folder)
    if name not in _STATES:  # `fpld aggregator` has just started, and its run not yet
        return RunState("preparing")
    if name not in ("preparing", "running"):
        return RunState(name, why)
    beat = _age(folder / BEAT)
    if beat is None or beat > DEAD:
        return RunState("stopped", "it gave no sign of life and wrote no end: killed, or the machine went down")
    moved = min((age for file in _MOVES if (age := _age(folder / file)) is not None), default=0.0)
    if moved > STALLED:
        return RunState("stalled", f"the process lives, but nothing has moved for {moved / 60:.0f} min")
    return RunState(name)


def _by_files(folder: Path) -> RunState:
    """Return the state of a run that wrote none."""
    if (folder / "result.json").is_file():
        return RunState("done")
    return RunState("running" if (folder / "fpld" / "progress.json").is_file() else "preparing")


def _age(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None
