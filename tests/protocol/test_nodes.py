"""A node of the protocol: what it answers, what it refuses, and what its key binds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fpld import FrameError, InputError
from fpld.errors import ProtocolError
from fpld.protocol import Aggregator, Node, Task
from tests.protocol.test_machines import LOGITS, PROBE, settings, task


def test_a_node_answers_a_repeated_task_with_the_same_bytes() -> None:
    data = task().to_bytes()
    received = Task.from_bytes(data)
    node, frame = Node(0, PROBE).receive(received)
    assert frame is None
    again, nothing = node.receive(Task.from_bytes(data))  # still training: go on
    assert nothing is None
    node, sent = again.answer(received, LOGITS[0])
    # Other logits now, as after a repeated training: the first frame counts.
    node, frame = node.receive(Task.from_bytes(data))
    assert frame == sent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node": 1}, "for node 1, this is node 0"),
        ({"probe": bytes(32)}, "probe set"),
    ],
)
def test_a_node_refuses_a_task_that_is_not_its_own(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Node(0, PROBE).receive(task(**change))


def test_a_node_refuses_conflicting_past_and_premature_things() -> None:
    received = task()
    node, _ = Node(0, PROBE).receive(received)
    with pytest.raises(ProtocolError, match=r"second, different task \(for round 1, this node is in round 1\)"):
        node.receive(task(bits=100.0))
    node, _ = node.answer(received, LOGITS[0])
    with pytest.raises(ProtocolError, match="while answered"):
        node.answer(received, LOGITS[0])
    later, _ = node.receive(task(round=2))
    with pytest.raises(ProtocolError, match="for round 1, this node is in round 2"):
        later.receive(task())
    with pytest.raises(ProtocolError, match="while idle"):
        Node(0, PROBE).answer(received, LOGITS[0])
    with pytest.raises(InputError, match="shape"):
        later.answer(task(round=2), LOGITS[0, :3])
    with pytest.raises(ProtocolError, match="reconstruction that this node does not have"):
        node.receive(replace(task(round=3), against="own", base="ab" * 32))


def test_a_mac_binds_a_frame_to_its_node() -> None:
    keys = {0: b"key of north", 1: b"key of east", 2: b"key of south"}
    aggregator = Aggregator(settings(mac_keys=keys))
    tasks = aggregator.open("none", {})
    received = tasks[0]
    node, _ = Node(0, PROBE).receive(received)
    assert aggregator.frame(0, node.answer(received, LOGITS[0], key=b"another")[1]).verdict == "refused"
    assert aggregator.frame(0, node.answer(received, LOGITS[0], key=keys[0])[1]).verdict == "accepted"


def test_frame_errors_are_of_the_peer() -> None:
    assert not issubclass(FrameError, InputError)
