"""What a node claims of its logits is bounded: values, variances, and what share of the bits it gets for them."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.budget.policy import Budget
from fpld.codecs import decode, encode, make_prior
from fpld.codecs.base import MAX_LOGIT
from fpld.codecs.predictive.header import DITHER, MEASURED
from fpld.errors import FrameError, InputError
from fpld.numerics import kl
from fpld.protocol import Aggregator, Node, Settings, wire
from fpld.protocol.wire import CHECKSUM_BYTES, decode_frame, encode_frame
from fpld.registry import codecs
from fpld.rules import PRECISION, combine
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.codecs import ArrayPrior
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
    return np.where(np.arange(plan.contexts * plan.vocab).reshape(plan.shape) % 2, 16_000.0, -16_000.0)


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


@pytest.mark.parametrize(
    "pair", [(65504.0, 65504.0), (-65504.0, 0.0), (0.0, 40000.0), (30000.0, 30000.0), (0.0, 17000.0)]
)
def test_a_stated_range_beyond_the_largest_logit_is_refused(pair: tuple[float, float]) -> None:
    plan = make_plan(clip=None)
    codec = codecs.get("uniform")
    payload = bytearray(encode(codec, np.zeros(plan.shape), plan))
    payload[:4] = np.array(pair, "<f2").tobytes()
    with pytest.raises(FrameError, match="reaches beyond ±16384"):
        codec.reader(bytes(payload), plan).check()


@pytest.mark.parametrize("bits", [1.7, 3.0])
def test_no_range_that_is_taken_decodes_beyond_the_largest_logit(bits: float) -> None:
    """With two levels a step is the whole range, and dither takes a value up to half a step beyond it."""
    plan = make_plan(clip=None, bits=50 * bits)
    codec = codecs.get("uniform")
    payload = bytearray(encode(codec, np.zeros(plan.shape), plan))
    payload[: 4 * plan.contexts] = np.tile(np.array([0.0, 16384.0], "<f2"), plan.contexts).tobytes()
    payload[4 * plan.contexts :] = np.random.default_rng(0).bytes(len(payload) - 4 * plan.contexts)
    values = decode(codec, bytes(payload), plan).values
    assert 16384 < np.abs(values).max() <= MAX_LOGIT
    with pytest.raises(InputError, match="logits must lie within"):
        encode(codec, np.full(plan.shape, 16400.0), plan)


@pytest.mark.parametrize("codec", ["uniform", "predictive"])
def test_a_negative_zero_in_the_place_of_no_clip_is_refused(codec: str) -> None:
    plan = make_plan(clip=None, bits=300.0)
    code = codecs.get(codec).code
    frame = bytearray(encode_frame(encode(codecs.get(codec), np.zeros(plan.shape), plan), plan, code))
    clip = 72  # the field's offset: see fpld/protocol/wire.py
    assert struct.unpack_from("<d", frame, clip) == (0.0,)
    struct.pack_into("<d", frame, clip, -0.0)
    frame[-CHECKSUM_BYTES:] = wire._checksum(bytes(frame[:-CHECKSUM_BYTES]), b"")
    with pytest.raises(FrameError, match="negative zero"):
        decode_frame(bytes(frame), plan, code)


PREDICTIVE_HEADS = {
    "cells that dither has no use for": lambda head: head.__setitem__(0, head[0] | DITHER),
    "a variance of negative zero": lambda head: head.__setitem__(slice(10, 12), b"\x00\x80"),
}


@pytest.mark.parametrize("name", PREDICTIVE_HEADS)
def test_a_predictive_head_that_no_encoder_writes_is_refused(name: str) -> None:
    plan, payload = measured_payload(None)
    PREDICTIVE_HEADS[name](payload)
    with pytest.raises(FrameError):
        codecs.get("predictive").reader(bytes(payload), plan).check()


@pytest.mark.parametrize("against", ["nothing", "a prior"])
def test_cells_of_groups_without_coordinates_are_refused(against: str) -> None:
    """Nobody reads them, so they could hold anything: the same labels would have many right payloads."""
    prior = None if against == "nothing" else make_prior(np.zeros((30, 50)))
    plan, payload = measured_payload(prior)
    absent = 11
    groups = int.from_bytes(payload[3:5], "little")
    assert not groups >> absent
    payload[3:5] = (groups | 1 << absent).to_bytes(2, "little")
    at = 5 + 7 * groups.bit_count()
    payload[at:at] = b"\x01\x02\x03" + np.array([0.5, 0.25], "<f2").tobytes()
    with pytest.raises(FrameError, match="group"):
        codecs.get("predictive").reader(bytes(payload), plan).check()


def measured_payload(prior: ArrayPrior | None) -> tuple[Plan, bytearray]:
    """Return a payload with cells, in a plan with some bytes to spare."""
    plan = make_plan(contexts=30, clip=None, bits=150.0, prior=prior)
    codec = codecs.get("predictive")
    payload = bytearray(encode(codec, np.random.default_rng(0).normal(0, 2, plan.shape), plan))
    assert payload[0] & MEASURED
    codec.reader(bytes(payload), plan).check()
    return replace(plan, bits=plan.bits + 8), payload


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
