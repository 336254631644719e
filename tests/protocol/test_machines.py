"""Node and aggregator together, bytes in between: what is legal, what is refused, and that order does not matter."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from fpld import InputError, encode, encode_frame
from fpld.codecs import UniformCodec
from fpld.errors import ProtocolError, QuorumError
from fpld.paper import theory
from fpld.protocol import Aggregator, Budget, Node, Settings, Task
from fpld.protocol.aggregator import blank_state
from fpld.protocol.states import AGGREGATOR, NODE, AggregatorEvent, AggregatorPhase, NodeEvent, NodePhase
from fpld.protocol.wire import HEADER

K = 3
M = 12
V = 20
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
        node, frame = nodes[i].receive(task)
        assert frame is None
        nodes[i], frames[i] = node.answer(task, logits[i])
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
    """With 2000 contexts the bounds are 40 and 12 standard errors away: one false alarm in 1e30 draws."""
    contexts = 2000
    logits = np.random.default_rng(0).normal(0, 2, (K, contexts, V)).astype(np.float32)
    aggregator = Aggregator(settings(contexts=contexts))
    for node, frame in answers(aggregator.open("none", {}), fresh(), logits).items():
        assert aggregator.frame(node, frame).verdict == "accepted"
    assert aggregator.close() == [0, 1, 2]
    combined = aggregator.combine()
    truth = logits.mean(axis=0)
    assert combined.lower < theory.kl(truth, combined.target.array - truth).mean() < combined.upper
    assert aggregator.sent == {node: contexts * size // 8 for node, size in enumerate((120, 160, 200))}
    assert aggregator.end().round == 1


@pytest.mark.parametrize("rule", ["mean", "precision", "trimmed", "median", "mixture", "geometric", "guarded"])
def test_the_order_of_arrival_does_not_matter(rule: str) -> None:
    results = []
    for order in itertools.permutations(range(K)):
        aggregator = collected(order, rule=rule)
        aggregator.close()
        results.append(aggregator.combine().target.array.tobytes())
    assert len(set(results)) == 1


def aggregator_in(phase: AggregatorPhase) -> Aggregator:
    """Return an aggregator that was brought into a phase by its events."""
    if phase is AggregatorPhase.READY:
        return Aggregator(settings())
    aggregator = collected()
    if phase is AggregatorPhase.COLLECTING:
        return aggregator
    aggregator.close()
    if phase is AggregatorPhase.CLOSED:
        return aggregator
    aggregator.combine()
    if phase is AggregatorPhase.ENDED:
        aggregator.end()
    return aggregator


def happen(aggregator: Aggregator, event: AggregatorEvent) -> object:
    """Apply an event; for a frame return why it was refused."""
    if event is AggregatorEvent.OPEN:
        return aggregator.open("none", {})
    if event is AggregatorEvent.FRAME:
        return aggregator.frame(0, b"").reason
    if event is AggregatorEvent.CLOSE:
        return aggregator.close()
    if event is AggregatorEvent.COMBINE:
        return aggregator.combine()
    return aggregator.end()


def seen(aggregator: Aggregator) -> object:
    """Return what a refused event must not change."""
    return aggregator.phase, aggregator.round, aggregator.sent, aggregator.bits, aggregator.missing


@pytest.mark.parametrize("event", AggregatorEvent)
@pytest.mark.parametrize("phase", AggregatorPhase)
def test_every_cell_of_the_aggregators_table(phase: AggregatorPhase, event: AggregatorEvent) -> None:
    cell = AGGREGATOR[phase][event]
    aggregator = aggregator_in(phase)
    before = seen(aggregator)
    if isinstance(cell, AggregatorPhase):
        happen(aggregator, event)
        assert aggregator.phase is cell
    elif event is AggregatorEvent.FRAME:
        assert happen(aggregator, event) == cell
        assert cell.startswith("late: ")
        assert seen(aggregator) == before
    else:
        with pytest.raises(ProtocolError, match=f"is not possible while {phase.value}: {cell}$"):
            happen(aggregator, event)
        assert seen(aggregator) == before


def node_in(phase: NodePhase) -> Node:
    """Return a node that was brought into a phase by its events; its round is 2 once it has a task."""
    if phase is NodePhase.IDLE:
        return Node(0, PROBE)
    received = task(round=2)
    node, _ = Node(0, PROBE).receive(received)
    return node if phase is NodePhase.TRAINING else node.answer(received, LOGITS[0])[0]


def happen_to(node: Node, event: NodeEvent) -> Node:
    tasks = {
        NodeEvent.TASK: task(round=3),
        NodeEvent.SAME_TASK: task(round=2),
        NodeEvent.OTHER_TASK: task(round=2, bits=100.0),
        NodeEvent.PAST_TASK: task(round=1),
    }
    if event in tasks:
        return node.receive(tasks[event])[0]
    if event is NodeEvent.RESTORE:
        return node.restore(4, "a digest", b"a frame", None)
    return node.answer(task(round=2 if event is NodeEvent.LOGITS else 1), LOGITS[0])[0]


@pytest.mark.parametrize("event", NodeEvent)
@pytest.mark.parametrize("phase", NodePhase)
def test_every_cell_of_the_nodes_table(phase: NodePhase, event: NodeEvent) -> None:
    cell = NODE[phase][event]
    node = node_in(phase)
    before = asdict(node)
    if isinstance(cell, NodePhase):
        assert happen_to(node, event).phase is cell
    elif phase is NodePhase.IDLE and event in (NodeEvent.SAME_TASK, NodeEvent.OTHER_TASK, NodeEvent.PAST_TASK):
        # Before the first task every task is a new one: these cells are out of reach, whatever comes.
        assert happen_to(node, event).phase is NodePhase.TRAINING
    else:
        with pytest.raises(ProtocolError, match=f"is not possible while {phase.value}: {cell}$"):
            happen_to(node, event)
    assert asdict(node) == before


def test_a_phase_cannot_be_set_from_outside() -> None:
    with pytest.raises(AttributeError):
        Aggregator(settings()).phase = AggregatorPhase.ENDED  # type: ignore[misc]
    with pytest.raises(TypeError):
        Node(0, PROBE, phase=NodePhase.ANSWERED)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="phase"):
        replace(Node(0, PROBE), phase=NodePhase.ANSWERED)


def bad_frames() -> dict[str, tuple[int, bytes, str]]:
    """Frames that must be refused: over node 0's channel, with the reason."""
    other = Aggregator(settings(run_key=b"another run key!"))
    foreign = answers(other.open("none", {}), fresh(), LOGITS)
    mine = Aggregator(settings())
    frames = answers(mine.open("none", {}), fresh(), LOGITS)
    large = replace(next(iter(mine._plans.values())), bits=400.0)
    over = encode_frame(encode(UniformCodec(), LOGITS[0], large), large, 1)
    altered = bytearray(frames[0])
    altered[HEADER.size + 5] ^= 1
    plan = mine._plans[0]
    noise = encode_frame(b"\x00\x7e" * 90, plan, 1)  # right checksum, ranges that are not numbers
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
    assert np.array_equal(aggregator.combine().target.array, clean.combine().target.array)


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
    # Node 0 has at least 16 symbols for a coordinate, node 2 at least 256: no error is above half a step.
    centred = LOGITS[[0, 2]] - LOGITS[[0, 2]].mean(axis=2, keepdims=True)
    step = np.ptp(centred, axis=2) / np.array([[15], [255]])
    assert (np.abs(two.target.array - centred.mean(axis=0)) <= 1.01 * step.mean(axis=0)[:, None] / 2).all()
    aggregator = Aggregator(settings(quorum=2), aggregator.end())
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


