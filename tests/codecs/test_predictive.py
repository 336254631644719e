"""The predictive codec: it fills its budget and never exceeds it, beats the uniform codec by far, and trusts no bytes.

What all codecs owe is in test_codecs.py; here is what is this one's own.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpld import BudgetError, FrameError, InputError, decode, encode
from fpld.codecs import ArrayPrior, PredictiveCodec, UniformCodec, make_prior
from fpld.codecs.predictive import tokens
from fpld.codecs.predictive.ans import AnsDecoder, write_ans
from fpld.codecs.predictive.compact_ans import CompactAnsDecoder, write_compact_ans
from fpld.codecs.prior import LEAST_PRIOR
from fpld.paper import theory
from tests.helpers import ADVERSARIAL, make_plan

CODEC = PredictiveCodec()
NODES = 4
M = 200
V = 256


def scene(seed: int = 0, away: float = 0.5) -> tuple[np.ndarray[Any, Any], ArrayPrior]:
    """Peaked logits as of a language model, nodes that differ, and a prior that is near them."""
    rng = np.random.default_rng(seed)
    ranks = np.argsort(rng.random((M, V)), axis=1) + 1
    common = -2.0 * np.log(ranks) + rng.normal(0, 1, (M, V))
    nodes = common + rng.normal(0, away, (NODES, M, V))
    return nodes.astype(np.float32), make_prior(common + rng.normal(0, away, (M, V)))


def combined_kl(codec: Any, bits: float, logits: np.ndarray[Any, Any], **fields: Any) -> float:
    decoded = []
    for node in range(NODES):
        plan = make_plan(node=node, contexts=M, vocab=V, bits=bits * V, clip=None, **fields)
        decoded.append(decode(codec, encode(codec, logits[node], plan), plan, dtype=np.float64).values)
    truth = logits.mean(axis=0, dtype=np.float64)
    return float(theory.kl(truth, np.mean(decoded, axis=0) - truth).mean())


@pytest.mark.parametrize("bits", [0.1, 0.25, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("tied", [False, True])
def test_it_fills_the_budget_within_one_percent(bits: float, tied: bool) -> None:
    logits, prior = scene()
    if tied:
        logits = np.rint(2 * logits) / 2
    plan = make_plan(contexts=M, vocab=V, bits=bits * V, clip=None, prior=prior)
    size = len(encode(CODEC, logits[0], plan))
    assert 0.99 * plan.budget_bytes <= size <= plan.budget_bytes


def test_kl_falls_with_every_bit_and_is_far_below_the_uniform_codec() -> None:
    logits, prior = scene()
    losses = [combined_kl(CODEC, bits, logits, prior=prior) for bits in (0.1, 0.3, 1.0, 2.0, 4.0)]
    assert all(after < before / 1.5 for before, after in itertools.pairwise(losses))
    assert losses[3] < combined_kl(UniformCodec(), 2.0, logits) / 10
    # A tenth of a bit already beats what the uniform codec does with two.
    assert losses[0] < combined_kl(UniformCodec(), 2.0, logits)


def test_a_wrong_prior_costs_bits_and_breaks_nothing() -> None:
    logits, _ = scene()
    wrong = make_prior(np.random.default_rng(9).normal(0, 4, (M, V)))
    assert combined_kl(CODEC, 3.0, logits, prior=wrong) < combined_kl(UniformCodec(), 3.0, logits) / 3
    assert combined_kl(CODEC, 3.0, logits) < combined_kl(UniformCodec(), 3.0, logits) / 3  # no prior at all


def test_reported_variance_is_what_it_leaves_weighed_as_kl_does() -> None:
    """A little more is left than reported, since groups of classes share one number.

    Over 72 scenes with other seeds the ratio had these means and standard deviations; five of them: one false alarm in
    500 000 draws of a scene.
    """
    logits, prior = scene()
    for bits, ratio, deviation in ((0.1, 1.141, 0.021), (0.5, 1.175, 0.017), (2.0, 1.038, 0.009)):
        plan = make_plan(contexts=M, vocab=V, bits=bits * V, clip=None, prior=prior)
        values, variance, _, _ = decode(CODEC, encode(CODEC, logits[0], plan), plan, dtype=np.float64)
        p = theory.softmax(logits[0])
        error = values - np.log(p)
        error -= (p * error).sum(axis=1, keepdims=True)
        assert (p * error**2).sum() / (p * variance).sum() == pytest.approx(ratio, abs=5 * deviation)


def test_weighted_bracket_holds_for_the_measured_kl() -> None:
    logits, prior = scene()
    values = []
    variances = []
    for node in range(NODES):
        plan = make_plan(node=node, contexts=M, vocab=V, bits=2.0 * V, clip=None, prior=prior)
        decoded = decode(CODEC, encode(CODEC, logits[node], plan), plan, dtype=np.float64)
        values.append(decoded.values)
        variances.append(decoded.variance)
    truth = logits.mean(axis=0, dtype=np.float64)
    kl = float(theory.kl(truth, np.mean(values, axis=0) - truth).mean())
    lower, upper = theory.weighted_bracket(theory.softmax(truth), np.sum(variances, axis=0) / NODES**2) / M
    # Without dither the nodes' errors are not quite independent: an estimate here, not a bound. Over 24 scenes the
    # ratio was 1.266 with a standard deviation of 0.013; five of them: one false alarm in a million draws of a scene.
    assert lower < kl
    assert kl / upper == pytest.approx(1.266, abs=5 * 0.013)


@settings(max_examples=300)
@given(
    st.integers(1, 30),
    st.integers(2, 400),
    st.floats(0.0101, 16),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.sampled_from(["none", "near", "wrong", "extreme"]),
    st.integers(0, 2**32 - 1),
)
def test_never_one_bit_over_and_blocks_agree(
    contexts: int, vocab: int, rate: float, kind: str, prior_kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = ADVERSARIAL[kind](rng, (contexts, vocab))
    prior = {
        "none": None,
        "near": make_prior(np.asarray(values + rng.normal(0, 0.5, values.shape))),
        "wrong": make_prior(np.asarray(rng.normal(0, 5, values.shape))),
        "extreme": ArrayPrior(rng.choice(np.array([0, LEAST_PRIOR], np.int16), values.shape)),
    }[prior_kind]
    plan = make_plan(contexts=contexts, vocab=vocab, bits=vocab * rate, clip=None, prior=prior)
    payload = encode(CODEC, values, plan)
    assert 8 * len(payload) <= contexts * plan.bits
    whole = decode(CODEC, payload, plan)
    assert np.isfinite(whole.values).all()
    assert (np.isfinite(whole.variance) & (whole.variance >= 0)).all()
    blocks = [range(start, min(start + 7, contexts)) for start in range(0, contexts, 7)]
    parts = list(CODEC.reader(payload, plan).blocks(blocks))
    assert np.array_equal(np.concatenate([part.values for part in parts]), whole.values)


def code_integers(values: np.ndarray[Any, Any], kind: int, compact: bool = False) -> bytes:
    """Code integers of one class as two blocks."""
    half = values.size // 2
    classes = tokens.CLASSES - 1
    starts = np.array([[0] * (kind + 1) + [half] * (classes - kind)] * 2, np.int64)
    starts[1, : kind + 1] = half
    starts[1, kind + 1 :] = values.size
    totals = totals_of(values.size, kind)
    symbols = tokens.SymbolList(
        np.empty(values.size, np.int32), np.empty(values.size + classes, np.int64), np.empty((2, classes), np.int64)
    )
    rank = np.arange(values.size, dtype=np.uint32)
    scale = tokens.Scale(1.0, 0.5, values.size, 0.0, 0.0)
    tokens.collect_symbols(values, rank, np.empty(0, np.float32), starts, totals, scale, symbols)
    models = tokens.new_models(totals, tokens.MAX_SYMBOL, None, decoder=False)
    records = np.empty(2 * values.size + tokens.CLASSES, np.int64)
    out = np.empty(8 * values.size + 64, np.uint8)
    bits, used = tokens.model_tokens(
        symbols, totals, np.empty(0, np.int32), np.zeros(3, np.int64), models, records, 1e18, tokens.COST
    )
    if compact:
        length = write_compact_ans(records[:used], out)
        assert abs(length - bits / 8) < 3
        return out[out.size - length :].tobytes()
    front, back = write_ans(records[:used], out)
    assert abs(front + back - bits / 8) < 9 + 1e-4 * front  # what the model foretells
    return out[:front].tobytes() + out[out.size - back :].tobytes()


def totals_of(size: int, kind: int) -> np.ndarray[Any, Any]:
    totals = np.zeros(tokens.CLASSES, np.int64)
    totals[kind] = size
    return totals


@given(
    st.lists(st.sampled_from([0, 0, 0, 1]) | st.integers(-tokens.MAX_SYMBOL, tokens.MAX_SYMBOL), max_size=60),
    st.integers(0, 47),
    st.booleans(),
)
def test_the_coder_gives_back_any_integers(symbols: list[int], kind: int, compact: bool) -> None:
    values = np.array(symbols, np.float64)
    data = np.frombuffer(code_integers(values, kind, compact), np.uint8)
    totals = totals_of(values.size, kind)
    decoder = (CompactAnsDecoder if compact else AnsDecoder)(data, totals, tokens.MAX_SYMBOL, None)
    assert decoder.sound
    decoded = np.zeros(values.size, np.int32)
    half = values.size // 2
    for first, last in ((0, half), (half, values.size)):
        starts = np.array([0] * (kind + 1) + [last - first] * (tokens.CLASSES - kind), np.int64)
        places = np.empty(last - first, np.int32)
        got = np.empty(last - first, np.int32)
        count = decoder.block(starts, places, got)
        assert count >= 0
        decoded[first + places[:count]] = got[:count]
    assert decoded.tolist() == symbols
    assert decoder.ended()


def test_the_coder_is_near_the_entropy() -> None:
    for scale in (0.1, 0.3, 2.0):
        values = np.random.default_rng(2).laplace(0, scale, 200_000)
        size = len(code_integers(values, 0))
        _, counts = np.unique(np.rint(values), return_counts=True)
        entropy = -(counts * np.log2(counts / values.size)).sum() / 8
        assert entropy * 0.999 < size < entropy * 1.03


def test_every_cut_and_every_flip_in_the_head_is_refused_or_decodes_to_finite_values() -> None:
    logits, prior = scene()
    plan = make_plan(contexts=M, vocab=V, bits=0.2 * V, clip=None, prior=prior)
    payload = encode(CODEC, logits[0], plan)
    with pytest.raises(FrameError, match=r"does not (begin|end)|beyond"):
        decode(CODEC, payload + b"\0", plan)
    with pytest.raises(FrameError, match="at most"):
        decode(CODEC, payload + bytes(plan.budget_bytes), plan)
    for end in (1, 2):
        with pytest.raises(FrameError, match="at least 3 bytes"):
            decode(CODEC, payload[:end], plan)
    for end in range(3, 120):  # the frame's length and checksum tell a cut code; here it must only do no harm
        try:
            assert np.isfinite(decode(CODEC, payload[:end], plan).values).all()
        except FrameError:
            continue
    for place in range(0, 8 * 120, 7):
        altered = bytearray(payload)
        altered[place // 8] ^= 1 << place % 8
        try:
            assert np.isfinite(decode(CODEC, bytes(altered), plan).values).all()
        except FrameError:
            continue


def test_priors_are_integers_and_checked() -> None:
    assert make_prior(np.zeros((1, 4))).array.tolist() == [[round(-8 * math.log(4))] * 4]
    assert make_prior(np.array([[0.0, -1e6]])).array.tolist() == [[0, LEAST_PRIOR]]
    with pytest.raises(InputError, match=r"prior must lie in -320\.\.0, eighths of a nat, got 1\.\.1"):
        ArrayPrior(np.ones((6, 50), np.int16))
    with pytest.raises(InputError, match=r"prior must be int16 of shape \(contexts, vocab\), got int64 \(6, 50\)"):
        ArrayPrior(np.zeros((6, 50), np.int64))
    with pytest.raises(InputError, match=r"prior must have the plan's shape \(6, 50\), got \(5, 50\)"):
        encode(CODEC, np.zeros((6, 50)), make_plan(prior=make_prior(np.zeros((5, 50)))))
    with pytest.raises(InputError, match=r"prior must be a Prior, for an array ArrayPrior\(array\), got ndarray"):
        make_plan(prior=np.zeros((6, 50), np.int16))


def test_too_small_a_budget_sends_nothing_and_decodes_to_the_prior() -> None:
    prior = make_prior(np.random.default_rng(1).normal(size=(6, 50)))
    plan = make_plan(bits=4.0, clip=None, prior=prior)
    assert encode(CODEC, np.zeros((6, 50)), plan) == b""
    with pytest.raises(BudgetError, match=r"at least 0\.5 per probe context, got 0\.4"):
        encode(CODEC, np.zeros((6, 50)), make_plan(bits=0.4, clip=None))
    assert np.array_equal(decode(CODEC, b"", plan).values, prior.array / np.float32(8))
