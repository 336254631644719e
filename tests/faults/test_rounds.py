"""Nodes that drop out, and clocks that jump: what is combined is the accepted set, and deadlines are kept."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fpld.budget.policy import Budget
from fpld.engines.flower.exchange import exchange
from fpld.errors import QuorumError
from fpld.protocol import Aggregator, Node, Settings

PROBE = bytes(32)
LOGITS = np.random.default_rng(0).normal(0, 1, (3, 5, 20)).astype(np.float32)


def collecting(quorum: int) -> tuple[Aggregator, dict[int, bytes]]:
    """An aggregator in round 1, and the frames of its three nodes."""
    budget = Budget(caps=np.full(3, 640.0), floors=np.zeros(3), vocab=20)
    fixed: dict[str, Any] = {"run_key": bytes(16), "probe": PROBE, "contexts": 5, "vocab": 20, "rounds": 2}
    names = ["north", "east", "south"]
    aggregator = Aggregator(
        Settings(names=names, budget=budget, clips=[None] * 3, codec="float32", quorum=quorum, **fixed)
    )
    frames = {}
    for number, task in aggregator.open("none", {}).items():
        node, _ = Node(number, PROBE).receive(task)
        frames[number] = node.answer(task, LOGITS[number])[1]
    return aggregator, frames


def test_the_divisor_is_the_accepted_set_and_who_dropped_after_acceptance_counts() -> None:
    aggregator, frames = collecting(quorum=2)
    for number in (2, 0):  # both are gone after this
        assert aggregator.frame(number, frames[number]).verdict == "accepted"
    assert aggregator.missing == [1]
    aggregator.close()
    combined = aggregator.combine()
    centred = LOGITS - LOGITS.mean(axis=-1, keepdims=True)
    assert combined.nodes == [0, 2]
    assert np.allclose(combined.target.array, (centred[0] + centred[2]) / 2, atol=1e-6)


def test_a_late_frame_changes_nothing() -> None:
    found = []
    for late in (False, True):
        aggregator, frames = collecting(quorum=2)
        for number in (0, 1):
            aggregator.frame(number, frames[number])
        aggregator.close()
        if late:
            assert aggregator.frame(2, frames[2]).reason.startswith("late")
        found.append(aggregator.combine().target.array.tobytes())
    assert found[0] == found[1]


def test_below_the_quorum_nothing_is_combined() -> None:
    aggregator, frames = collecting(quorum=3)
    aggregator.frame(0, frames[0])
    with pytest.raises(QuorumError, match="1 of 3 nodes answered, the quorum is 3; missing: east, south"):
        aggregator.close()


class QuietGrid:
    """A Grid on which nobody answers."""

    def push_messages(self, messages: Any) -> list[str]:
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, _identities: Any) -> list[Any]:
        return []


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_clock_that_jumps_neither_ends_nor_holds_up_a_round(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    begun = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    asked: Any = SimpleNamespace(metadata=SimpleNamespace(message_id="1", dst_node_id=1))
    assert list(exchange(QuietGrid(), [asked], 1.0, [100])) == []  # type: ignore[arg-type]
    assert 0.9 < time.monotonic() - begun < 10
