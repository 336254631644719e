"""A slice of `benchmarks.kill_lab`: one kill of each kind, in a real deployment."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from benchmarks.flower_patches import add_kills, chosen, worst
from benchmarks.kill_lab import KINDS, Lab, Row, left, table
from tests.engines.flower.conftest import NAMES

if TYPE_CHECKING:
    from pathlib import Path


def all_have(words: str, logs: list[Path]) -> bool:
    """Return whether all logs have these words."""
    return all(words in log.read_text() for log in logs)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_whatever_is_killed_while_nodes_train_heals_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    """Here a machine may be busy with other tests: the lab itself asks for 15 seconds."""
    lab = Lab(tmp_path, random.Random(0), ("[local]\nsteps = 25", "[local]\nsteps = 1200"), rounds=4)
    some = lab.machines
    logs = [some.folder / "nodes" / name / "log.txt" for name in NAMES]
    expected = ["flower-superlink stopped"]
    try:
        for number, kind in enumerate(("node", "superlink", "aggregator"), 1):
            some.wait_for(partial(all_have, f"round {number}: training", logs), 150)
            killed = lab.strike(kind, span=0.0)
            assert killed["round"] == number
            assert killed["seconds"] < 60
            if kind == "node":
                expected.append(f"{killed['victim']} is back: its task is sent again")
        assert lab.finish()
        assert [saying for saying in expected if saying not in some.said("aggregator")] == []
    finally:
        lab.abandon()


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


def test_kills_of_one_more_deployment_are_added_to_a_choices_row() -> None:
    row: Row = {**{f"{one}_kills": [1.0] for one in KINDS}, "compared": 5, "same": True}
    add_kills(row, {**{f"{one}_kills": [2.0, None] for one in KINDS}, "compared": 7, "same": False})
    assert row == {**{f"{one}_kills": [1.0, 2.0, None] for one in KINDS}, "compared": 12, "same": False}
    assert worst(row["node_kills"]) == "2.0 (at most 120.0, 3 kills)"
    assert worst([]) == "none"
    assert [chosen(choice) for choice in ("none", "auto", "retry")] == ['"none"', '"auto"', '["retry"]']
