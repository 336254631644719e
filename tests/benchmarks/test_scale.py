"""The studies of docs/scale.md: rounds that ask a part of the nodes, and tiers of aggregators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import sampling, tiers

if TYPE_CHECKING:
    from pathlib import Path


def test_tiers_of_sums_change_nothing_and_of_robust_rules_they_do() -> None:
    """Distances of floats that are added in another order stay below 1e-12; those of other results are above 1e-3."""
    rows = {row["rule"]: row for row in tiers.measure(16, 4, 0)}
    assert set(rows) == set(tiers.RULES)
    for name, row in rows.items():
        assert (row["largest"] < 1e-12) == (name in ("mean", "mixture"))
        assert (row["mean"] > 1e-3) == (name in ("trimmed", "median"))


def test_tiers_need_groups_of_one_size() -> None:
    with pytest.raises(SystemExit, match="multiple of --groups"):
        tiers.measure(10, 4, 0)


def test_rows_of_several_seeds_are_means() -> None:
    one = {"rule": "mean", "mean": 0.1, "largest": 0.2, "flat_to_honest": 0.3, "tiers_to_honest": 0.4}
    (row,) = tiers.summarized([[one], [{**one, "mean": 0.3, "largest": 0.1}]])
    assert row == {"rule": "mean", "mean": 0.2, "largest": 0.2, "flat_to_honest": 0.3, "tiers_to_honest": 0.4}
    seeds = [[{"asked": "4 of 4", "rounds": 1, "heldout_loss": loss, "up_bytes": 10}] for loss in (2.0, 2.2)]
    (row,) = sampling.summarized(seeds)
    assert row == {"asked": "4 of 4", "rounds": 1, "heldout_loss": 2.1, "up_bytes": 10, "heldout_se": 0.1}


@pytest.mark.slow
def test_a_part_of_the_nodes_sends_that_part_of_the_bytes(tmp_path: Path) -> None:
    base, full, half = sampling.measure(tmp_path, 4, 0, ((1, 1.0), (1, 0.5)))
    assert (base["asked"], full["asked"], half["asked"]) == ("the base model", "4 of 4", "2 of 4")
    assert half["up_bytes"] == pytest.approx(full["up_bytes"] / 2, rel=0.02)
    assert full["heldout_loss"] < base["heldout_loss"]
