"""The budget of a round: what is chosen by default, what is refused, and that what came from outside is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import BudgetError, InputError, registry
from fpld.budget import allocators
from fpld.budget.policy import Budget

if TYPE_CHECKING:
    from fpld.types import Floats

CAPS = np.array([300.0, 300.0, 90.0])
FLOORS = np.array([10.0, 10.0, 10.0])
WEIGHTS = np.array([1.0, 4.0, 16.0])


def budget(**changes: Any) -> Budget:
    return Budget(**{"caps": CAPS, "floors": FLOORS, "vocab": 20, "total": 300.0, "weights": WEIGHTS, **changes})


def test_without_a_total_everyone_sends_at_the_cap() -> None:
    assert budget(total=None).bits(1).tolist() == CAPS.tolist()
    assert budget(total=None).sharing == "every node sends at its limit"


def test_given_weights_are_used_from_the_first_round_by_the_optimal_allocator() -> None:
    expected = allocators.optimal(WEIGHTS, 300.0, 20, CAPS, FLOORS)
    assert budget().bits(1) == pytest.approx(expected)
    assert budget(allocator="uniform").bits(1) == pytest.approx([105.0, 105.0, 90.0])
    assert budget().sharing == "the total is shared out by the allocator 'optimal'"


@pytest.mark.parametrize("estimator", ["second-moment", "distortion", "curves"])
def test_an_estimator_begins_with_a_uniform_warmup(estimator: str) -> None:
    adaptive = budget(estimator=estimator, warmup=2)
    state = registry.estimators.get(estimator).start(3)
    for round in (1, 2, 3):  # in the third because nobody was heard
        assert adaptive.bits(round, state) == pytest.approx([105.0, 105.0, 90.0])
    assert adaptive.sharing.startswith("the total is shared out evenly until round 2, then by the")
    assert f"the estimator {estimator!r}" in adaptive.sharing


def test_estimated_weights_replace_those_given_and_curves_share_out_by_equal_slopes() -> None:
    found = np.array([4.0, 1.0, 1.0])
    adaptive = budget(estimator="distortion").bits(2, {"weights": found})
    assert adaptive == pytest.approx(allocators.optimal(found, 300.0, 20, CAPS, FLOORS))
    levels = np.array([0.0, 0.0, 1.0])
    rates = np.array([0.1, 0.2, 0.1])
    shared = budget(estimator="curves").bits(2, {"weights": found, "levels": levels, "rates": rates})
    assert shared == pytest.approx(allocators.equal_slopes(levels, rates, 300.0, CAPS, FLOORS))


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(InputError, match=r"allocator must be left out with the estimator 'curves'.*got 'uniform'"):
        budget(estimator="curves", allocator="uniform")
    with pytest.raises(InputError, match=r"forget must be 1 with the estimator 'distortion'.*got 0.5"):
        budget(estimator="distortion", forget=0.5)
    assert budget(estimator="second-moment", forget=0.5, allocator="uniform").forget == 0.5
    with pytest.raises(InputError, match="estimator must be one of curves, distortion, none, second-moment"):
        budget(estimator="guess")


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ([100.0, 200.0], "a number of bits for each of 3 nodes"),
        ([np.nan, 200.0, 50.0], "a number of bits for each of 3 nodes"),
        ([100.0, 100.0, 100.0], "keep node 2 between its floor 10 and its cap 90 bits per probe context, got 100"),
        ([250.0, 45.0, 5.0], "keep node 2 between its floor 10"),
        ([100.0, 100.0, 90.0], "share out the total of 300 bits, got a sum of 290"),
    ],
)
def test_an_allocator_from_outside_is_used_as_written_and_checked(
    bits: list[float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.allocators, "_loaded", dict(registry.allocators._loaded))
    registry.allocators.register("fixed", lambda *_: np.array(bits))
    with pytest.raises(BudgetError, match=message):
        budget(allocator="fixed").bits(1)


def test_an_allocator_is_given_caps_and_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.allocators, "_loaded", dict(registry.allocators._loaded))
    asked: list[tuple[Any, ...]] = []

    def at_floors(*arguments: Any) -> Floats:
        asked.append(arguments)
        return np.array([200.0, 50.0, 50.0])

    registry.allocators.register("at-floors", at_floors)  # type: ignore[arg-type]
    assert budget(allocator="at-floors").bits(1).tolist() == [200.0, 50.0, 50.0]
    weights, total, vocab, caps, floors = asked[0]
    assert (total, vocab) == (300.0, 20)
    for given, expected in ((weights, WEIGHTS), (caps, CAPS), (floors, FLOORS)):
        assert np.array_equal(given, expected)
