"""Sampled labels: right on average, with the variance that they state, within the budget, and no trust in bytes.

What all codecs owe is in test_codecs.py; here is what is this one's own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import stats

from fpld import FrameError, InputError, Plan, decode, encode
from fpld.codecs import ArrayPrior, make_prior
from fpld.codecs.prior import LEAST_PRIOR
from fpld.codecs.samples import steps
from fpld.codecs.samples.candidates import CandidateIndex
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.samples.collector import LogitBlock, SymbolCollector
from fpld.codecs.samples.decoder import PriorBlock, SymbolDecoder
from fpld.codecs.samples.draws import context_draws, draw_keys
from fpld.codecs.samples.probabilities import prior_probabilities
from fpld.codecs.samples.steps import LabelHeader
from fpld.codecs.samples.symbol_model import MODEL_COUNT
from fpld.numerics import softmax
from tests.helpers import make_plan

if TYPE_CHECKING:
    from fpld.types import Array


def scene(contexts: int, vocab: int, away: float = 1.0, seed: int = 0) -> tuple[Array, ArrayPrior]:
    """Logits with Zipf's law, contexts of different temperature and distance, and a prior: total variation 0.35."""
    rng = np.random.default_rng(seed)
    ranks = rng.random((contexts, vocab)).argsort(axis=1) + 1
    common = -1.2 * np.exp(rng.normal(0, 0.35, (contexts, 1))) * np.log(ranks) + rng.normal(0, 0.8, (contexts, vocab))
    apart = away * rng.normal(0, 1, (contexts, vocab)) * np.exp(rng.normal(-0.1, 0.5, (contexts, 1)))
    return (common + apart).astype(np.float32), make_prior(common)


def plan_of(prior: Any, bits: float, **changes: Any) -> Plan:
    contexts, vocab = prior.shape
    return make_plan(**{"contexts": contexts, "vocab": vocab, "bits": bits, "clip": None, "prior": prior, **changes})


def coded(logits: Array, plan: Plan, step: int, finest: int | None = None) -> tuple[Array, float]:
    """Code and read back with a given step: all symbols [m, V], and the variance that is stated, per context."""
    rows = range(plan.contexts)
    prior = plan.prior.block(rows) if plan.prior else None
    assert prior is not None
    collector = SymbolCollector(plan, step if finest is None else finest)
    collector.add(LogitBlock(rows, logits, prior))
    code = collector.encode(step, 1 << 22)
    source = SymbolDecoder(np.frombuffer(code.data, np.uint8).copy(), LabelHeader(step, 0.0), plan)
    (places,) = CandidateIndex([plan], step).find(rows, prior)
    block = source.read(rows, PriorBlock.make(prior), places)
    source.end()
    dense = np.zeros(plan.shape, np.int64)
    dense[np.repeat(rows, np.diff(block.starts)), block.tokens] = block.symbols
    return dense, code.variance / plan.contexts


def repeated(p: Array, pi: Array, contexts: int) -> tuple[Array, ArrayPrior, Array]:
    """The same distributions in every context: logits, prior, and d."""
    logits = np.log(np.maximum(np.tile(p, (contexts, 1)), 1e-30)).astype(np.float32)
    prior = make_prior(np.log(np.maximum(np.tile(pi, (contexts, 1)), 1e-30)))
    return logits, prior, softmax(logits[:1])[0] - prior_probabilities(prior.array[:1])[0]


def zipf(vocab: int, power: float) -> Array:
    weights: Array = np.arange(1.0, vocab + 1) ** -power
    total: Array = weights / weights.sum()
    return total


PAIRS = {
    "near": (zipf(20, 1.0), zipf(20, 1.1)),
    "far": (zipf(20, 1.5)[::-1], zipf(20, 1.5)),
    "equal": (zipf(20, 1.0), zipf(20, 1.0)),
    "one-hot node": (np.eye(20)[7], zipf(20, 1.0)),
    "one-hot prior": (zipf(20, 1.0), np.eye(20)[7]),
}


@pytest.mark.parametrize("tau", [2.0, 0.3, 0.04])
@pytest.mark.parametrize("pair", PAIRS)
def test_labels_are_right_on_average(pair: str, tau: float) -> None:
    """Every token's mean over 4000 contexts; false-alarm rate 1e-4 in all of the test."""
    contexts = 4000
    logits, prior, d = repeated(*PAIRS[pair], contexts)
    step = steps.tau_to_step(tau)
    symbols, stated = coded(logits, plan_of(prior, 100.0), step, step - 100)
    x = d.astype(np.float64) / steps.step_to_tau(step)
    f = x - np.floor(x)
    chance = f * contexts
    floors = np.floor(x) * contexts
    above = symbols.sum(axis=0) - floors  # binomial: how often the symbol is the larger of the two that it can be
    tails = np.minimum(stats.binom.cdf(above, contexts, f), stats.binom.sf(above - 1, contexts, f))
    assert tails[chance > 1e-6].min(initial=1.0) > 1e-4 / (2 * 20 * len(PAIRS) * 3)
    assert not above[chance <= 1e-6].any()
    # Squares as well: the variance that is stated is one of that very mean.
    true = steps.step_to_tau(step) ** 2 * (f * (1 - f)).sum()
    assert stated == pytest.approx(true, rel=0.15, abs=1e-5)


