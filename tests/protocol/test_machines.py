"""Node and aggregator together, bytes in between: what is legal, what is refused, and that order does not matter."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fpld import FrameError, InputError, UniformCodec, encode, seal
from fpld.errors import ProtocolError, QuorumError
from fpld.paper import theory
from fpld.protocol import Aggregator, Budget, Node, Settings, Task
from fpld.protocol.aggregator import LEGAL, Phase
from fpld.protocol.wire import HEADER

K, M, V = 3, 12, 20
PROBE = bytes(range(32))
LOGITS = np.random.default_rng(0).normal(0, 2, (K, M, V)).astype(np.float32)


def settings(**changes: Any) -> Settings:
    budget = Budget(caps=np.array([120.0, 160.0, 200.0]), floors=np.full(K, 60.0), vocab=V)
    fields: dict[str, Any] = {
        "names": ["north", "east", "south"],
        "run_key": bytes(16),
        "probe": PROBE,
        "contexts": M,
        "vocab": V,
        "rounds": 2,
        "budget": budget,
        "clips": [None] * K,
        "quorum": K,
    }
    return Settings(**{**fields, **changes})


def answers(tasks: dict[int, Task], nodes: list[Node], logits: np.ndarray[Any, Any]) -> dict[int, bytes]:
    frames = {}
    for i, task in tasks.items():
        node, received, frame = nodes[i].receive(task.to_bytes())
        assert frame is None
        nodes[i], frames[i] = node.answer(received, logits[i])
    return frames


def fresh() -> list[Node]:
    return [Node(i, PROBE) for i in range(K)]


def collected(order: tuple[int, ...] = (0, 1, 2), **changes: Any) -> Aggregator:
    aggregator = Aggregator(settings(**changes))
    frames = answers(aggregator.open("none", {}), fresh(), LOGITS)
    for node in order:
        assert aggregator.frame(node, frames[node]).verdict == "accepted"
    return aggregator


def test_a_round_brings_the_mean_within_its_bounds() -> None:
    aggregator = collected()
    assert aggregator.close() == [0, 1, 2]
    combined = aggregator.combine()
    truth = LOGITS.mean(axis=0)
    error = combined.target - truth
    kl = theory.kl(truth, error).mean()
    assert combined.lower < kl < combined.upper * 1.3  # 240 coordinates: a sampling error of some 10 %
    assert aggregator.sent == {0: 180, 1: 240, 2: 300}
    assert not aggregator.distilled()


@pytest.mark.parametrize("rule", ["mean", "precision", "trimmed", "median", "mixture"])
def test_the_order_of_arrival_does_not_matter(rule: str) -> None:
    results = []
    for order in itertools.permutations(range(K)):
        aggregator = collected(order, rule=rule)
        aggregator.close()
        results.append(aggregator.combine().target.tobytes())
    assert len(set(results)) == 1


def test_legal_events_are_in_one_table_and_others_change_nothing() -> None:
    for phase in Phase:
        for event, call in (
            ("open", lambda a: a.open("none", {})),
            ("close", lambda a: a.close()),
            ("combine", lambda a: a.combine()),
            ("distilled", lambda a: a.distilled()),
        ):
            if (phase, event) in LEGAL:
                continue
            aggregator = collected()
            aggregator.phase = phase
            before = (aggregator.round, aggregator.sent, list(aggregator.receipts))
            with pytest.raises(ProtocolError, match=f"'{event}' is not possible while {phase.value}"):
                call(aggregator)
            assert (aggregator.phase, aggregator.round, aggregator.sent, aggregator.receipts) == (phase, *before)


def bad_frames() -> dict[str, tuple[int, bytes, str]]:
    """Frames that must be refused: over node 0's channel, with the reason."""
    other = Aggregator(settings(run_key=b"another run key!"))
    foreign = answers(other.open("none", {}), fresh(), LOGITS)
    mine = Aggregator(settings())
    frames = answers(mine.open("none", {}), fresh(), LOGITS)
    large = replace(next(iter(mine._plans.values())), bits=400.0)
    over = seal(encode(UniformCodec(), LOGITS[0], large), large, 1)
    altered = bytearray(frames[0])
    altered[HEADER.size + 5] ^= 1
    plan = mine._plans[0]
    noise = seal(b"\x00\x7e" * 90, plan, 1)  # right checksum, ranges that are not numbers
    return {
        "foreign run": (0, foreign[0], "run id"),
        "another node's": (1, frames[0], "node"),
        "over budget": (0, over, "budget"),
        "altered": (0, bytes(altered), "checksum"),
        "cut": (0, frames[0][:-1], "payload"),
        "malformed": (0, noise, "states a range that is not a finite"),
        "empty": (0, b"", "at least"),
        "unknown node": (7, frames[0], "unknown node 7"),
    }


