"""`python -m benchmarks.labels`: students at equal bytes from runs with seeds of their own, in a table that is kept."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import pytest

from benchmarks import labels
from fpld.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_students_go_by_the_seeds_of_their_runs_and_rows_are_kept(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = config_file.read_text().replace("rounds = 3", "rounds = 1")
    config_file.write_text(text.replace("[engine]", '[baselines]\nmethods = ["alone"]\n\n[engine]'))
    runs = tmp_path / "runs"
    out = tmp_path / "out"
    assert main(["run", str(config_file), "--seeds", "3,4", "--out", str(runs)]) == 0
    monkeypatch.setattr(labels, "LEAST_CONTEXTS", 1)
    monkeypatch.setattr(labels, "STEPS", 5)
    folders = [str(runs / f"seed-{seed}") for seed in (3, 4)]
    labels.main([*folders, "--out", str(out), "--megabytes", "0.01"])
    first = (out / "labels.csv").read_text()
    rows = list(csv.DictReader(first.splitlines()))
    assert {(row["run"], row["codec"], row["seed"]) for row in rows} == {
        (f"seed-{seed}", codec, str(seed)) for seed in (3, 4) for codec in ("samples", "predictive", "uniform")
    }
    assert all(0.9e4 < int(row["uplink_bytes"]) <= 1e4 for row in rows)
    assert (out / "labels.png").exists()
    labels.main([*folders, "--out", str(out), "--megabytes", "0.01", "0.02"])
    table = labels.read(out / "labels.csv")
    assert len(table) == 12
    assert set(first.splitlines()) < set((out / "labels.csv").read_text().splitlines())
    assert table["seed-3", "samples", 0.02]["heldout_loss"] != table["seed-4", "samples", 0.02]["heldout_loss"]
    (out / "labels.csv").write_text("run,codec\na,samples\n")
    with pytest.raises(SystemExit, match="has other columns than run, codec, megabytes"):
        labels.main([*folders, "--out", str(out)])
