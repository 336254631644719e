"""Malicious updates and poisoned text on a tiny federation: both do harm, through the real payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import byzantine, poisoned
from benchmarks.attacks import TEXT_ATTACKS, TOKEN, UPDATE_ATTACKS, Trigger
from benchmarks.byzantine import Cell
from fpld.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.byzantine import Federation


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (poisoned, byzantine):
        monkeypatch.setattr(module, "STEPS", 60)
    monkeypatch.setattr(poisoned, "RATE", 0.02)
    monkeypatch.setattr(poisoned, "WRITTEN", 64)
    monkeypatch.setattr(poisoned, "POISONED_STEPS", 60)


def row(federation: Federation, folder: Path, rule: str, attack: str) -> dict[str, object]:
    return poisoned.measure(federation, folder, Cell("tiny", 0, 1, 2, attack, rule))


def test_malicious_updates_do_harm_and_are_in_the_bounds_of_what_can_be_coded(
    federation: Federation, folder: Path
) -> None:
    calm = row(federation, folder, "updates", "none")
    found = {name: row(federation, folder, "updates", name) for name in UPDATE_ATTACKS}
    base = federation.loss(federation.base)
    assert not calm["stopped"]
    assert float(str(calm["nats"])) < base - 0.05
    for name in ("flip", "tenfold"):
        assert float(str(found[name]["nats"])) > float(str(calm["nats"])) + 0.05
    # A student that is worse than the one before is not sent out: the run stops.
    assert found["tenfold"]["stopped"]
    assert found["tenfold"]["nats"] == base


def test_only_a_student_that_diverged_stops_the_run(
    federation: Federation, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poisoned, "UPDATE_BITS", 0.5)  # less than a bit per weight can be no update
    with pytest.raises(InputError, match="bit"):
        row(federation, folder, "updates", "none")


def test_a_table_without_a_column_of_the_key_is_refused() -> None:
    with pytest.raises(SystemExit, match="malicious"):
        Cell.of({"corpus": "sotu", "seed": "0", "rounds": "1", "attack": "none", "rule": "mixture"})


def test_poisoned_text_does_harm_and_its_nodes_keep_their_trust(federation: Federation, folder: Path) -> None:
    """Nobody else labels what a node writes: the audit sees its honest labels on public text alone."""
    calm = row(federation, folder, "written", "none")
    for name in TEXT_ATTACKS:
        found = row(federation, folder, "written", name)
        assert found["trust"] == calm["trust"]
        if name == "lma":
            assert float(str(found["nats"])) > float(str(calm["nats"])) + 0.005


def test_a_backdoor_is_put_after_every_trigger() -> None:
    text = np.array([1, 2, 3, 1, 2, 4, 1], np.int32)
    assert poisoned.with_backdoor(text, Trigger((2,))).tolist() == [1, 2, TOKEN, 1, 2, TOKEN, 1]
    assert poisoned.with_backdoor(text, Trigger((4, 1))).tolist() == text.tolist()
