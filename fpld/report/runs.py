"""Read the folder of a run, finished or not: nothing is written, nothing is trusted.

A folder may be half-written, of an older version, or edited by hand. What is missing is left out, what is damaged
is an error that names the file, and names in it are text: they never become paths.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fpld.errors import InputError
from fpld.report.curves import Loop, Point, read_curves, read_loops
from fpld.report.status import RunState, run_state
from fpld.storage.files import read_utf8

if TYPE_CHECKING:
    from pathlib import Path

_LARGEST = 64_000_000  # bytes of a file that is read here: thousands of rounds
_LONGEST = 4000  # characters of a sample


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Incident(_Read):
    """A frame that was refused, or a node that gave none: whose, what it was, and why."""

    node: str = ""
    state: str = ""
    reason: str

    @model_validator(mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        """Take the one text that folders of earlier versions have as the reason."""
        return {"reason": value} if isinstance(value, str) else value


class Continuation(_Read):
    """A few public words, and how the student of a round goes on from them."""

    prompt: Annotated[str, Field(max_length=_LONGEST)]
    text: Annotated[str, Field(max_length=_LONGEST)]


class Line(_Read):
    """A line of `trace.jsonl`: a round as it was closed."""

    round: int
    nodes: list[str]
    bits_allotted: list[float]
    bits_sent: list[float]
    payload_bytes: int
    overhead_bytes: int
    node_bytes: list[int] = []
    node_downlink_bytes: list[int] = []
    weights: list[float] | list[list[float]] | None = None
    curves: list[tuple[float, float]] | None = None
    noise: list[float | None] = []
    downlink_bytes: int = 0
    downlink: dict[str, int] = {}
    uplink: dict[str, int] = {}
    student_bytes: int = 0
    kl: float | None = None
    gain: float | None = None
    heldout_loss: float | None
    heldout_by_node: list[float | None]
    heldout_sites: list[str] | None = None
    bandwidth_upper: float | None = None
    bandwidth_lower: float | None = None
    conditions: dict[str, bool] | None = None
    continuations: list[Continuation] = []
    refused: list[Incident] = []
    absent: list[Incident] = []
    seconds: dict[str, float | list[float | None]] = {}

    @property
    def sent(self) -> int:
        """Return all bytes that nodes sent in the round."""
        return self.payload_bytes + self.overhead_bytes

    @property
    def node_weights(self) -> list[float] | None:
        """Return a weight for each node, if weights are what was estimated (and not curves, of two numbers each)."""
        found = [weight for weight in self.weights or [] if isinstance(weight, float)]
        return found or None

    @property
    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase."""
        return {name: value for name, value in self.seconds.items() if isinstance(value, float)}

    @property
    def answers(self) -> list[float | None]:
        """Return the seconds after which each node answered; empty if not recorded."""
        return self._times("nodes")

    @property
    def work(self) -> list[float | None]:
        """Return the seconds for which each node was at work, without its wait for a worker; empty if not recorded."""
        return self._times("work")

    def _times(self, name: str) -> list[float | None]:
        found = self.seconds.get(name)
        return found if isinstance(found, list) and any(value is not None for value in found) else []


class NodeProgress(_Read):
    """The state of a node in the round in progress."""

    name: str
    state: str
    bits: float = 0.0
    bytes: int = 0
    seconds: float | None = None
    reason: str = ""


class RoundProgress(_Read):
    """`progress.json`: the round in progress."""

    round: int
    rounds: int
    phase: str
    opened: float
    updated: float
    deadline: float | None = None
    nodes: list[NodeProgress] = []


class OwnLoss(_Read):
    """A row of `own.json`: the loss of a node's own models on its own held-out text, and over all nodes' texts."""

    node: str
    own: float | None = None
    alone: float | None = None
    own_all: float | None = None
    alone_all: float | None = None


class Spending(_Read):
    """A row of `privacy.json`: what a node of a local run has spent, and what it promised."""

    node: str
    unit: str
    noise: float
    rate: float
    steps: int
    epsilon: float
    promised: float
    delta: float


class Result(_Read):
    """A row of `result.json`: a method, its held-out loss and what it sent.

    `behind` is how far its loss is above the federation's, with a standard error that has windows of text as units.
    """

    method: str
    heldout_loss: float | None
    bits_per_byte: float | None
    perplexity: float | None
    uplink_bytes: int = Field(ge=0)
    downlink_bytes: int = Field(default=0, ge=0)
    behind: float | None = None
    behind_se: float | None = None


class Texts(_Read):
    """`prepared.json`: what the nodes' texts are."""

    documents: dict[str, int] = {}


