"""Read the folder of a run: the one reader behind reports, pages, exports, the planner and monitoring.

`read_run_data` returns a `RunData`: all that a run, finished or not, has written up to a moment. A folder may be
half-written, of an earlier version, or edited by hand, so nothing in it is trusted:

* A file counts only if it lies in the folder itself: a link may lead to what nobody meant to show. Its size has a
  limit, and names in it are text that never becomes a path.
* A missing file leaves its field empty. A damaged one raises `InputError` with the file's name and the key.
* `curves.jsonl` and `now.json` are for people who watch a run. What cannot be read of them is left out.

The state of a run is what its `status.json` says, unless the process has died without writing its end. A living run
touches `heartbeat` every few seconds, so an old heartbeat means `stopped`. A fresh heartbeat beside files that have
not changed for a long time means `stalled`.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fpld.data import TextUse
from fpld.errors import FpldError, InputError
from fpld.federation.record import RoundRecord
from fpld.federation.telemetry import LOOP_TIMEOUT_SECONDS
from fpld.progress import show_seconds
from fpld.storage import run_folder as files
from fpld.storage.files import parse_toml_tables, read_utf8
from fpld.units import BITS_PER_BYTE, NATS_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

RUN_STATES = ("preparing", "running", "stalled", "stopped", "failed", "done")
HEARTBEAT_TIMEOUT_SECONDS = 20.0  # four heartbeats that were missed
STALL_TIMEOUT_SECONDS = 600.0
_MAX_FILE_BYTES = 64_000_000  # thousands of rounds
_ROUND_FILES = (files.TRACE, f"{files.MAIN}/{files.TRACE}", f"{files.MAIN}/{files.PROGRESS}")
_SHOWN_FILES = (files.CONFIG, files.VERSIONS, files.STATUS, files.NOW, files.RESULT, *_ROUND_FILES)
_ACTIVITY_FILES = (files.STATUS, files.NOW, files.LOG, f"{files.MAIN}/{files.CHECKPOINT}", *_ROUND_FILES)

ShortText = Annotated[str, Field(max_length=200)]
Record = TypeVar("Record")


class _FileRecord(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _StatusFile(_FileRecord):
    state: str
    error: Any = None


class _LoopsFile(_FileRecord):
    loops: list[Any] = []


class _PreparedFile(_FileRecord):
    documents: dict[str, int] = {}


class _ProbeFile(_FileRecord):
    vocab: int | None = Field(default=None, ge=2, le=2**31)
    symbols: list[str] = []  # of labels over strings


class TextUsed(_FileRecord):
    """A row of `texts.json`: how much of a text was used, as `fpld.data.TextUse` says it."""

    name: ShortText
    documents: int = Field(ge=0)
    bytes: int = Field(ge=1)
    used: int = Field(ge=1)
    heldout: int = Field(ge=0)
    key: ShortText
    tokens: int | None = Field(default=None, ge=1)
    heldout_tokens: int | None = Field(default=None, ge=0)

    @property
    def use(self) -> TextUse:
        """Return the record."""
        return TextUse(**self.model_dump())


class CurvePoint(_FileRecord):
    """A point of a training's curve: the mean loss of the steps since the last point."""

    method: ShortText
    round: int
    model: ShortText
    what: ShortText
    step: int
    loss: float


class RunningLoop(_FileRecord):
    """A loop in progress: what it does for which model, how far it is, and the seconds that are left."""

    method: ShortText
    round: int
    model: ShortText
    what: ShortText
    unit: ShortText
    done: int
    total: int | None
    left: float | None
    time: float
    loss: float | None = None
    tokens_per_second: float | None = None
    next: ShortText = ""

    @property
    def show_left(self) -> str:
        """Return the time left as text."""
        return "" if self.left is None else show_seconds(self.left)


class NodeProgress(_FileRecord):
    """The state of a node in the round in progress."""

    name: str
    state: str
    bits: float = 0.0
    bytes: int = 0
    seconds: float | None = None
    reason: str = ""


class RoundProgress(_FileRecord):
    """`progress.json`: the round in progress. Times are seconds since the epoch, the deadline is in seconds."""

    round: int
    rounds: int
    phase: str
    opened: float
    updated: float
    deadline: float | None = None
    nodes: list[NodeProgress] = []


