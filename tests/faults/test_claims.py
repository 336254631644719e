"""What a node claims of its logits is bounded: values, variances, and what share of the bits it gets for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.budget.policy import Budget
from fpld.codecs import decode, encode
from fpld.errors import FrameError, InputError
from fpld.numerics import kl
from fpld.protocol import Aggregator, Node, Settings
from fpld.registry import codecs
from fpld.rules import PRECISION, combine
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.types import Plan

NODES = 8
CONTEXTS = 24
VOCAB = 32
TOTAL = 26.0
PROBE = bytes(32)


def flat(plan: Plan) -> np.ndarray[Any, Any]:
    """No range, no noise: a variance of zero."""
    return np.zeros(plan.shape)


def wide(plan: Plan) -> np.ndarray[Any, Any]:
    """The widest range that a frame may state."""
    return np.where(np.arange(plan.contexts * plan.vocab).reshape(plan.shape) % 2, 32_000.0, -32_000.0)


def peaked(plan: Plan) -> np.ndarray[Any, Any]:
    """Everything on one token."""
    return np.eye(plan.contexts, plan.vocab) * 80.0


def federation(estimator: str, attack: Any, codec: str = "uniform", rule: str = "mean") -> list[list[float]]:
    """Run three rounds with one attacker of eight; return the bits of each."""
    budget = Budget(
        caps=np.full(NODES, 12.0 * VOCAB),
        floors=np.full(NODES, 2.4 * VOCAB),
        vocab=VOCAB,
        total=TOTAL * VOCAB,
        estimator=estimator,
    )
    names = [f"n{i}" for i in range(NODES)]
    fixed: dict[str, Any] = {"run_key": bytes(16), "probe": PROBE, "contexts": CONTEXTS, "vocab": VOCAB, "rounds": 3}
    settings = Settings(names=names, budget=budget, clips=[None] * NODES, codec=codec, rule=rule, **fixed)
    state = None
    bits = []
    logits = np.random.default_rng(0).normal(0, 2, (NODES, CONTEXTS, VOCAB)).astype(np.float32)
    for _ in range(3):
        aggregator = Aggregator(settings, state)
        tasks = aggregator.open("none", {})
        bits.append([each / VOCAB for each in aggregator.bits])
        for node, task in tasks.items():
            sender = Node(node, PROBE).receive(task)[0]
            frame = sender.answer(task, attack(task.plan) if node == 0 else logits[node])[1]
            assert aggregator.frame(node, frame).verdict == "accepted"
        aggregator.close()
        assert np.isfinite(aggregator.combine().target.array).all()
        state = aggregator.end()
    return bits


@pytest.mark.parametrize("codec", ["uniform", "predictive"])
@pytest.mark.parametrize("attack", [flat, wide, peaked])
@pytest.mark.parametrize("estimator", ["distortion", "curves", "second-moment"])
def test_no_claim_breaks_the_next_round_or_takes_more_than_twice_an_even_share(
    estimator: str, attack: Callable[[Plan], np.ndarray[Any, Any]], codec: str
) -> None:
    for bits in federation(estimator, attack, codec):
        assert sum(bits) == pytest.approx(TOTAL)
        assert bits[0] <= 2 * TOTAL / NODES + 1e-6
        assert min(bits) >= 2.4 - 1e-6


def test_weights_of_the_configuration_are_not_capped() -> None:
    """The operator's own weights are no claim of a node."""
    budget = Budget(
        caps=np.full(4, 400.0), floors=np.zeros(4), vocab=32, total=400.0, weights=np.array([1.0, 1.0, 1.0, 1e6])
    )
    assert budget.bits(1)[3] > 2 * 100.0


@pytest.mark.parametrize("pair", [(65504.0, 65504.0), (-65504.0, 0.0), (0.0, 40000.0), (30000.0, 30000.0)])
def test_a_stated_range_beyond_the_largest_logit_is_refused(pair: tuple[float, float]) -> None:
    plan = make_plan(clip=None)
    codec = codecs.get("uniform")
    payload = bytearray(encode(codec, np.zeros(plan.shape), plan))
    payload[:4] = np.array(pair, "<f2").tobytes()
    with pytest.raises(FrameError, match="reaches beyond ±32768"):
        codec.reader(bytes(payload), plan).check()


def test_float32_logits_beyond_the_largest_are_refused_at_both_ends() -> None:
    plan = make_plan(clip=None, bits=32.0 * 50)
    codec = codecs.get("float32")
    logits = np.zeros(plan.shape, "<f4")
    for value in (3.4e38, 133_715.0, -32_769.0, np.inf, np.nan):
        logits[2, 3] = value
        with pytest.raises(FrameError, match="not within ±32768"):
            codec.reader(logits.tobytes(), plan).check()
        with pytest.raises(InputError, match="logits must"):
            encode(codec, logits, plan)


def test_one_node_of_eight_that_claims_certainty_does_not_take_everything() -> None:
    """With `precision` and the predictive codec: one-hot logits, whose stated variance is next to nothing."""
    plan = make_plan(clip=None, contexts=8, bits=150.0)
    codec = codecs.get("predictive")
    rng = np.random.default_rng(5)
    honest = rng.normal(0, 1, (8, 50))

    replies = [
        decode(codec, encode(codec, honest + rng.normal(0, 0.1, (8, 50)), plan), plan, dtype=np.float64)
        for _ in range(7)
    ]
    evil = decode(codec, encode(codec, np.eye(8, 50) * 50.0, plan), plan, dtype=np.float64)
    alone = combine(PRECISION, replies)
    with_evil = combine(PRECISION, [evil, *replies])
    as_mean = sum((reply.values for reply in replies), evil.values) / 8
    # Little more than what it can do to the mean, where it takes 46 nats if its word counts.
    assert kl(alone, with_evil - alone).mean() < 1.5 * kl(alone, as_mean - alone).mean()