def test_refinement_shrinks_the_error_again_and_again_and_vanilla_does_not() -> None:
    """With at least 16 symbols a round divides the step by 15 and the squared error by 225.

    Its mean over 240 coordinates has a standard error of 6.5 %, a ratio of two 9 %. The thresholds are 4.5 standard
    errors away: one false alarm in 25 000 draws.
    """
    errors: dict[str, list[float]] = {}
    for against in ("own", "nothing"):
        state = None
        nodes = fresh()
        for _ in range(4):
            aggregator = Aggregator(settings(rounds=4, against=against), state)
            for i, frame in answers(aggregator.open("none", {}), nodes, LOGITS).items():
                aggregator.frame(i, frame)
            aggregator.close()
            target = aggregator.combine().target.array
            centred = LOGITS - LOGITS.mean(axis=2, keepdims=True)
            errors.setdefault(against, []).append(float(np.square(target - centred.mean(axis=0)).mean()))
            state = aggregator.end()
    own = errors["own"]
    vanilla = errors["nothing"]
    assert all(after < before / (225 * (1 - 4.5 * 0.09)) for before, after in itertools.pairwise(own))
    assert max(vanilla) / min(vanilla) < (1 + 4.5 * 0.065) / (1 - 4.5 * 0.065)


def test_stratified_dither_cancels_errors_of_nodes_that_agree() -> None:
    """K = 3 nodes with the same logits, bits and clip: a third of the error of independent dither, at no other cost.

    A mean of squares over 4000 coordinates has a standard error of sqrt((kurtosis - 1) / 4000): 2 % for the mean of
    three uniform errors, 1.4 % for the stratified one, 2.45 % for their ratio. Means are tested at 4 standard errors,
    the ratio at 4.1: one false alarm in 3000 draws.
    """
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
            error = aggregator.combine().target.array - centred
            assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size)  # also when a node drops out
            found[stratified, len(answering)] = float(np.square(error).mean())
    assert found[True, 3] * 3 == pytest.approx(found[False, 3], rel=4.1 * 0.0245)
    assert found[True, 2] < found[False, 2]