@pytest.mark.slow
def test_tiny_probabilities_are_right_on_average() -> None:
    """20,000 tokens of 2e-6 that the prior has at e^-40: their sum, which is Poisson; false-alarm rate 1e-4."""
    vocab = 20_000
    contexts = 400
    tau = 0.5
    p = np.full(vocab, 2e-6)
    p[0] = 1 - p[1:].sum()
    logits, prior, d = repeated(p, np.eye(vocab)[0], contexts)
    step = steps.tau_to_step(tau)
    symbols, _ = coded(logits, plan_of(prior, 100.0), step)
    expected = contexts * float(d[1:].sum(dtype=np.float64)) / steps.step_to_tau(step)
    assert 30 < expected < 40
    low, high = stats.poisson.interval(1 - 1e-4, expected)
    assert low <= symbols[:, 1:].sum() <= high


@pytest.mark.parametrize("bits", [4.0, 20.0, 100.0])
def test_labels_of_a_budget_are_right_on_average(bits: float) -> None:
    """The step goes by all draws: that must not show. Each token's mean in units of its deviation; rate 1e-4 in all."""
    contexts = 3000
    logits, prior, d = repeated(*PAIRS["near"], contexts)
    plan = plan_of(prior, bits)
    payload = encode(SAMPLES, logits, plan)
    x = d / LabelHeader.from_bytes(payload).tau
    f = x - np.floor(x)
    labels = decode(SAMPLES, payload, plan).probabilities
    assert labels is not None
    mean = (labels - prior_probabilities(prior.array)).mean(axis=0, dtype=np.float64) - d
    deviation = LabelHeader.from_bytes(payload).tau * np.sqrt(f * (1 - f) / contexts)
    assert np.abs(mean / deviation).max() < stats.norm.isf(1e-4 / (2 * 20 * 3))


@pytest.mark.parametrize("bits", [8.0, 30.0, 200.0])
def test_the_variance_that_is_stated_is_the_measured_one(bits: float) -> None:
    """Mean squared error of labels over what is stated, within four standard errors: false-alarm rate 1e-4."""
    logits, prior = scene(2000, 300)
    plan = plan_of(prior, bits)
    payload = encode(SAMPLES, logits, plan)
    reader = SAMPLES.reader(payload, plan)
    stated = [part.noise for part in reader.sparse([range(1500), range(1500, 2000)])]
    assert stated[0] == pytest.approx(3 * stated[1])
    decoded = decode(SAMPLES, payload, plan)
    assert decoded.probabilities is not None
    error = np.square(decoded.probabilities - softmax(logits)).sum(axis=1)
    assert abs(error.mean() - sum(stated) / 2000) < 4 * error.std() / math.sqrt(2000) + 0.02 * error.mean()
    # By tokens it is spread as the prior's probabilities, and given for the logarithm.
    label = np.maximum(decoded.probabilities, prior_probabilities(prior.array) / 64)
    assert (decoded.variance * np.square(label)).sum() == pytest.approx(sum(stated), rel=1e-3)
    assert np.allclose(decoded.values, np.log(label), atol=1e-5)


@pytest.mark.parametrize("total", [1e-6, 0.05, 3.0])
def test_a_prior_that_does_not_add_up_to_one_is_as_good(total: float) -> None:
    """Symbols below zero are found wherever they are, also beyond all candidates."""
    logits, prior = scene(30, 500)
    lower = ArrayPrior(np.clip(prior.array + round(8 * math.log(total)), LEAST_PRIOR, 0).astype(np.int16))
    plan = plan_of(lower, 100.0)
    u = (np.stack([context_draws(key, 500) for key in draw_keys(plan, range(30))]) + 0.5) / 2.0**32
    step = steps.tau_to_step(0.003)
    symbols, _ = coded(logits, plan, step, step - 200)
    expected = np.floor((softmax(logits) - prior_probabilities(lower.array)) / steps.step_to_tau(step) + u)
    assert np.array_equal(symbols, expected)
    assert (symbols < 0).any()


@pytest.mark.parametrize("bits", [4.0, 10.0, 60.0, 400.0])
def test_it_fills_the_budget_within_one_percent(bits: float) -> None:
    logits, prior = scene(2500, 200)
    plan = plan_of(prior, bits)
    assert 0.99 * plan.budget_bytes <= len(encode(SAMPLES, logits, plan)) <= plan.budget_bytes


