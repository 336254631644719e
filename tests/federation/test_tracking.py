"""Trackers: the real libraries, writing files; what they hold is the trace, and no result depends on them."""

from __future__ import annotations

import json
import struct
import sys
from typing import TYPE_CHECKING, ClassVar

import pytest

from fpld import config as configuration
from fpld import registry
from fpld.engines.local import LocalEngine
from fpld.engines.pool import Inline
from fpld.errors import InputError, MissingExtraError
from fpld.federation.prepare import prepare
from fpld.federation.rounds import Federation
from fpld.federation.tracking import Scalar, TrackedRun, Tracker, tracker_class
from fpld.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fpld.config import Config

NAMES = ["north", "east", "south"]


@pytest.fixture
def config(config_file: Path) -> Config:
    return configuration.parse_config(config_file.read_text().replace("rounds = 3", "rounds = 2"), "test")


def federate(config: Config, folder: Path, *track: str, rounds: int = 2) -> Federation:
    """Make so many rounds of a federation, as a process that is then killed or has ended."""
    store = RunFolder(folder)
    config = config.model_copy(update={"run": config.run.model_copy(update={"track": list(track)})})
    prepared = prepare(config, store)
    federation = Federation(config, store, prepared, "fpld", pool=Inline())
    engine = LocalEngine(federation, prepared.bytes_per_token)
    with federation.watched():
        for _ in range(rounds - federation.state.round):
            federation.advance(engine)
    return federation


class Memory(Tracker):
    """Keeps what it is given."""

    written: ClassVar[dict[tuple[str, int], float]]
    runs: ClassVar[list[TrackedRun]]
    closed: ClassVar[list[bool]]

    @classmethod
    def load(cls) -> None:
        cls.written = {}
        cls.runs = []
        cls.closed = []

    def open(self, run: TrackedRun) -> None:
        self.runs.append(run)

    def write(self, scalars: Sequence[Scalar]) -> None:
        self.written.update({(scalar.tag, scalar.step): scalar.value for scalar in scalars})

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


@pytest.fixture
def memory() -> Iterator[type[Memory]]:
    registry.trackers.register("memory", Memory)
    yield Memory
    del registry.trackers._loaded["memory"]


def test_a_tracker_of_ones_own_gets_the_trace_and_the_curves(
    config: Config, tmp_path: Path, memory: type[Memory]
) -> None:
    federation = federate(config, tmp_path / "run", "memory")
    for record in federation.trace:
        assert memory.written["round/heldout_loss", record.round] == record.heldout_loss
        assert memory.written["round/all_bytes", record.round] == sum(r.sent for r in federation.trace[: record.round])
        for name, loss, sent in zip(NAMES, record.heldout_by_node, record.node_bytes, strict=True):
            assert memory.written[f"heldout_loss/{name}", record.round] == loss
            assert memory.written[f"bytes/{name}", record.round] == sent
    assert ("training/fpld/north/round_2", 25) in memory.written
    (run,) = memory.runs
    assert run.name == "run"
    assert run.settings["nodes.north.bits"] == 1.5
    assert memory.closed == [False]


def test_a_resumed_run_has_the_same_key_and_results(config: Config, tmp_path: Path, memory: type[Memory]) -> None:
    federate(config, tmp_path / "run", "memory", rounds=1)
    key = memory.runs[0].key
    resumed = federate(config, tmp_path / "run", "memory")
    assert [run.key for run in memory.runs] == [key]  # `load` has emptied the list
    untracked = federate(config, tmp_path / "other")
    assert resumed.identity == untracked.identity
    assert [line.heldout_loss for line in resumed.trace] == [line.heldout_loss for line in untracked.trace]
    assert not (tmp_path / "other" / "tracking").exists()
    (tmp_path / "run/tracking/key").write_text("../..")
    with pytest.raises(InputError, match="tracking/key"):
        federate(config, tmp_path / "run", "memory")


def test_a_failing_tracker_is_left_out_and_the_run_goes_on(
    config: Config, tmp_path: Path, memory: type[Memory], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Memory):
        def write(self, scalars: Sequence[Scalar]) -> None:
            raise OSError("server away")

    registry.trackers.register("broken", Broken)
    try:
        federation = federate(config, tmp_path / "run", "broken", "memory")
    finally:
        del registry.trackers._loaded["broken"]
    assert federation.done
    assert ("round/heldout_loss", 2) in memory.written
    warnings = [record.getMessage() for record in caplog.records if "server away" in record.getMessage()]
    assert len(warnings) == 1
    assert "broken" in warnings[0]


def test_a_round_that_fails_is_told(config: Config, tmp_path: Path, memory: type[Memory]) -> None:
    store = RunFolder(tmp_path / "run")
    tracked = config.model_copy(update={"run": config.run.model_copy(update={"track": ["memory"]})})
    federation = Federation(tracked, store, prepare(tracked, store), "fpld", pool=Inline())
    with pytest.raises(AttributeError):
        federation.run(None)  # type: ignore[arg-type]
    federation.callbacks.begin()
    with pytest.raises(AttributeError):
        federation.run(None)  # type: ignore[arg-type]
    assert memory.closed[-1] is True


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_library_is_an_error_that_names_the_extra(
    name: str, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorboardX", "mlflow", "mlflow.tracking", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    extra = {"tensorboard": "export"}.get(name, name)
    with pytest.raises(MissingExtraError, match=rf"run\.track.*fpld\[{extra}\]"):
        tracker_class(name)


def test_tensorboard(config: Config, tmp_path: Path) -> None:
    from tests.report.test_export import events

    federation = federate(config, tmp_path / "run", "tensorboard")
    (file,) = (tmp_path / "run/tracking/tensorboard").iterdir()
    scalars = {(value.tag, event.step): value.simple_value for event in events(file) for value in event.summary.value}
    for record in federation.trace:
        assert scalars["round/heldout_loss", record.round] == pytest.approx(record.heldout_loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_mlflow_in_a_file(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed is one run of MLflow, with all metrics, and is closed."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    federate(config, tmp_path / "run", "mlflow", rounds=1)
    federation = federate(config, tmp_path / "run", "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/run/tracking/mlflow.db")
    experiment = client.get_experiment_by_name("fpld")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["nodes.east.bits"] == "4.0"
    history = client.get_metric_history(run.info.run_id, "round/heldout_loss")
    assert {each.step: each.value for each in history} == {line.round: line.heldout_loss for line in federation.trace}


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format: blocks of 32 KiB, records in one or several pieces."""
    at = 7  # after the file's own header, in the first block
    record = b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_offline(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that `wandb sync` sends, read by its format and the library's own messages."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    federation = federate(config, tmp_path / "run", "wandb")
    (file,) = (tmp_path / "run/tracking/wandb").glob("offline-run-*/run-*.wandb")
    losses = {}
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined,unused-ignore]
        record.ParseFromString(data)
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if "round/heldout_loss" in items:
            losses[items["round/heldout_loss/step"]] = items["round/heldout_loss"]
    assert losses == {record.round: record.heldout_loss for record in federation.trace}