def test_algorithm_2_is_uniform_at_first_then_follows_the_estimate() -> None:
    budget = Budget(
        caps=np.full(K, 400.0), floors=np.full(K, 20.0), vocab=V, total=300.0, estimator="distortion", warmup=1
    )
    state = None
    nodes = fresh()
    allotted = []
    for _ in range(3):
        aggregator = Aggregator(settings(rounds=3, budget=budget, clips=[2.0, 8.0, 8.0]), state)
        frames = answers(aggregator.open("none", {}), nodes, LOGITS)
        allotted.append(aggregator.bits)
        for i, frame in frames.items():
            aggregator.frame(i, frame)
        aggregator.close()
        aggregator.combine()
        state = aggregator.end()
    assert allotted[0] == pytest.approx([100, 100, 100])
    # A clip four times as wide has four times the step: exactly two bits a coordinate.
    assert allotted[1][1] - allotted[1][0] == pytest.approx(2 * V)
    assert sum(allotted[2]) == pytest.approx(300)


def test_the_next_aggregator_has_weights_and_reconstructions_from_the_state_alone() -> None:
    budget = Budget(caps=np.full(K, 400.0), floors=np.full(K, 60.0), vocab=V, total=450.0, estimator="second-moment")
    chosen = settings(rounds=3, budget=budget, against="own")
    nodes = fresh()
    state = blank_state(chosen)
    for _ in range(3):
        before = {name: array.tobytes() for name, array in state.arrays.items()}
        pair = (Aggregator(chosen, state), Aggregator(chosen, state))
        opened = [aggregator.open("none", {}) for aggregator in pair]
        assert pair[0].bits == pair[1].bits
        frames = answers(opened[0], nodes, LOGITS)
        targets = []
        for aggregator in pair:
            for i, frame in frames.items():
                assert aggregator.frame(i, frame).verdict == "accepted"
            aggregator.close()
            targets.append(aggregator.combine().target.array)
        assert np.array_equal(targets[0], targets[1])
        assert {name: array.tobytes() for name, array in state.arrays.items()} == before
        state = pair[1].end()
    with pytest.raises(ProtocolError, match="all 3 rounds are over"):
        Aggregator(chosen, state)


def task(**changes: Any) -> Task:
    plan = next(iter(Aggregator(settings()).open("none", {}).values())).plan
    return Task(replace(plan, **changes), "uniform")