@dataclass(frozen=True)
class Run:
    """A run as it is on disk at a moment."""

    name: str
    text: str
    trace: list[Line]
    results: list[Result]
    versions: dict[str, str]
    progress: RoundProgress | None
    state: RunState
    begun: float = 0.0  # when its configuration was written, in seconds since the epoch
    changed: float = 0.0  # when it last wrote something
    student_bytes: int = 0
    documents: dict[str, int] = field(default_factory=dict)  # of each node, where the run knows them
    curves: dict[tuple[str, str, str], list[Point]] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    own: list[OwnLoss] = field(default_factory=list)
    privacy: list[Spending] = field(default_factory=list)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the configuration as plain tables; empty if it is no TOML."""
        try:
            return tomllib.loads(self.text)
        except (ValueError, RecursionError):
            return {}

    @property
    def nodes(self) -> list[str]:
        """Return the nodes' names in their order."""
        tables = self.settings.get("nodes")
        found = [str(node.get("name")) for node in tables if isinstance(node, dict)] if isinstance(tables, list) else []
        most = max([len(line.bits_sent) for line in self.trace], default=len(found))
        return found if len(found) >= most else [f"node {i}" for i in range(most)]

    @property
    def rounds(self) -> int:
        """Return how many rounds were asked for."""
        asked = self.settings.get("run", {}).get("rounds") if isinstance(self.settings.get("run"), dict) else None
        return asked if isinstance(asked, int) else max(len(self.trace), self.progress.rounds if self.progress else 0)

    @property
    def finished(self) -> bool:
        """Return whether the run wrote its result."""
        return bool(self.results)

    def doing(self, node: str) -> str:
        """Return what a node is at in the round in progress, where it says so; while it waits it says nothing."""
        now = self.progress.round if self.progress else 0
        said = (loop.what for loop in self.loops if (loop.method, loop.round, loop.model) == ("fpld", now, node))
        return next(said, "no answer yet")

    @property
    def uplink(self) -> list[int]:
        """Return the bytes that were sent up to each round."""
        return list(accumulate(line.sent for line in self.trace))


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return all(is_own(folder / name) for name in ("config.toml", "versions.json"))


def is_own(path: Path) -> bool:
    """Return whether a file is there and lies in the folder itself: a link may lead to what nobody meant to show."""
    return path.is_file() and not path.is_symlink()


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the runs in a folder by name, sorted: itself, or the folders in it; links that lead out are left aside."""
    if is_run(folder):
        return {folder.resolve().name: folder}
    try:
        inside = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except OSError as error:
        raise InputError(f"{folder} cannot be listed ({error.strerror or error}): give a folder of runs") from None
    return {entry.name: entry for entry in sorted(inside) if is_run(entry)}


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read a run; `name` is what it is called (default: the folder's name)."""
    if not is_run(folder):
        raise InputError(f"{folder} holds no run (config.toml and versions.json): give a folder that fpld run wrote")
    trace = folder / "trace.jsonl"
    return Run(
        name=name if name is not None else folder.resolve().name,
        text=_text(folder / "config.toml"),
        trace=_lines(trace if is_own(trace) else folder / "fpld" / "trace.jsonl"),
        results=_json(folder / "result.json", list[Result]) or [],
        versions=_json(folder / "versions.json", dict[str, str]) or {},
        progress=_json(folder / "fpld" / "progress.json", RoundProgress),
        state=run_state(folder),
        begun=(folder / "config.toml").stat().st_mtime,
        changed=max((path.stat().st_mtime for path in _written(folder)), default=0.0),
        student_bytes=student.stat().st_size if is_own(student := folder / "student.safetensors") else 0,
        documents=(_json(folder / "prepared.json", Texts) or Texts()).documents,
        curves=read_curves(folder),
        loops=read_loops(folder),
        own=_json(folder / "own.json", list[OwnLoss]) or [],
        privacy=_json(folder / "privacy.json", list[Spending]) or [],
    )


def _written(folder: Path) -> list[Path]:
    names = ("config.toml", "trace.jsonl", "fpld/trace.jsonl", "fpld/progress.json", "result.json")
    return [folder / name for name in names if is_own(folder / name)]


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        raise InputError(f"{path} has {path.stat().st_size} bytes, more than a run writes")
    return read_utf8(path)


def _lines(path: Path) -> list[Line]:
    if not is_own(path):
        return []
    found = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            found.append(Line.model_validate_json(line))
        except (ValidationError, ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: {_first(error)}") from None
    return found


def _json(path: Path, kind: Any) -> Any:
    """Read a JSON file of a kind; None if there is none."""
    if not is_own(path):
        return None
    try:
        return TypeAdapter(kind).validate_json(_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {_first(error)}") from None


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    item = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, item['loc']))} {item['msg']}".strip()
