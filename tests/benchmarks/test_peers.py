"""The peers keep the contract of a codec, one row for each, and do what their papers say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.peers import peers
from benchmarks.peers.correlated import GROUP, CorrelatedCodec
from benchmarks.peers.eden import EdenCodec
from benchmarks.peers.softlabel import SoftLabelCodec
from benchmarks.peers.stochastic import StochasticCodec
from benchmarks.peers.topk import TopKCodec
from fpld import BudgetError, Codec, FrameError, InputError
from fpld.numerics import centre, kl
from tests.helpers import ADVERSARIAL, make_plan

PEERS = [pytest.param(codec, id=name) for name, codec in peers(4).items()]
UNBIASED = [
    pytest.param(StochasticCodec(), id="stochastic"),
    pytest.param(CorrelatedCodec(nodes=4), id="correlated"),
    pytest.param(EdenCodec(), id="eden"),
]
RICH = 17 * 50.0  # bits per context of 50 tokens: enough for every peer


def logits(shape: tuple[int, int], seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).uniform(-3, 3, shape).astype(np.float32)


@pytest.mark.parametrize("codec", PEERS)
def test_a_rich_budget_gives_the_distribution_back(codec: Codec) -> None:
    plan = make_plan(bits=RICH, clip=None)
    values = logits(plan.shape) + 20
    decoded, variance = codec.decode(codec.encode(values, plan), plan)
    assert decoded.dtype == np.float32
    assert decoded.shape == np.broadcast_shapes(decoded.shape, variance.shape) == plan.shape
    assert (variance >= 0).all()
    assert kl(values, decoded - values).max() < 0.02


@pytest.mark.parametrize("codec", PEERS)
def test_a_block_is_that_part_of_the_whole(codec: Codec) -> None:
    plan = make_plan(contexts=23, bits=RICH)
    payload = codec.encode(logits(plan.shape), plan)
    values, variance = codec.decode(payload, plan)
    for start in range(23):
        part = codec.decode(payload, plan, rows=range(start, min(start + 4, 23)))
        assert np.allclose(part.values, values[start : start + 4], atol=1e-6)
        assert np.allclose(part.variance, variance[start : start + 4], atol=1e-6)


@pytest.mark.parametrize("codec", PEERS)
def test_the_least_budget_works_and_less_is_refused(codec: Codec) -> None:
    plan = make_plan()
    plan = replace(plan, bits=codec.least_bits(plan))
    values = logits(plan.shape)
    assert codec.decode(codec.encode(values, plan), plan).values.shape == plan.shape
    with pytest.raises(BudgetError, match="bits must be at least"):
        codec.encode(values, replace(plan, bits=plan.bits * 0.8))


@pytest.mark.parametrize("codec", PEERS)
def test_wrong_input_and_payloads_of_another_length_are_refused(codec: Codec) -> None:
    plan = make_plan(bits=RICH)
    values = logits(plan.shape)
    payload = codec.encode(values, plan)
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(FrameError, match="payload"):
            codec.decode(wrong, plan)
    with pytest.raises(InputError, match="shape"):
        codec.encode(values.T, plan)
    with pytest.raises(InputError, match="within"):
        codec.encode(values * 1e6, plan)
    values[4, 17] = np.nan
    with pytest.raises(InputError, match="context 4, token 17"):
        codec.encode(values, plan)


@pytest.mark.parametrize("codec", PEERS)
@settings(max_examples=40)
@given(st.data())
def test_hostile_payloads_give_an_error_or_finite_values(codec: Codec, data: st.DataObject) -> None:
    plan = make_plan(contexts=2, bits=RICH)
    payload = bytearray(codec.encode(logits(plan.shape), plan))
    for _ in range(data.draw(st.integers(1, 30))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        values, variance = codec.decode(bytes(payload), plan)
    except FrameError:
        return
    assert np.isfinite(values).all()
    assert (variance >= 0).all()


@pytest.mark.parametrize("codec", PEERS)
@settings(max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(2, 300),
    st.floats(1, 20),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.integers(0, 2**32 - 1),
)
def test_no_budget_is_exceeded(codec: Codec, contexts: int, vocab: int, rate: float, kind: str, seed: int) -> None:
    plan = make_plan(contexts=contexts, vocab=vocab, bits=2.0)
    plan = replace(plan, bits=codec.least_bits(plan) * rate)
    payload = codec.encode(ADVERSARIAL[kind](np.random.default_rng(seed), plan.shape), plan)
    assert len(payload) <= plan.budget_bytes
    decoded = codec.decode(payload, plan)
    assert np.isfinite(decoded.values).all()
    assert np.isfinite(decoded.variance).all()


@pytest.mark.parametrize("codec", UNBIASED)
@pytest.mark.parametrize("rate", [1.7, 4.0])
def test_the_error_is_zero_on_average(codec: Codec, rate: float) -> None:
    """A mean of 4000 draws for each of 256 tokens over its standard error; false-alarm rate 1e-4 for all together."""
    plan = make_plan(contexts=4000, vocab=256, bits=16 + rate * 256)
    row = np.random.default_rng(3).normal(size=(1, 256)).astype(np.float32)
    values = np.repeat(row, plan.contexts, axis=0)
    error = centre(codec.decode(codec.encode(values, plan), plan, dtype=np.float64).values - centre(values))
    z = error.mean(axis=0) / (error.std(axis=0) / np.sqrt(plan.contexts))
    assert np.abs(z).max() < stats.norm.isf(1e-4 / 256 / 2)


@pytest.mark.parametrize("codec", UNBIASED)
def test_the_reported_variance_is_the_measured_one(codec: Codec) -> None:
    plan = make_plan(contexts=400, vocab=256, bits=16 + 4 * 256)
    values = logits(plan.shape)
    decoded, variance = codec.decode(codec.encode(values, plan), plan, dtype=np.float64)
    error = centre(decoded - centre(values.astype(np.float64)))
    assert np.square(error).mean() == pytest.approx(variance.mean(), rel=0.03)


def test_eden_has_the_error_that_its_authors_code_has() -> None:
    """NMSE times K on log-normal vectors, d = 2^17, K = 10; the authors' code gives these four."""
    vectors = centre(np.random.default_rng(0).lognormal(size=(10, 1, 2**17)).astype(np.float32))
    square = np.square(vectors).sum(axis=-1).mean()
    for bits, authors in {1: 0.568, 2: 0.133, 3: 0.0357, 4: 0.0096}.items():
        error = np.zeros((1, 2**17))
        for node, vector in enumerate(vectors):
            plan = make_plan(contexts=1, vocab=2**17, bits=bits * 2**17 + 16, node=node)
            error += EdenCodec().decode(EdenCodec().encode(vector, plan), plan).values - vector
        assert np.square(error / 10).sum() / square * 10 == pytest.approx(authors, rel=0.05)


