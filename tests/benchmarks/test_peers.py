"""The peers do what their papers say; that they keep the contract of a codec is in test_codecs.py."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy import stats

from benchmarks.peers import peers
from benchmarks.peers.correlated import GROUP, CorrelatedCodec
from benchmarks.peers.eden import EdenCodec
from benchmarks.peers.softlabel import SoftLabelCodec
from benchmarks.peers.stochastic import StochasticCodec
from benchmarks.peers.topk import TopKCodec
from fpld import InputError, decode, encode
from fpld.numerics import centre
from tests.helpers import make_plan

if TYPE_CHECKING:
    from fpld.codecs import Codec

UNBIASED = [
    pytest.param(StochasticCodec(), id="stochastic"),
    pytest.param(CorrelatedCodec(nodes=4), id="correlated"),
    pytest.param(EdenCodec(), id="eden"),
]
RICH = 17 * 50.0  # bits per context of 50 tokens: enough for every peer


def logits(shape: tuple[int, int], seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).uniform(-3, 3, shape).astype(np.float32)


@pytest.mark.parametrize("name", peers(4))
def test_logits_beyond_half_precision_are_refused(name: str) -> None:
    plan = make_plan(bits=RICH)
    with pytest.raises(InputError, match="logits must lie within"):
        encode(peers(4)[name], logits(plan.shape) * 1e6, plan)


@pytest.mark.parametrize("codec", UNBIASED)
@pytest.mark.parametrize("rate", [1.7, 4.0])
def test_the_error_is_zero_on_average(codec: Codec, rate: float) -> None:
    """A mean of 4000 draws for each of 256 tokens over its standard error; false-alarm rate 1e-4 for all together."""
    plan = make_plan(contexts=4000, vocab=256, bits=16 + rate * 256)
    row = np.random.default_rng(3).normal(size=(1, 256)).astype(np.float32)
    values = np.repeat(row, plan.contexts, axis=0)
    error = centre(decode(codec, encode(codec, values, plan), plan, dtype=np.float64).values - centre(values))
    z = error.mean(axis=0) / (error.std(axis=0) / np.sqrt(plan.contexts))
    assert np.abs(z).max() < stats.norm.isf(1e-4 / 256 / 2)


@pytest.mark.parametrize("codec", UNBIASED)
def test_the_reported_variance_is_the_measured_one(codec: Codec) -> None:
    plan = make_plan(contexts=400, vocab=256, bits=16 + 4 * 256)
    values = logits(plan.shape)
    decoded, variance, *_ = decode(codec, encode(codec, values, plan), plan, dtype=np.float64)
    error = centre(decoded - centre(values.astype(np.float64)))
    assert np.square(error).mean() == pytest.approx(variance.mean(), rel=0.03)


@pytest.mark.slow
def test_eden_has_the_error_that_its_authors_code_has() -> None:
    """NMSE times K on log-normal vectors, d = 2^17, K = 10; the authors' code gives these four."""
    vectors = centre(np.random.default_rng(0).lognormal(size=(10, 1, 2**17)).astype(np.float32))
    square = np.square(vectors).sum(axis=-1).mean()
    for bits, authors in {1: 0.568, 2: 0.133, 3: 0.0357, 4: 0.0096}.items():
        error = np.zeros((1, 2**17))
        for node, vector in enumerate(vectors):
            plan = make_plan(contexts=1, vocab=2**17, bits=bits * 2**17 + 16, node=node)
            error += decode(EdenCodec(), encode(EdenCodec(), vector, plan), plan).values - vector
        assert np.square(error / 10).sum() / square * 10 == pytest.approx(authors, rel=0.05)


def test_correlated_errors_cancel_between_nodes_that_agree() -> None:
    """Four equal nodes at one bit: independent draws divide the variance by 4, stratified ones by 12 or more."""
    values = logits((200, 256))
    mean_square = []
    for codec in (StochasticCodec(), CorrelatedCodec(nodes=4)):
        plans = [make_plan(contexts=200, vocab=256, bits=256 + 16, node=node) for node in range(4)]
        mean = sum(decode(codec, encode(codec, values, plan), plan).values for plan in plans) / 4
        mean_square.append(float(np.square(centre(mean - values)).mean()))
    assert mean_square[1] < mean_square[0] / 3


def test_correlated_takes_more_nodes_than_one_permutation() -> None:
    codec = CorrelatedCodec(nodes=GROUP + 3)
    plan = make_plan(bits=RICH, node=GROUP + 2)
    values = logits(plan.shape)
    decoded = decode(codec, encode(codec, values, plan), plan).values
    assert np.abs(centre(decoded - values)).max() < 1e-3


def test_topk_keeps_the_largest_and_the_mass_of_the_others() -> None:
    plan = make_plan(bits=8 * 16.0)
    values = logits(plan.shape)
    decoded = decode(TopKCodec(), encode(TopKCodec(), values, plan), plan, dtype=np.float64).values
    assert (decoded > decoded.min(axis=1, keepdims=True)).sum(axis=1).tolist() == [5] * 6
    assert (decoded.argmax(axis=1) == values.argmax(axis=1)).all()
    shifted = values - values.max(axis=1, keepdims=True)
    assert np.exp(decoded).sum(axis=1) == pytest.approx(np.exp(shifted).sum(axis=1), rel=2e-3)


def test_soft_labels_at_the_least_budget_name_the_most_likely_token() -> None:
    plan = make_plan()
    plan = replace(plan, bits=SoftLabelCodec().least_bits(plan))
    values = logits(plan.shape)
    decoded = decode(SoftLabelCodec(), encode(SoftLabelCodec(), values, plan), plan).values
    assert (decoded.argmax(axis=1) == values.argmax(axis=1)).all()
