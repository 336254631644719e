"""Updates in the place of labels: both ends of a round, budgets to the byte, and frames that no node makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpld.codecs.updates import UPDATE_ERRORS, update_bytes
from fpld.errors import InputError, ProtocolError
from fpld.protocol import Aggregator, Budget, Node, Settings, Task
from fpld.protocol.states import AggregatorPhase
from fpld.protocol.updates import UPDATES, UPDATES_CODE, payload_bits, rebuild_weights, update_seed
from fpld.protocol.wire import OVERHEAD_BYTES, encode_frame
from fpld.types import Plan

RNG = np.random.default_rng(7)
STUDENT = {"embedding": RNG.normal(size=(40, 30)).astype(np.float32), "norm": np.ones(30, np.float32)}
TRAINED = [
    {name: (array + 0.1 * RNG.normal(size=array.shape)).astype(np.float32) for name, array in STUDENT.items()}
    for _ in range(2)
]
WEIGHTS = 1230
BITS = (2.0, 3.5)
KEYS = {0: b"north's key", 1: b"east's key"}


def settings(**changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "names": ["north", "east"],
        "run_key": bytes(range(16)),
        "probe": bytes(32),
        "contexts": WEIGHTS,
        "vocab": 40,
        "rounds": 2,
        "budget": Budget(np.array([payload_bits(WEIGHTS, bits) for bits in BITS]), np.zeros(2), 40),
        "clips": [None, None],
        "codec": UPDATES,
        "rule": "mixture",
        "quorum": 2,
        "mac_keys": KEYS,
    }
    return Settings(**{**fields, **changes})


class Scene(NamedTuple):
    aggregator: Aggregator
    tasks: dict[int, Task]


def opened(**changes: Any) -> Scene:
    aggregator = Aggregator(settings(**changes))
    return Scene(aggregator, aggregator.open("weights", STUDENT))


def answer(task: Task, trained: dict[str, np.ndarray]) -> bytes:
    node, frame = Node(task.plan.node, task.plan.probe).receive(task)
    assert frame is None
    return node.answer_update(task, trained, key=KEYS[task.plan.node])[1]


def test_a_round_of_updates() -> None:
    aggregator, tasks = opened()
    for node, task in tasks.items():
        carried = Task.from_bytes(task.to_bytes())  # as over a network
        assert carried.codec == UPDATES
        frame = answer(carried, TRAINED[node])
        assert len(frame) - OVERHEAD_BYTES <= task.plan.budget_bytes == update_bytes(WEIGHTS, BITS[node])
        assert aggregator.frame(node, frame).verdict == "accepted"
        assert aggregator.frame(node, frame).verdict == "duplicate"
    aggregator.close()
    payloads = aggregator.updates()
    assert list(payloads) == [0, 1]
    for node, payload in payloads.items():
        model = rebuild_weights(payload, STUDENT, aggregator.plan(node))
        missed = sum(np.square(model[name] - TRAINED[node][name]).sum() for name in STUDENT)
        square = sum(np.square(TRAINED[node][name] - STUDENT[name]).sum() for name in STUDENT)
        # Two bits each; at 3.5 the larger tensor has 3 and the smaller one more. Chunks of 256 vary by some 10 %.
        assert missed / square == pytest.approx(UPDATE_ERRORS[1 + node], rel=0.3)
    state = aggregator.end()
    assert state.round == 1
    assert Aggregator(settings(), state).round == 2


def test_a_node_answers_a_round_once() -> None:
    _, tasks = opened()
    node, _ = Node(0, bytes(32)).receive(tasks[0])
    node, frame = node.answer_update(tasks[0], TRAINED[0])
    assert node.receive(tasks[0])[1] == frame
    with pytest.raises(ProtocolError, match="answered once"):
        node.answer_update(tasks[0], TRAINED[1])


def test_what_a_node_refuses() -> None:
    _, tasks = opened()
    ready, _ = Node(0, bytes(32)).receive(tasks[0])
    for task in (replace(tasks[0], codec="samples"), replace(tasks[0], broadcast="none", arrays={})):
        with pytest.raises(ProtocolError, match="a task for an update"):
            ready.answer_update(task, TRAINED[0])
    plan = tasks[0].plan
    for wrong in (replace(plan, contexts=WEIGHTS + 1), replace(plan, bits=0.9)):
        with pytest.raises(ProtocolError, match="weights"):
            ready.answer_update(replace(tasks[0], plan=wrong), TRAINED[0])
    with pytest.raises(InputError, match="did training diverge"):
        ready.answer_update(tasks[0], {name: np.full_like(array, np.nan) for name, array in STUDENT.items()})


def test_hostile_frames_are_refused_with_the_reason() -> None:
    aggregator, tasks = opened()
    plan = tasks[0].plan
    good = answer(tasks[0], TRAINED[0])
    payload = good[OVERHEAD_BYTES - 16 : -16]

    def sealed(payload: bytes) -> bytes:
        return encode_frame(payload, plan, UPDATES_CODE, key=KEYS[0])

    assert sealed(payload) == good
    not_finite = payload[:12] + np.float32(np.nan).tobytes() + payload[16:]
    hostile = {
        "checksum": good[:-1] + bytes([good[-1] ^ 1]),
        "at most": good + bytes(8),
        "frame's codec": encode_frame(payload, plan, 5, key=KEYS[0]),
        "frame's node": answer(tasks[1], TRAINED[1])[: len(good)],
        "an update must have at least": sealed(b""),
        "bytes long": sealed(payload[:-1]),
        "must begin with": sealed(b"hit" + payload[3:]),
        "1 to 8 bits": sealed(payload[:3] + b"\x09" + payload[4:]),
        "scales of an update": sealed(not_finite),
        "blocks of the prior": b"FPAS" + bytes(24),
    }
    for reason, frame in hostile.items():
        receipt = aggregator.frame(0, frame)
        assert receipt.verdict == "refused"
        assert reason in receipt.reason
    assert aggregator.missing == [0, 1]
    rng = np.random.default_rng(0)
    for _ in range(2000):
        data = bytearray(payload)
        for place in rng.integers(0, 40 if rng.integers(2) else len(data), size=2):
            data[place] = rng.integers(256)
        fresh, _ = opened()
        assert fresh.frame(0, sealed(bytes(data))).verdict in ("accepted", "refused")
    assert aggregator.frame(0, good).verdict == "accepted"
    assert len(aggregator.receipts) == len(hostile) + 1


def test_what_a_caller_does_wrong_changes_nothing() -> None:
    aggregator = Aggregator(settings())
    with pytest.raises(InputError, match="1230 weights"):
        aggregator.open("weights", {"norm": STUDENT["norm"]})
    with pytest.raises(InputError, match="1230 weights"):
        aggregator.open("none", {})
    assert aggregator.phase is AggregatorPhase.READY
    labels = Aggregator(settings(codec="samples"))
    with pytest.raises(InputError, match="labels"):
        labels.updates()


@given(st.integers(1, 10**7), st.floats(1, 8))
def test_the_budget_of_a_plan_is_that_of_an_update(count: int, bits: float) -> None:
    plan = Plan(bytes(16), 1, 0, bytes(32), count, 16, payload_bits(count, bits))
    assert plan.budget_bytes == update_bytes(count, bits)


def test_the_seed_is_another_one_for_each_run_round_and_node() -> None:
    plan = opened().tasks[0].plan
    others = [replace(plan, round=2), replace(plan, node=1), replace(plan, run_key=bytes(16))]
    assert len({update_seed(each) for each in (plan, *others)}) == 4
    assert update_seed(replace(plan, bits=3.0)) == update_seed(plan)
