"""How a reproduction reads its numbers; that every claim of the paper holds is said by `test_cli.py`."""

from __future__ import annotations

import pytest

from fpld.paper.reproduce import REPRODUCTIONS, fig2

pytestmark = pytest.mark.slow


def test_claims_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that says yes to everything would be worth nothing."""
    monkeypatch.setattr(fig2, "SEEDS", 10)
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


def test_same_seed_same_rows_and_every_step_is_told() -> None:
    reproduction = REPRODUCTIONS["refinement"]
    ticks: list[None] = []
    first, second = (reproduction.simulate(3, lambda: ticks.append(None)) for _ in range(2))
    assert first == second
    assert len(ticks) == 2 * reproduction.steps
