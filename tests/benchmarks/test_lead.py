"""The study of local training: each method's best row for each number of steps, from runs that are continued."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from matplotlib.figure import Figure

from benchmarks.lead import best, draw, measure

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.lead import Row

TINY = {"baselines.rounds": [1, 2], "base.steps": 2, "distill.steps": 4}


def row(method: str, loss: float, sent: int) -> Row:
    return {"method": method, "heldout_loss": loss, "uplink_bytes": sent}


def test_fedavg_has_its_best_rounds_and_one_bit_no_more_bytes_than_fpld() -> None:
    rows = [
        row("fpld", 3.0, 100),
        row("fedavg, 1 round", 3.3, 1000),
        row("fedavg, 2 rounds", 3.2, 2000),
        row("fedavg-1bit, 2 rounds", 3.4, 90),
        row("fedavg-1bit, 3 rounds", 3.1, 110),
        row("alone", 3.9, 0),
    ]
    kept = [each["method"] for each in best(rows)]
    assert kept == ["fedavg, 2 rounds", "fedavg-1bit, 2 rounds", "fpld"]


@pytest.mark.slow
def test_each_number_of_steps_has_its_rows(tmp_path: Path) -> None:
    rows = measure((2, 4), (0, 1), tmp_path, TINY, "tiny")
    # One bit per weight is more here than labels.
    methods = ["base", "fedavg", "feddf", "fpld", "updates", "ensemble"]
    assert [row["method"].split(",")[0] for row in rows] == methods * 2
    assert [row["steps"] for row in rows] == [2] * len(methods) + [4] * len(methods)
    assert measure((2, 4), (0, 1), tmp_path, TINY, "tiny") == rows
    draw(rows, Figure())
