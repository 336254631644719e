"""Adaptive weights: the warm-up estimator, its streaming variant, and what the codec reports."""

from __future__ import annotations

import numpy as np
import pytest

from fpld import Decoded, InputError, Moments, Plan, UniformCodec, decode, distortion_weights, encode
from fpld.budget import allocators, estimators
from fpld.codecs import PredictiveCodec, make_prior
from fpld.paper import theory
from fpld.paper.theory import objective
from tests.helpers import make_plan

CLIPS = np.array([1.0, 4.0])


def test_warmup_is_the_papers_average() -> None:
    rng = np.random.default_rng(0)
    rounds = [{node: rng.normal(size=(7, 5)) for node in range(3)} for _ in range(4)]
    state = Moments.start(3)
    for decoded in rounds:
        state = state.update(decoded)
    expected = [np.mean([np.square(decoded[node]).mean() for decoded in rounds]) for node in range(3)]
    assert state.weights() == pytest.approx(expected)


def test_blocks_of_contexts_add_up_to_the_whole() -> None:
    values = np.random.default_rng(1).normal(size=(10, 5))
    whole = Moments.start(1).update({0: values})
    parts = Moments.start(1).update({0: values[:3]}).update({0: values[3:]})
    assert parts.weights() == pytest.approx(whole.weights())


def test_streaming_follows_a_drift_that_the_warmup_average_misses() -> None:
    """Node 1's logits grow eightfold; the allocation from the fading weights costs less than that from all."""
    rng = np.random.default_rng(2)
    steady, streaming = Moments.start(2), Moments.start(2, forget=0.5)
    for t in range(12):
        scale = (1.0, 0.5 if t < 6 else 4.0)
        decoded = {node: rng.normal(0, scale[node], (50, 20)) for node in range(2)}
        steady, streaming = steady.update(decoded), streaming.update(decoded)
    now = np.array([1.0, 16.0])
    cost = {
        name: objective(allocators.optimal(state.weights(), 80, 20), now, 20).total
        for name, state in (("steady", steady), ("streaming", streaming))
    }
    best = objective(allocators.optimal(now, 80, 20), now, 20).total
    assert cost["streaming"] < best * 1.02 < best * 1.04 < cost["steady"]


def test_a_silent_node_keeps_its_weight() -> None:
    state = Moments.start(2, forget=0.9).update({0: np.full(4, 2.0), 1: np.full(4, 3.0)})
    for _ in range(50):
        state = state.update({0: np.full(4, 2.0)})
    assert state.weights() == pytest.approx([4.0, 9.0])


def test_update_leaves_the_state_alone() -> None:
    state = Moments.start(1)
    state.update({0: np.ones(3)})
    assert state.count.tolist() == [0.0]


def test_codecs_report_gives_the_clip_weights_without_estimation() -> None:
    replies, bits = [], np.array([300.0, 450.0])
    for node in range(2):
        plan = make_plan(node=node, contexts=20, vocab=100, bits=bits[node], clip=float(CLIPS[node]))
        # Logits of the same size at both nodes: their second moments say nothing of the clips.
        values = np.random.default_rng(node).uniform(-1, 1, plan.shape)
        replies.append(decode(UniformCodec(), encode(UniformCodec(), values, plan), plan))
    weights = distortion_weights(replies, bits, 100)
    assert weights[1] / weights[0] == pytest.approx(16, rel=0.35)  # N/(N-1) differs at 3 and 4.5 bits
    assert Moments.start(2).update({i: r.values for i, r in enumerate(replies)}).weights()[1] < 1


@pytest.mark.parametrize("forget", [0.0, -1.0, 1.5, float("nan")])
def test_bad_forgetting_is_refused(forget: float) -> None:
    with pytest.raises(InputError, match="forget"):
        Moments.start(2, forget=forget)


def test_unheard_and_unknown_nodes_are_named() -> None:
    with pytest.raises(InputError, match="node 1 has sent nothing"):
        Moments.start(2).update({0: np.ones(3)}).weights()
    with pytest.raises(InputError, match="node must be an integer from 0 to 1"):
        Moments.start(2).update({2: np.ones(3)})
    with pytest.raises(InputError, match="bits must have 1 entries"):
        distortion_weights([Decoded(np.zeros(1), np.ones(1), np.zeros(1))], [1.0, 2.0], 4)


def test_a_loss_curve_foretells_what_other_budgets_lose() -> None:
    """Measured on what a node sent at one budget; against what it really loses at half and a quarter more."""
    rng = np.random.default_rng(3)
    common = -2.0 * np.log(np.argsort(rng.random((120, 256)), axis=1) + 1) + rng.normal(0, 1, (120, 256))
    logits, prior = common + rng.normal(0, 0.6, common.shape), make_prior(common)
    codec = PredictiveCodec()

    def sent(bits: float) -> tuple[Plan, Decoded]:
        plan = make_plan(contexts=120, vocab=256, bits=bits * 256, clip=None, prior=prior)
        return plan, decode(codec, encode(codec, logits, plan), plan)

    def lost(bits: float) -> float:
        return float(theory.kl(logits, sent(bits)[1].values - logits).mean())

    plan, decoded = sent(0.8)
    noise = float((theory.softmax(decoded.values) * decoded.variance).sum()) / 2 / 120
    level, rate = estimators.loss_curve(codec, plan, decoded.values, noise)
    for bits in (0.4, 0.8, 1.0):
        assert np.exp(level - rate * np.sqrt(bits * 256)) == pytest.approx(lost(bits), rel=0.35)


def test_agreement_is_told_from_difference() -> None:
    rng = np.random.default_rng(4)
    weights = np.full((50, 40), 1 / 40)
    same = rng.normal(0, 1, (50, 40))
    noise = np.full((4, 50, 40), 0.01)
    agree, differ = estimators.Agreement(), estimators.Agreement()
    agree.add(same + rng.normal(0, 0.1, (4, 50, 40)), noise, weights)
    differ.add(rng.normal(0, 1, (4, 50, 40)), noise, weights)
    assert agree.reached
    assert not differ.reached
    assert not estimators.Agreement().reached
