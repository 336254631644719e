"""Students over tokens and over strings, on tiny models: every case of the benchmark runs, and learns."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import strings
from benchmarks.strings import Case, Size

if TYPE_CHECKING:
    from pathlib import Path

TINY = Size(base=4, teacher=8, distill=6, contexts=320, heldout=600, width=16)
SOME = (Case("A"), Case("A", bits=60.0), Case("B", 300, 3, marked=True), Case("B", 300, 3, bits=60.0))


@pytest.mark.slow
def test_each_case_has_a_loss_and_a_seed_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(_size: Size, seed: int) -> list[strings.Row]:
        measured.append(seed)
        return original(TINY, seed, SOME)

    original = strings.measure
    monkeypatch.setattr(strings, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["strings", "--seeds", "4", "--out", str(tmp_path)])
    strings.main()
    strings.main()
    assert measured == [4]
    rows = list(csv.DictReader((tmp_path / "strings.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == ["A, before", "B, before", "teacher", *["student"] * 4]
    loss = [float(row["loss"]) for row in rows]
    assert all(1 < value < 9 for value in loss)
    assert loss[2] < loss[0]
    # A student that learns is ahead of the model that it begins as.
    assert loss[3] < loss[0]
    assert loss[5] < loss[1]