class OwnLoss(_FileRecord):
    """A row of `own.json`: the loss of a node's own models on its own held-out text, and over all nodes' texts."""

    node: str
    own: float | None = None
    alone: float | None = None
    own_all: float | None = None
    alone_all: float | None = None
    ahead: float | None = None
    ahead_se: float | None = None


class PrivacySpending(_FileRecord):
    """A row of `privacy.json`: the epsilon that a node of a local run has spent, and the one it promised."""

    node: str
    unit: str
    noise: float
    rate: float
    steps: int
    epsilon: float
    promised: float
    delta: float


class MethodResult(_FileRecord):
    """A row of `result.json`: a method, its held-out loss and the bytes it sent.

    `behind` is how far its loss is above the federation's. Its standard error has windows of text as units.
    """

    method: str
    heldout_loss: float | None
    bits_per_byte: float | None
    perplexity: float | None
    uplink_bytes: int = Field(ge=0)
    downlink_bytes: int = Field(default=0, ge=0)
    behind: float | None = None
    behind_se: float | None = None


class RunState(NamedTuple):
    """A state of `RUN_STATES`, and the reason where there is one."""

    name: str
    why: str = ""

    @property
    def alive(self) -> bool:
        """Return whether the run goes on."""
        return self.name in ("preparing", "running", "stalled")


@dataclass(frozen=True)
class RunData:
    """A run as it is on disk at a moment.

    `trace` holds the closed rounds, `progress` the open one and `loops` what is being computed. `curves` are keyed by
    method, model and kind of training. `started` is when the configuration was written and `modified` the last write,
    in seconds since the epoch, and `heartbeat` the last one. `vocab` is the number of logits of a context, if the probe
    set says it. `documents` counts the private documents of each node, where the run knows them, and `texts` how much
    of each text was used.
    """

    name: str
    config_text: str
    trace: list[RoundRecord]
    results: list[MethodResult]
    versions: dict[str, str]
    progress: RoundProgress | None
    state: RunState
    started: float = 0.0
    modified: float = 0.0
    heartbeat: float = 0.0
    student_bytes: int = 0
    vocab: int | None = None
    documents: dict[str, int] = field(default_factory=dict)
    texts: list[TextUse] = field(default_factory=list)
    curves: dict[tuple[str, str, str], list[CurvePoint]] = field(default_factory=dict)
    loops: list[RunningLoop] = field(default_factory=list)
    own_losses: list[OwnLoss] = field(default_factory=list)
    privacy: list[PrivacySpending] = field(default_factory=list)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the configuration as plain tables; empty if it is not TOML."""
        try:
            return parse_toml_tables(self.config_text)
        except InputError:
            return {}

    def section(self, name: str) -> dict[str, Any]:
        """Return a table of the configuration; empty if it is missing or not a table."""
        table = self.settings.get(name)
        return table if isinstance(table, dict) else {}

    @property
    def node_settings(self) -> list[dict[str, Any]]:
        """Return the tables of the nodes in the configuration."""
        tables = self.settings.get("nodes")
        return [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []

    @property
    def nodes(self) -> list[str]:
        """Return the nodes' names in their order."""
        names = [str(table.get("name")) for table in self.node_settings]
        count = max((len(record.bits_sent) for record in self.trace), default=len(names))
        return names if len(names) >= count else [f"node {i}" for i in range(count)]

    @property
    def planned_rounds(self) -> int:
        """Return the number of rounds that the configuration asks for."""
        rounds = self.section("run").get("rounds")
        if isinstance(rounds, int):
            return rounds
        return max(len(self.trace), self.progress.rounds if self.progress else 0)

    @property
    def finished(self) -> bool:
        """Return whether the run wrote its result."""
        return bool(self.results)

    @property
    def loss_unit(self) -> str:
        """Return the unit in which figures show held-out losses: that of bytes where nodes have own tokenizers."""
        own = any(table.get("tokenizer") for table in self.node_settings)
        return BITS_PER_BYTE if own and self._bytes_per_token is not None else NATS_PER_TOKEN

    def loss_in(self, unit: str, loss: float | None) -> float:
        """Return a loss in nats per token of the student, as the trace has it, in a unit; NaN where there is none."""
        if loss is None:
            return math.nan
        if unit == NATS_PER_TOKEN:
            return loss
        size = self._bytes_per_token
        return math.nan if size is None else loss / math.log(2) / size

    @property
    def _bytes_per_token(self) -> float | None:
        return next((row.heldout_bytes_per_token for row in reversed(self.trace) if row.heldout_bytes_per_token), None)

    @property
    def bits_unit(self) -> str:
        """Return the unit in which pages show bits."""
        if self._sends_updates:
            return "bits per weight"
        return "bits per coordinate" if self.vocab is None else "bits per context"

    def in_bits_unit(self, bits: float) -> float:
        """Return bits per coordinate, as the trace has them, in the unit of `bits_unit`."""
        return bits if self._sends_updates or self.vocab is None else bits * self.vocab

    @property
    def _sends_updates(self) -> bool:
        return bool(self.section("send").get("updates"))

    def activity(self, node: str) -> str:
        """Return what a node computes in the open round, where its loops are reported; else that it has not replied."""
        current = self.progress.round if self.progress else 0
        loops = (loop for loop in self.loops if (loop.method, loop.round, loop.model) == (files.MAIN, current, node))
        return next((loop.what for loop in loops), "no answer yet")

    @property
    def uplink_bytes(self) -> list[int]:
        """Return the bytes that all nodes have sent up to each round."""
        return list(accumulate(record.sent for record in self.trace))