@pytest.mark.parametrize("case", bad_frames())
def test_bad_frames_are_refused_recorded_and_change_nothing(case: str) -> None:
    node, data, reason = bad_frames()[case]
    clean = collected()
    clean.close()
    aggregator = Aggregator(settings())
    frames = answers(aggregator.open("none", {}), fresh(), LOGITS)
    receipt = aggregator.frame(node, data)
    assert (receipt.verdict, receipt.node, receipt.round) == ("refused", node, 1)
    assert reason in receipt.reason
    assert aggregator.receipts == [receipt]
    for i in range(K):
        aggregator.frame(i, frames[i])
    aggregator.close()
    assert np.array_equal(aggregator.combine().target, clean.combine().target)


def test_repeated_frames_count_once_and_conflicting_ones_are_refused() -> None:
    aggregator = Aggregator(settings())
    tasks = aggregator.open("none", {})
    frames = answers(tasks, fresh(), LOGITS)
    others = answers(tasks, fresh(), LOGITS + 1.5 * np.arange(V, dtype=np.float32))
    verdicts = [aggregator.frame(0, data).verdict for data in (frames[0], frames[0], others[0])]
    assert verdicts == ["accepted", "duplicate", "refused"]
    assert aggregator.sent == {0: 180}


def test_late_frames_are_refused() -> None:
    aggregator = Aggregator(settings(quorum=2))
    frames = answers(aggregator.open("none", {}), fresh(), LOGITS)
    aggregator.frame(0, frames[0])
    aggregator.frame(2, frames[2])
    assert aggregator.close() == [0, 2]
    assert "late" in aggregator.frame(1, frames[1]).reason
    two = aggregator.combine()
    assert two.nodes == [0, 2]
    assert two.target == pytest.approx(LOGITS[[0, 2]].mean(axis=0), abs=1.5)
    aggregator.distilled()
    aggregator.open("none", {})
    assert "round" in aggregator.frame(1, frames[1]).reason


def test_below_the_quorum_nothing_is_averaged_and_collecting_goes_on() -> None:
    aggregator = Aggregator(settings(quorum=2))
    frames = answers(aggregator.open("none", {}), fresh(), LOGITS)
    aggregator.frame(1, frames[1])
    with pytest.raises(QuorumError, match="1 of 3 nodes answered, the quorum is 2; missing: north, south"):
        aggregator.close()
    assert aggregator.frame(0, frames[0]).verdict == "accepted"
    assert aggregator.close() == [0, 1]
    with pytest.raises(InputError, match="quorum must be from 1 to the number of nodes, 3, got 4"):
        settings(quorum=4)


def test_refinement_halves_the_error_again_and_again_and_vanilla_does_not() -> None:
    errors: dict[str, list[float]] = {}
    for against in ("own", "nothing"):
        aggregator, nodes = Aggregator(settings(rounds=4, against=against)), fresh()
        for _ in range(4):
            for i, frame in answers(aggregator.open("none", {}), nodes, LOGITS).items():
                aggregator.frame(i, frame)
            aggregator.close()
            target = aggregator.combine().target
            centred = LOGITS - LOGITS.mean(axis=2, keepdims=True)
            errors.setdefault(against, []).append(float(np.square(target - centred.mean(axis=0)).mean()))
            aggregator.distilled()
    own, vanilla = errors["own"], errors["nothing"]
    assert all(after < before / 20 for before, after in itertools.pairwise(own))
    assert max(vanilla) < 3 * min(vanilla)


def test_stratified_dither_cancels_errors_of_nodes_that_agree() -> None:
    """K = 3 nodes with the same logits, bits and clip: a third of the error of independent dither, at no other cost."""
    logits = np.broadcast_to(np.random.default_rng(5).uniform(-2, 2, (1, 200, V)).astype(np.float32), (K, 200, V))
    budget = Budget(caps=np.full(K, 3.0 * V), floors=np.full(K, float(V)), vocab=V)
    centred = logits[0] - logits[0].mean(axis=1, keepdims=True)
    found = {}
    for stratified in (True, False):
        for answering in ((0, 1, 2), (0, 2)):
            aggregator = Aggregator(
                settings(budget=budget, contexts=200, clips=[4.0] * K, stratified=stratified, quorum=2)
            )
            frames = answers(aggregator.open("none", {}), fresh(), logits)
            for node in answering:
                assert aggregator.frame(node, frames[node]).verdict == "accepted"
            aggregator.close()
            error = aggregator.combine().target - centred
            assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size)  # also when a node drops out
            found[stratified, len(answering)] = float(np.square(error).mean())
    assert found[True, 3] * 3 == pytest.approx(found[False, 3], rel=0.1)
    assert found[True, 2] < found[False, 2]