def test_correlated_errors_cancel_between_nodes_that_agree() -> None:
    """Four equal nodes at one bit: independent draws divide the variance by 4, stratified ones by 12 or more."""
    values = logits((200, 256))
    mean_square = []
    for codec in (StochasticCodec(), CorrelatedCodec(nodes=4)):
        plans = [make_plan(contexts=200, vocab=256, bits=256 + 16, node=node) for node in range(4)]
        mean = sum(codec.decode(codec.encode(values, plan), plan).values for plan in plans) / 4
        mean_square.append(float(np.square(centre(mean - values)).mean()))
    assert mean_square[1] < mean_square[0] / 3


def test_correlated_takes_more_nodes_than_one_permutation() -> None:
    codec = CorrelatedCodec(nodes=GROUP + 3)
    plan = make_plan(bits=RICH, node=GROUP + 2)
    values = logits(plan.shape)
    decoded = codec.decode(codec.encode(values, plan), plan).values
    assert np.abs(centre(decoded - values)).max() < 1e-3


def test_topk_keeps_the_largest_and_the_mass_of_the_others() -> None:
    plan = make_plan(bits=8 * 16.0)
    values = logits(plan.shape)
    decoded = TopKCodec().decode(TopKCodec().encode(values, plan), plan, dtype=np.float64).values
    assert (decoded > decoded.min(axis=1, keepdims=True)).sum(axis=1).tolist() == [5] * 6
    assert (decoded.argmax(axis=1) == values.argmax(axis=1)).all()
    shifted = values - values.max(axis=1, keepdims=True)
    assert np.exp(decoded).sum(axis=1) == pytest.approx(np.exp(shifted).sum(axis=1), rel=2e-3)


def test_soft_labels_at_the_least_budget_name_the_most_likely_token() -> None:
    plan = make_plan()
    plan = replace(plan, bits=SoftLabelCodec().least_bits(plan))
    values = logits(plan.shape)
    decoded = SoftLabelCodec().decode(SoftLabelCodec().encode(values, plan), plan).values
    assert (decoded.argmax(axis=1) == values.argmax(axis=1)).all()
