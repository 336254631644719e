"""Every claim of the paper holds in our numbers, at the paper's sizes."""

from __future__ import annotations

import pytest

from fpld.paper.reproduce import REPRODUCTIONS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_claims_hold(name: str) -> None:
    """With another seed than `fpld reproduce all`, whose exit code says so of its own (`test_cli.py`)."""
    reproduction = REPRODUCTIONS[name]
    ticks: list[None] = []
    rows = reproduction.simulate(7, lambda: ticks.append(None))
    assert [claim for claim in reproduction.claims(rows) if not claim.holds] == []
    assert len(ticks) == reproduction.steps


def test_claims_can_fail() -> None:
    """A reading that says yes to everything would be worth nothing."""
    rows = REPRODUCTIONS["fig2"].simulate(0, lambda: None)
    broken = [{**row, "kl": row["kl"] * (1.3 if row["policy"] == "optimal" else 1)} for row in rows]
    assert [claim.holds for claim in REPRODUCTIONS["fig2"].claims(broken)] == [False, True, True, True, True]
    swapped = [{**row, "kl": 1 / row["kl"]} for row in rows]
    assert not any(claim.holds for claim in REPRODUCTIONS["fig2"].claims(swapped)[:3])


def test_claims_about_labels_can_fail() -> None:
    labels = REPRODUCTIONS["labels"]
    rows = labels.simulate(0, lambda: None)
    worse = [{**row, "noise": row["noise"] * (1.2 if row["policy"] == "square-root" else 1)} for row in rows]
    assert [claim.holds for claim in labels.claims(worse)] == [False, True, True, False, True]
    steeper = [{**row, "noise": row["noise"] / row["total"]} for row in rows]
    assert [claim.holds for claim in labels.claims(steeper)] == [False, False, True, True, True]


def test_same_seed_same_rows() -> None:
    first, second = (REPRODUCTIONS["refinement"].simulate(3, lambda: None) for _ in range(2))
    assert first == second