def test_algorithm_2_is_uniform_at_first_then_follows_the_estimate() -> None:
    budget = Budget(
        caps=np.full(K, 400.0), floors=np.full(K, 20.0), vocab=V, total=300.0, estimator="distortion", warmup=1
    )
    aggregator, nodes = Aggregator(settings(rounds=3, budget=budget, clips=[2.0, 8.0, 8.0])), fresh()
    allotted = []
    for _ in range(3):
        frames = answers(aggregator.open("none", {}), nodes, LOGITS)
        allotted.append(aggregator.bits)
        for i, frame in frames.items():
            aggregator.frame(i, frame)
        aggregator.close()
        aggregator.combine()
        aggregator.distilled()
    assert allotted[0] == pytest.approx([100, 100, 100])
    # A clip four times as wide is worth two bits a coordinate.
    assert allotted[1][1] - allotted[1][0] == pytest.approx(2 * V, rel=0.1)
    assert sum(allotted[2]) == pytest.approx(300)


def test_a_checkpoint_restores_weights_reconstructions_and_receipts() -> None:
    budget = Budget(caps=np.full(K, 400.0), floors=np.full(K, 60.0), vocab=V, total=450.0, estimator="second-moment")
    one, nodes = Aggregator(settings(rounds=3, budget=budget, against="own")), fresh()
    other = Aggregator(settings(rounds=3, budget=budget, against="own"))
    targets = []
    saved = one.state()
    for t in range(3):
        frames = answers(one.open("none", {}), nodes, LOGITS)
        if t == 2:
            other.restore(*saved)
            assert other.receipts == one.receipts
            other.open("none", {})
            assert other.bits == one.bits
        for aggregator in (one, other) if t == 2 else (one,):
            for i, frame in frames.items():
                assert aggregator.frame(i, frame).verdict == "accepted"
            aggregator.close()
            targets.append(aggregator.combine().target)
            aggregator.distilled()
        saved = one.state()
    assert np.array_equal(targets[-1], targets[-2])
    assert other.phase is Phase.DONE
    other.phase = Phase.COLLECTING
    with pytest.raises(ProtocolError, match="between rounds"):
        other.state()


def task(**changes: Any) -> Task:
    plan = next(iter(Aggregator(settings()).open("none", {}).values())).plan
    return Task(replace(plan, **changes), "uniform")


def test_a_node_answers_a_repeated_task_with_the_same_bytes() -> None:
    data = task().to_bytes()
    node, received, frame = Node(0, PROBE).receive(data)
    assert frame is None
    again, _, nothing = node.receive(data)  # still training: go on
    assert nothing is None
    node, sent = again.answer(received, LOGITS[0])
    # Other logits now, as after a repeated training: the first frame counts.
    node, _, frame = node.receive(data)
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
        Node(0, PROBE).receive(task(**change).to_bytes())


def test_a_node_refuses_conflicting_past_and_premature_things() -> None:
    node, received, _ = Node(0, PROBE).receive(task().to_bytes())
    with pytest.raises(ProtocolError, match="second, different task for round 1"):
        node.receive(task(bits=100.0).to_bytes())
    node, _ = node.answer(received, LOGITS[0])
    with pytest.raises(ProtocolError, match="while answered"):
        node.answer(received, LOGITS[0])
    later, _, _ = node.receive(task(round=2).to_bytes())
    with pytest.raises(ProtocolError, match="for round 1, this node is in round 2"):
        later.receive(task().to_bytes())
    with pytest.raises(ProtocolError, match="while idle"):
        Node(0, PROBE).answer(received, LOGITS[0])
    with pytest.raises(InputError, match="shape"):
        later.answer(task(round=2), LOGITS[0, :3])
    with pytest.raises(ProtocolError, match="reconstruction that this node does not have"):
        node.receive(replace(task(round=3), against="own").to_bytes())


def test_a_mac_binds_a_frame_to_its_node() -> None:
    keys = {0: b"key of north", 1: b"key of east", 2: b"key of south"}
    aggregator = Aggregator(settings(mac_keys=keys))
    tasks = aggregator.open("none", {})
    node, received, _ = Node(0, PROBE).receive(tasks[0].to_bytes())
    assert aggregator.frame(0, node.answer(received, LOGITS[0], key=b"another")[1]).verdict == "refused"
    assert aggregator.frame(0, node.answer(received, LOGITS[0], key=keys[0])[1]).verdict == "accepted"


def test_frame_errors_are_of_the_peer() -> None:
    assert not issubclass(FrameError, InputError)