def read_run_data(folder: Path, name: str | None = None) -> RunData:
    """Read a run.

    Parameters
    ----------
    folder
        The folder that `fpld run` or `fpld aggregator` wrote.
    name
        What the run is called (default: the folder's name).

    Raises
    ------
    InputError
        If the folder holds no run, or one of its files is damaged.
    """
    if not is_run(folder):
        raise InputError(f"{folder} holds no run (config.toml and versions.json): give a folder that fpld run wrote")
    prepared: _PreparedFile | None = _read_json(folder / files.PREPARED, _PreparedFile)
    return RunData(
        name=name if name is not None else folder.resolve().name,
        config_text=_read_text(folder / files.CONFIG) or "",
        trace=read_trace(folder),
        results=_read_json(folder / files.RESULT, list[MethodResult]) or [],
        versions=_read_json(folder / files.VERSIONS, dict[str, str]) or {},
        progress=read_progress(folder),
        state=run_state(folder),
        started=(folder / files.CONFIG).stat().st_mtime,
        modified=last_modified(folder),
        heartbeat=_modified(folder / files.HEARTBEAT),
        vocab=_read_vocab(folder / files.PROBE),
        student_bytes=(folder / files.STUDENT).stat().st_size if is_regular_file(folder / files.STUDENT) else 0,
        documents={} if prepared is None else prepared.documents,
        texts=[row.use for row in _read_json(folder / files.TEXTS, list[TextUsed]) or []],
        curves=_read_curves(folder),
        loops=_read_loops(folder),
        own_losses=_read_json(folder / files.OWN_LOSSES, list[OwnLoss]) or [],
        privacy=_read_json(folder / files.PRIVACY, list[PrivacySpending]) or [],
    )


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return all(is_regular_file(folder / name) for name in (files.CONFIG, files.VERSIONS))


def is_regular_file(path: Path) -> bool:
    """Return whether a file is there and is not a link."""
    return path.is_file() and not path.is_symlink()


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the runs by name, sorted: the folder itself, or the folders in it. Links are not followed."""
    if is_run(folder):
        return {folder.resolve().name: folder}
    try:
        inside = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except OSError as error:
        raise InputError(f"{folder} cannot be listed ({error.strerror or error}): give a folder of runs") from None
    return {entry.name: entry for entry in sorted(inside) if is_run(entry)}


def read_trace(folder: Path) -> list[RoundRecord]:
    """Return the closed rounds; of a run that has not ended, from the folder of its federation."""
    path = folder / files.TRACE if is_regular_file(folder / files.TRACE) else folder / files.MAIN / files.TRACE
    records = []
    for number, line in enumerate((_read_text(path) or "").splitlines(), 1):
        try:
            records.append(RoundRecord.from_json(line))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: {_first_problem(error)}") from None
    return records


def read_progress(folder: Path) -> RoundProgress | None:
    """Return the round in progress; None if no round was opened."""
    progress: RoundProgress | None = _read_json(folder / files.MAIN / files.PROGRESS, RoundProgress)
    return progress


def run_state(folder: Path) -> RunState:
    """Return the state of the run in a folder."""
    try:
        status: _StatusFile | None = _read_json(folder / files.STATUS, _StatusFile)
    except (FpldError, OSError):
        status = None
    if status is None:  # a run of an earlier version, or a damaged file: the other files tell
        if is_regular_file(folder / files.RESULT):
            return RunState("done")
        return RunState("running" if is_regular_file(folder / files.MAIN / files.PROGRESS) else "preparing")
    if status.state not in RUN_STATES:  # `fpld aggregator` has started, and its run not yet
        return RunState("preparing")
    if status.state not in ("preparing", "running"):
        return RunState(status.state, str(status.error or ""))
    heartbeat = age_seconds(folder / files.HEARTBEAT)
    if heartbeat is None or heartbeat > HEARTBEAT_TIMEOUT_SECONDS:
        return RunState("stopped", "its heartbeat ended and it wrote no end: killed, or the machine went down")
    ages = [age for name in _ACTIVITY_FILES if (age := age_seconds(folder / name)) is not None]
    if ages and min(ages) > STALL_TIMEOUT_SECONDS:
        return RunState("stalled", f"the process lives, but nothing has moved for {min(ages) / 60:.0f} min")
    return RunState(status.state)


def age_seconds(path: Path) -> float | None:
    """Return the seconds since a file was written; None if there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None


