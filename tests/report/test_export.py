"""`fpld export`: the trace as others read it."""

from __future__ import annotations

import csv
import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest
from pyarrow import parquet
from tensorboardX.proto.event_pb2 import Event

from fpld.cli import main
from fpld.report.run import read_run_data

if TYPE_CHECKING:
    from pathlib import Path


def export(capsys: pytest.CaptureFixture[str], run: Path, out: Path, *formats: str) -> list[dict[str, Any]]:
    assert main(["export", str(run), "--to", *formats, "--out", str(out), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def events(file: Path) -> list[Event]:
    """Read an event file by its format: length, checksum, record, checksum."""
    data = file.read_bytes()
    records = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        records.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += length + 16
    return records


def test_csv_and_parquet_hold_the_trace(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = export(capsys, finished, tmp_path, "csv", "parquet")
    assert {row["file"] for row in rows} == {
        str(tmp_path / f"{name}.{suffix}") for name in ("rounds", "nodes", "results") for suffix in ("csv", "parquet")
    }
    trace = read_run_data(finished).trace
    with (tmp_path / "rounds.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["heldout_loss"]) for row in table] == [line.heldout_loss for line in trace]
    assert [int(row["round_bytes"]) for row in table] == [line.sent for line in trace]
    nodes = parquet.read_table(tmp_path / "nodes.parquet").to_pylist()
    assert [(row["round"], row["node"]) for row in nodes] == [
        (number, name) for number in (1, 2) for name in ("north", "east", "south")
    ]
    assert [row["bits_sent"] for row in nodes] == [bits for line in trace for bits in line.bits_sent]
    results = parquet.read_table(tmp_path / "results.parquet").to_pylist()
    assert results == json.loads((finished / "result.json").read_text())


def test_tensorboard_holds_the_scalars(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = export(capsys, finished, tmp_path, "tensorboard")
    scalars = {
        (value.tag, event.step): value.simple_value
        for event in events(tmp_path / "tensorboard" / row["file"].rpartition("/")[2])
        for value in event.summary.value
    }
    for line in read_run_data(finished).trace:
        assert scalars["round/heldout_loss", line.round] == pytest.approx(line.heldout_loss)
        assert scalars["round/gain", line.round] == pytest.approx(line.gain)
        assert ("training/fpld/north/round_1", 25) in scalars
        assert scalars["bits_sent/north", line.round] == pytest.approx(line.bits_sent[0])


def test_tensorboard_follows_a_run_that_goes_on(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder grows while it is followed: a round, then a round and the end."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    lines = (finished / "trace.jsonl").read_text().splitlines(keepends=True)
    (folder / "fpld/trace.jsonl").write_text(lines[0])
    (folder / "trace.jsonl").unlink()
    (folder / "status.json").write_text('{"state": "running"}')
    (folder / "heartbeat").touch()

    def grow(_seconds: float) -> None:
        (folder / "fpld/trace.jsonl").write_text("".join(lines))
        (folder / "status.json").write_text('{"state": "done"}')

    monkeypatch.setattr("fpld.cli.models.time.sleep", grow)
    assert main(["export", str(folder), "--to", "tensorboard", "--follow", "--out", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out/tensorboard").iterdir()
    steps = [event.step for event in events(file) for value in event.summary.value if value.tag == "round/heldout_loss"]
    assert steps == [1, 2]  # each once
    assert main(["export", str(folder), "--to", "csv", "--follow"]) == 2


def test_hostile_names_stay_in_the_folder(hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(tmp_path.rglob("*"))
    export(capsys, hostile, tmp_path / "out", "csv", "parquet", "tensorboard")
    new = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "out") for path in new)
    assert {path.name.partition(".")[0] for path in new} == {"out", "rounds", "nodes", "tensorboard", "events"}


def test_bad_input(tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["export", str(finished), "--out", "/dev/null/x"]) == 2
    assert "--out: cannot write" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", str(finished), "--to", "excel"])
