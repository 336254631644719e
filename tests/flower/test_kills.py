"""A slice of `benchmarks.kill_lab`: one kill of each kind, in a real deployment."""

from __future__ import annotations

import math
import random
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.kill_lab import Row, federation, left, table

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_whatever_is_killed_heals_and_the_result_is_the_same(tmp_path: Path) -> None:
    """Here a machine may be busy with other tests: the lab itself asks for 15 seconds."""
    kinds = ["aggregator", "superlink", "node"]
    row = federation(tmp_path, kinds, random.Random(0), math.inf, rounds=12)
    assert [each["kind"] for each in row["kills"]] == ["node", "superlink", "aggregator"]
    assert all(each["seconds"] < 60 for each in row["kills"]), row
    assert row["same"]


def kill(kind: str, seconds: float | None, *, starts: int = 1) -> Row:
    return {"kind": kind, "seconds": seconds, "starts": starts}


def test_the_labs_table_counts_what_was_killed() -> None:
    kept = [
        {"kills": [kill("node", 4.0), kill("node", 15.5)], "same": True},
        {"kills": [kill("superlink", None, starts=2)], "same": False},
    ]
    assert table(kept) == [
        {"killed": "node", "kills": 2, "healed within 15 s": 1, "median": 9.8, "worst": 15.5, "starts besides": 0},
        {"killed": "superlink", "kills": 1, "healed within 15 s": 0, "median": 120.0, "worst": 120.0}
        | {"starts besides": 1},
    ]
    assert sorted(left(kept, 2, random.Random(0))) == ["aggregator", "aggregator", "superlink"]