def last_modified(folder: Path) -> float:
    """Return when a run last wrote one of the files that pages show, in seconds since the epoch."""
    paths = [folder / name for name in _SHOWN_FILES]
    return max((path.stat().st_mtime for path in paths if is_regular_file(path)), default=0.0)


def fingerprint(folder: Path) -> str:
    """Return a short digest that changes when what a page shows of the run does."""
    digest = hashlib.sha256()
    for name in _SHOWN_FILES:
        path = folder / name
        if path.is_file():
            status = path.stat()
            digest.update(f"{name} {status.st_mtime_ns} {status.st_size}\n".encode())
    # The state changes without a write when the heartbeat ends.
    digest.update(run_state(folder).name.encode())
    return digest.hexdigest()[:16]


def _modified(path: Path) -> float:
    return path.stat().st_mtime if is_regular_file(path) else 0.0


def _read_vocab(path: Path) -> int | None:
    """Return the logits of a context from a probe set; None if it is not there, or does not say them."""
    try:
        probe = _ProbeFile.model_validate_json(_read_text_or_nothing(path))
    except ValidationError:
        return None
    return probe.vocab or len(probe.symbols) or None


def _read_curves(folder: Path) -> dict[tuple[str, str, str], list[CurvePoint]]:
    """Return the points of each training in order. A resumed run repeats steps: the last point of a step counts."""
    curves: dict[tuple[str, str, str], dict[tuple[int, int], CurvePoint]] = {}
    lines = _read_text_or_nothing(folder / files.CURVES).splitlines()
    for point in _parse_each(CurvePoint.model_validate_json, lines):
        curves.setdefault((point.method, point.model, point.what), {})[point.round, point.step] = point
    return {key: [points[place] for place in sorted(points)] for key, points in curves.items()}


def _read_loops(folder: Path) -> list[RunningLoop]:
    """Return the loops that have reported in the last seconds."""
    try:
        entries = _LoopsFile.model_validate_json(_read_text_or_nothing(folder / files.NOW)).loops
    except ValidationError:
        return []
    loops = _parse_each(RunningLoop.model_validate, entries)
    return [loop for loop in loops if time.time() - loop.time < LOOP_TIMEOUT_SECONDS]


def _parse_each(parse: Callable[[Any], Record], entries: Iterable[Any]) -> list[Record]:
    """Return the entries that can be read."""
    records = []
    for entry in entries:
        try:
            records.append(parse(entry))
        except ValidationError:
            continue
    return records


def _read_text(path: Path) -> str | None:
    """Return the text of a file; None if there is none."""
    if not is_regular_file(path):
        return None
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise InputError(f"{path} has {path.stat().st_size} bytes, more than a run writes")
    return read_utf8(path)


def _read_text_or_nothing(path: Path) -> str:
    try:
        return _read_text(path) or ""
    except (OSError, FpldError):
        return ""


def _read_json(path: Path, schema: Any) -> Any:
    """Return the content of a JSON file, checked against a type; None if there is no file."""
    text = _read_text(path)
    if text is None:
        return None
    try:
        return TypeAdapter(schema).validate_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {_first_problem(error)}") from None


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    item = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, item['loc']))} {item['msg']}".strip()