def tied(contexts: int, vocab: int, seen: int) -> tuple[Array, ArrayPrior]:
    """Logits as of counts: in every context some tokens are likely, all alike, and the prior knows nothing."""
    places = np.random.default_rng(0).random((contexts, vocab)).argsort(axis=1)
    return np.log(np.where(places < seen, 8.0, 0.05)).astype(np.float32), make_prior(np.zeros((contexts, vocab)))


@pytest.mark.parametrize(("vocab", "seen", "bits"), [(20, 2, 10.0), (20, 2, 100.0), (60, 4, 30.0), (60, 4, 200.0)])
def test_where_probabilities_tie_two_steps_fill_the_budget(vocab: int, seen: int, bits: float) -> None:
    """Symbols that are all equal change together from one step to the next, and the length jumps."""
    logits, prior = tied(1500, vocab, seen)
    plan = plan_of(prior, bits)
    payload = encode(SAMPLES, logits, plan)
    head = LabelHeader.from_bytes(payload)
    assert 0 < head.finer < 1500
    assert 0.99 * plan.budget_bytes <= len(payload) <= plan.budget_bytes
    taus = head.taus(range(1500))
    assert np.allclose(taus[[0, head.finer - 1]], steps.step_to_tau(head.step - 1))
    assert np.allclose(taus[[head.finer, -1]], steps.step_to_tau(head.step))
    u = (np.stack([context_draws(key, vocab) for key in draw_keys(plan, range(1500))]) + 0.5) / 2.0**32
    d = softmax(logits) - prior_probabilities(prior.array)
    tau = np.where(np.arange(1500) < head.finer, steps.step_to_tau(head.step - 1), head.tau)[:, None]
    label = prior_probabilities(prior.array) + tau * np.floor(d / tau + u)
    labels = decode(SAMPLES, payload, plan).probabilities
    assert labels is not None
    # Beside float32's last digit, and the few symbols that hang by it.
    assert (np.abs(labels - label) > 1e-5).mean() < 1e-3
    f = d / tau - np.floor(d / tau)
    assert head.noise == pytest.approx((tau**2 * f * (1 - f)).sum() / 1500, rel=0.05)
    parts = list(SAMPLES.reader(payload, plan).sparse([range(head.finer + 1), range(head.finer + 1, 1500)]))
    symbols = np.concatenate([part.changes for part in parts]) / np.repeat(
        taus, np.concatenate([np.diff(part.starts) for part in parts])
    )
    assert np.allclose(symbols, np.rint(symbols), atol=1e-3)
    with pytest.raises(FrameError, match="fewer contexts than 1500"):
        SAMPLES.reader(head._replace(finer=1500).to_bytes() + payload[head.size :], plan).check()


def test_noise_falls_with_bits_and_a_vocabulary_sixteen_times_as_large_costs_little() -> None:
    noise = {}
    for contexts, vocab in ((2000, 250), (300, 4000)):
        logits, prior = scene(contexts, vocab)
        for bits in (10.0, 30.0):
            noise[vocab, bits] = LabelHeader.from_bytes(encode(SAMPLES, logits, plan_of(prior, bits))).noise
    assert noise[250, 30.0] < noise[250, 10.0] / 3
    assert noise[4000, 30.0] < 2 * noise[250, 30.0]


def test_more_contexts_than_are_held_are_coded_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from fpld.codecs.samples import encoder

    logits, prior = scene(600, 200)
    plan = plan_of(prior, 60.0)
    held = encode(SAMPLES, logits, plan)
    monkeypatch.setattr(encoder, "HELD", 100 * 200)
    for stride in (7, 600):
        payload = SAMPLES.encode((logits[at : at + stride] for at in range(0, 600, stride)), plan)
        assert 0.99 * plan.budget_bytes <= len(payload) <= plan.budget_bytes
        assert abs(LabelHeader.from_bytes(payload).step - LabelHeader.from_bytes(held).step) <= 4


def test_what_was_learnt_saves_bits_in_the_next_round() -> None:
    logits, prior = scene(300, 200, away=0.15)
    plan = plan_of(prior, 20.0)
    reader = SAMPLES.reader(encode(SAMPLES, logits, plan), plan)
    reader.check()
    learnt = reader.learnt
    assert learnt is not None
    assert (learnt.shape, str(learnt.dtype)) == ((MODEL_COUNT,), "uint16")
    more = plan_of(prior, 20.0, round=4, learnt=learnt)
    payload = encode(SAMPLES, logits, more)
    SAMPLES.reader(payload, more).check()
    assert LabelHeader.from_bytes(payload).noise < 0.99 * LabelHeader.from_bytes(encode(SAMPLES, logits, plan)).noise
    with pytest.raises(FrameError):
        SAMPLES.reader(payload, plan_of(prior, 20.0, round=4)).check()
    for wrong in (learnt[1:], learnt.astype(np.int32), np.zeros_like(learnt)):
        with pytest.raises(InputError, match="learnt must be"):
            encode(SAMPLES, logits, plan_of(prior, 20.0, learnt=wrong))
