"""Experiment trackers: the numbers of each round, and the curves of all trainings, in tools that people have open.

`[run] track` names them. A tracker writes into the run's folder, below `tracking/`, and connects to nothing, unless its
own variables say otherwise: `MLFLOW_TRACKING_URI` and `WANDB_MODE=online`. A resumed run continues the same run of the
tracker, by the key in `tracking/key`. No result depends on a tracker. They work in a thread of their own, so that a
server that does not answer holds up the end of a run at most. A tracker that fails is left out from there on, with a
warning.

A tracker of one's own is a class with the methods of `Tracker`, under a name in `fpld.registry.trackers`.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fpld.errors import InputError, MissingExtraError
from fpld.federation.callbacks import Callback
from fpld.federation.record import node_rounds, round_row
from fpld.federation.telemetry import listen
from fpld.progress import CURVE_LOGGER
from fpld.registry import trackers
from fpld.storage.files import flat_keys, read_utf8
from fpld.storage.run_folder import TRACKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from fpld.config import Config
    from fpld.federation.record import RoundRecord
    from fpld.storage.run_folder import RunFolder
    from fpld.types import Arrays

log = logging.getLogger(__name__)

_NODE_NUMBERS = ("bits_allotted", "bits_sent", "bytes", "weight", "heldout_loss", "seconds")
_KEY_FILE = "key"
_KEY_BYTES = 8


class Scalar(NamedTuple):
    """A number by its tag, with the round or the training step that it belongs to."""

    tag: str
    step: int
    value: float


class TrackedRun(NamedTuple):
    """What a tracker gets of a run: its name, a key of its own, a folder for files, the configuration by keys."""

    name: str
    key: str
    folder: Path
    settings: Mapping[str, Any]


class Tracker(ABC):
    """A tool that records runs; `extra` is what to install for it."""

    extra: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def load(cls) -> None:
        """Import the library.

        Raises
        ------
        ImportError
            If it is not installed.
        """

    @abstractmethod
    def open(self, run: TrackedRun) -> None:
        """Begin a run, or continue the one with the same key."""

    @abstractmethod
    def write(self, scalars: Sequence[Scalar]) -> None:
        """Record numbers."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End the run."""


def tracker_class(name: str) -> type[Tracker]:
    """Return a tracker whose library is installed.

    Raises
    ------
    MissingExtraError
        Naming the extra, if the library is not installed.
    """
    tracker = trackers.get(name)
    try:
        tracker.load()
    except ImportError as error:
        raise MissingExtraError(f"run.track: {name!r}", tracker.extra) from error
    return tracker


def record_scalars(record: RoundRecord, names: Sequence[str], sent: int) -> Iterator[Scalar]:
    """Yield the numbers of a round and of each node in it; `sent` are the bytes of all rounds up to it."""
    for name, value in round_row(record, sent).items():
        if name != "round" and value is not None:
            yield Scalar(f"round/{name}", record.round, value)
    for row in node_rounds(record, names):
        for name in _NODE_NUMBERS:
            if row[name] is not None:
                yield Scalar(f"{name}/{row['node']}", record.round, row[name])


def curve_tag(what: str, method: str, model: str, round: int) -> str:
    """Return the tag of a training's curve.

    >>> curve_tag("training", "fpld", "north", 2)
    'training/fpld/north/round_2'
    """
    return "/".join(filter(None, (what, method, model, f"round_{round}" if round else "")))


class CurvePoints(logging.Handler):
    """Gather the points of training curves from the log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._scalars: list[Scalar] = []
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a point."""
        point = vars(record).get("point")
        if point is not None:
            tag = curve_tag(point["what"], point["method"], point["model"], point["round"])
            with self._guard:
                self._scalars.append(Scalar(tag, point["step"], point["loss"]))

    def take(self) -> list[Scalar]:
        """Return what came since the last call."""
        with self._guard:
            taken = self._scalars
            self._scalars = []
        return taken


class Tracking(Callback):
    """Give the numbers of a federation's rounds to the trackers that its configuration names."""

    def __init__(self, config: Config, run: RunFolder, names: Sequence[str]) -> None:
        self._names = names
        self._trackers = {name: tracker_class(name)() for name in config.run.track}
        self._run = _tracked_run(config, run)
        self._points = CurvePoints()
        self._listening = ExitStack()
        self._thread: ThreadPoolExecutor | None = None

    def begin(self) -> None:
        """Open the trackers before the first round of this process."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tracking")
            self._listening.enter_context(listen(self._points, CURVE_LOGGER, level=logging.DEBUG))
            self._submit(lambda tracker: tracker.open(self._run))

    def completed(self, trace: Sequence[RoundRecord], student: Arrays) -> None:  # noqa: ARG002
        """Record the last round, and the trainings since the round before."""
        sent = sum(record.sent for record in trace)
        scalars = [*record_scalars(trace[-1], self._names, sent), *self._points.take()]
        self._submit(lambda tracker: tracker.write(scalars))

    def ended(self, *, failed: bool) -> None:
        """Close the trackers, when they have written all."""
        self._listening.close()
        self._submit(lambda tracker: tracker.close(failed=failed))
        if self._thread is not None:
            self._thread.shutdown()

    def _submit(self, call: Callable[[Tracker], None]) -> None:
        """Let the thread call every tracker that works."""
        if self._thread is not None:
            self._thread.submit(partial(self._call, call))

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a library raises: the run goes on
                log.warning("run.track: %s is left out from here on: %s: %s", name, type(error).__name__, error)
                del self._trackers[name]


def _tracked_run(config: Config, run: RunFolder) -> TrackedRun:
    """Return what trackers get of a run; its key is drawn once."""
    folder = run.path / TRACKING
    file = folder / _KEY_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        run.write(f"{TRACKING}/{_KEY_FILE}", secrets.token_hex(_KEY_BYTES).encode())
    key = read_utf8(file).strip()
    if not (len(key) == 2 * _KEY_BYTES and key.isalnum()):
        raise InputError(f"{file} is damaged: delete it, and the run has a new key")
    return TrackedRun(run.path.resolve().name, key, folder, _settings(config))


def _settings(config: Config) -> dict[str, Any]:
    """Return the values of a configuration by keys that every tracker takes: without brackets."""
    values = flat_keys(config.model_dump(mode="json", exclude_none=True))
    return {key.replace("[", ".").replace("]", ""): value for key, value in values.items()}
