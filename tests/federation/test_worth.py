"""The held-out mean is over the same sites in every round, and says over which."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fpld.federation.engine import Heldout
from fpld.federation.worth import common_sites, measured, with_means

NAMES = ["north", "east", "south"]


def lines(*rounds: list[float | None]) -> list[dict[str, Any]]:
    return [measured(Heldout(losses, 2.0)) for losses in rounds]


def test_a_site_that_misses_a_round_leaves_the_mean_of_all() -> None:
    first = with_means(lines([3.0, 2.0, 1.0]), NAMES)
    assert (first[0]["heldout_loss"], first[0]["heldout_sites"]) == (2.0, NAMES)
    trace = with_means([*first, *lines([2.5, None, 0.5])], NAMES)
    assert [line["heldout_loss"] for line in trace] == [2.0, 1.5]  # both over north and south
    assert all(line["heldout_sites"] == ["north", "south"] for line in trace)
    trace = with_means([*trace, *lines([2.0, 0.1, 1.5])], NAMES)
    assert [line["heldout_loss"] for line in trace] == [2.0, 1.5, 1.75]
    assert trace[2]["heldout_bits_per_byte"] == pytest.approx(1.75 / math.log(2) / 2)
    assert trace[1]["heldout_by_node"] == [2.5, None, 0.5]


def test_a_round_that_nobody_evaluated_has_no_mean_and_takes_none_away() -> None:
    trace = with_means(lines([3.0, 2.0, 1.0], [None, None, None]), NAMES)
    assert [line["heldout_loss"] for line in trace] == [2.0, None]
    assert common_sites(lines([None, None])) == []
    alternating = with_means(lines([3.0, None], [None, 2.0]), NAMES)
    assert [line["heldout_loss"] for line in alternating] == [None, None]
