"""Sampled labels of any logits, priors and bytes: never over the budget, refused or sound, the same without numba."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpld import BudgetError, FrameError, InputError, Plan, decode, encode
from fpld.codecs import ArrayPrior, make_prior
from fpld.codecs.prior import LEAST_PRIOR
from fpld.codecs.samples import steps
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.samples.collector import LogitBlock, SymbolCollector
from fpld.codecs.samples.decoder import decode_sparse
from fpld.codecs.samples.probabilities import prior_probabilities
from fpld.codecs.samples.steps import HEADER_BYTES, LabelHeader, possible_symbol
from tests.codecs import wire_samples
from tests.codecs.test_samples import plan_of, scene
from tests.codecs.test_samples_reading import Recording
from tests.helpers import ADVERSARIAL, make_plan, without_numba

if TYPE_CHECKING:
    from fpld.types import Array


def test_it_says_what_it_needs() -> None:
    logits = np.zeros((6, 50))
    with pytest.raises(
        InputError, match="samples codes what a node adds to a prior, and the plan has none: give it one"
    ):
        encode(SAMPLES, logits, make_plan(clip=None))
    with pytest.raises(InputError, match="and the plan has none"):
        SAMPLES.reader(b"", make_plan(clip=None))
    with pytest.raises(InputError, match=r"prior must have the plan's shape \(6, 50\), got \(5, 50\)"):
        encode(SAMPLES, logits, make_plan(prior=make_prior(np.zeros((5, 50)))))
    prior = make_prior(np.zeros((2000, 50)))
    with pytest.raises(BudgetError, match=r"at least 3\.064 per probe context, got 2\.9"):
        encode(SAMPLES, np.zeros((2000, 50)), plan_of(prior, 2.9))
    for bad in (np.full((6, 50), 1, np.int16), np.full((6, 50), LEAST_PRIOR - 1, np.int16)):
        plan = make_plan(clip=None, prior=Recording(bad))
        with pytest.raises(InputError, match=r"prior must lie in -320\.\.0"):
            encode(SAMPLES, logits, plan)
    sound = make_plan(clip=None, prior=make_prior(np.zeros((6, 50))))
    payload = encode(SAMPLES, np.random.default_rng(0).normal(0, 3, (6, 50)), sound)
    with pytest.raises(InputError, match=r"prior must lie in -320\.\.0"):
        SAMPLES.reader(payload, make_plan(clip=None, prior=Recording(np.full((6, 50), 1, np.int16)))).check()
    with pytest.raises(InputError, match="prior must be int16 of shape"):
        SAMPLES.reader(payload, make_plan(clip=None, prior=Recording(np.zeros((6, 50))))).check()


PRIORS = {
    "near": lambda rng, values: make_prior(values + rng.normal(0, 0.5, values.shape)),
    "wrong": lambda rng, values: make_prior(rng.normal(0, 5, values.shape)),
    "extreme": lambda rng, values: ArrayPrior(rng.choice(np.array([0, LEAST_PRIOR], np.int16), values.shape)),
    "least": lambda _, values: ArrayPrior(np.full(values.shape, LEAST_PRIOR, np.int16)),
}


@settings(max_examples=150)
@given(
    st.integers(1, 30),
    st.integers(2, 400),
    st.floats(1, 100),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.sampled_from(sorted(PRIORS)),
    st.integers(0, 2**32 - 1),
)
def test_never_one_bit_over_whatever_the_logits(
    contexts: int, vocab: int, factor: float, kind: str, prior: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = np.asarray(ADVERSARIAL[kind](rng, (contexts, vocab)))
    plan = plan_of(PRIORS[prior](rng, values), 3.0)
    plan = plan_of(plan.prior, SAMPLES.least_bits(plan) * factor)
    payload = encode(SAMPLES, values, plan)
    assert len(payload) <= plan.budget_bytes
    reader = SAMPLES.reader(payload, plan)
    reader.check()
    assert all(
        np.abs(part.changes).max(initial=0) <= 1.001 + LabelHeader.from_bytes(payload).tau
        for part in reader.sparse()
        if payload
    )
    labels = decode(SAMPLES, payload, plan).probabilities
    assert labels is not None
    assert np.isfinite(labels).all()


def recoded(logits: Array, plan: Plan, step: int, shift: float) -> bytes:
    """Code labels of p + shift, which need not be probabilities: an encoder with another d. Empty where none fits."""
    collector = SymbolCollector(plan, max(min(step, steps.tau_to_step(0.01)) - 1, 0))
    assert plan.prior is not None
    collector.add(LogitBlock(range(plan.contexts), logits, plan.prior.block(range(plan.contexts))))
    kept = collector.collected()
    collector._parts = [kept._replace(differences=(kept.differences + np.float32(shift)).astype(np.float32))]
    code = collector.encode(step, 1 << 22).data
    return LabelHeader(step, 0.0).to_bytes() + code if code else b""


@settings(max_examples=200)
@given(
    st.integers(2, 400),
    st.integers(0, steps.STEP_COUNT - 1),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.sampled_from(sorted(PRIORS)),
    st.integers(0, 2**32 - 1),
)
def test_no_honest_encoder_is_refused_with_any_step(vocab: int, step: int, kind: str, prior: str, seed: int) -> None:
    """Probabilities of 0 and 1, priors of 0 and 1, steps from 2^-24 to 2^6."""
    rng = np.random.default_rng(seed)
    values = np.asarray(ADVERSARIAL[kind](rng, (4, vocab)), np.float32)
    plan = plan_of(PRIORS[prior](rng, values), 1024.0 * vocab)
    SAMPLES.reader(recoded(values, plan, step, 0.0), plan).check()
    one_hot = np.where(np.arange(vocab) == vocab // 2, np.float32(80), np.float32(-80)) + 0 * values
    SAMPLES.reader(recoded(one_hot, plan, step, 0.0), plan).check()
    # The token that the prior finds likeliest gets nothing: the least symbols that there are.
    integers = PRIORS[prior](rng, values).array
    plan = plan_of(ArrayPrior(integers), 1024.0 * vocab)
    nothing = np.where(integers == integers.max(axis=1, keepdims=True), np.float32(-80), np.float32(80))
    SAMPLES.reader(recoded(nothing, plan, step, 0.0), plan).check()


@pytest.mark.parametrize(("tau", "shift"), [(0.01, -0.02), (0.01, 1.01), (1.0, -1.5), (32.0, 40.0), (32.0, -40.0)])
def test_symbols_that_no_probability_gives_are_refused(tau: float, shift: float) -> None:
    """Labels below 0 and above 1 by more than a step; every read goes by the same check."""
    logits, prior = scene(30, 90)
    plan = plan_of(prior, 1e4)
    step = steps.tau_to_step(tau)
    SAMPLES.reader(recoded(logits, plan, step, 0.0), plan).check()
    payload = recoded(logits, plan, step, shift)
    assert payload
    with pytest.raises(FrameError, match="must be of probabilities from 0 to 1"):
        SAMPLES.reader(payload, plan).check()
    with pytest.raises(FrameError, match="must be of probabilities from 0 to 1"):
        decode(SAMPLES, payload, plan)
    with pytest.raises(FrameError, match="must be of probabilities from 0 to 1"):
        list(decode_sparse([SAMPLES.reader(payload, plan)]))


def test_the_reader_of_the_docs_refuses_what_the_codec_refuses() -> None:
    """Labels further and further from probabilities: both readers draw the line at the same payloads."""
    logits, prior = scene(4, 30)
    plan = plan_of(prior, 1e4)
    step = steps.tau_to_step(0.05)
    verdicts = []
    for shift in np.linspace(-0.06, 0.0, 13):
        payload = recoded(logits, plan, step, float(shift))
        sound = wire_samples.possible(wire_samples.symbols(payload, plan), payload, plan)
        verdicts.append(sound)
        assert sound == (not sound_or_refused(payload, plan))
    assert verdicts[-1]
    assert not verdicts[0]


def test_possible_symbols_are_those_between_the_symbols_of_0_and_1() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        tau = float(2.0 ** rng.uniform(-10, 6))
        prior = float(2.0 ** -rng.uniform(0, 30))
        draw = int(rng.integers(0, 1 << 32))
        u = (draw + 0.5) / 2**32
        least, most = (math.floor((p - prior) / tau + u) for p in (0.0, 1.0))
        wide = [possible_symbol(s, prior, 1 / tau, draw) for s in (least, most, least - 2, most + 2)]
        assert wide == [True, True, False, False]
        # The slack matters to a symbol beside the bound only where u lies within it.
        if (u - prior / tau) % 1 > 1e-3 * prior / tau + 1e-9:
            assert not possible_symbol(least - 1, prior, 1 / tau, draw)


# Where most contexts are the prior's.
LITTLE = {("least", "constant"), ("least", "tiny")}


@pytest.mark.parametrize("kind", sorted(ADVERSARIAL))
@pytest.mark.parametrize("prior", sorted(PRIORS))
def test_budgets_of_some_kilobytes_are_filled_whatever_the_logits(kind: str, prior: str) -> None:
    rng = np.random.default_rng(5)
    values = np.asarray(ADVERSARIAL[kind](rng, (600, 60)))
    plan = plan_of(PRIORS[prior](rng, values), 80.0)
    payload = encode(SAMPLES, values, plan)
    assert len(payload) <= plan.budget_bytes
    finest = LabelHeader.from_bytes(payload).step == 0  # then there is no more to send
    assert len(payload) >= 0.99 * plan.budget_bytes or (finest and (prior, kind) in LITTLE)


def sound_or_refused(payload: bytes, plan: Plan) -> bool:
    """Whether a payload is refused; if not, all that is read is within what symbols can be."""
    try:
        reader = SAMPLES.reader(payload, plan)
        reader.check()
    except FrameError:
        return True
    tau = LabelHeader.from_bytes(payload).tau if payload else 0.0
    for part in reader.sparse():
        assert part.tokens.size == part.changes.size == part.starts[-1] <= 16 * len(payload)
        assert (np.diff(part.starts) >= 0).all()
        assert ((part.tokens >= 0) & (part.tokens < plan.vocab)).all()
        assert np.abs(part.changes).max(initial=0) <= 1.001 + tau
        assert math.isfinite(part.noise)
    return False


def test_hostile_bytes_are_refused_or_sound() -> None:
    """Some thousands of each kind; what ends with the mark by chance is one in 65,536, so nearly all are refused."""
    rng = np.random.default_rng(11)
    logits, prior = scene(30, 90)
    plan = plan_of(prior, 60.0)
    payload = encode(SAMPLES, logits, plan)
    assert not sound_or_refused(payload, plan)
    refused = 0
    for k in range(3000):
        bad = bytearray(payload)
        if k % 3 == 0:
            bad[:] = rng.bytes(int(rng.integers(1, len(payload) + 1)))
            bad[:2] = payload[:2] if k % 2 else bad[:2]
        elif k % 3 == 1:
            del bad[int(rng.integers(0, len(bad))) :]
        else:
            for at in rng.integers(0, len(bad), rng.integers(1, 4)):
                bad[at] ^= 1 << int(rng.integers(0, 8))
        refused += sound_or_refused(bytes(bad), plan)
    assert refused > 2700
    assert sound_or_refused(payload + b"\1", plan_of(prior, 70.0))
    assert sound_or_refused(payload + b"\0", plan_of(prior, 70.0))


@pytest.mark.parametrize(
    ("head", "match"),
    [
        (LabelHeader(steps.STEP_COUNT, 0.1), "step must be below"),
        (LabelHeader(steps.STEP_OFFSET, -0.1), "noise must lie"),
        (LabelHeader(steps.STEP_OFFSET, 2.1), "noise must lie"),
        (LabelHeader(steps.STEP_OFFSET, math.nan), "noise must lie"),
        (LabelHeader(steps.STEP_OFFSET, math.inf), "noise must lie"),
        (LabelHeader(0, 1e-9, 3), "not 0 beside a finer one, got 0"),
        (LabelHeader(steps.STEP_OFFSET, 0.1, 6), "fewer contexts than 6"),
    ],
)
def test_heads_that_no_encoder_writes_are_refused(head: LabelHeader, match: str) -> None:
    plan = plan_of(make_prior(np.zeros((6, 50))), 100.0)
    with pytest.raises(FrameError, match=match):
        SAMPLES.reader(head.to_bytes() + b"\1", plan)
    two = LabelHeader(steps.STEP_OFFSET, 0.1, 3).to_bytes()
    assert LabelHeader.from_bytes(two).finer == 3
    with pytest.raises(FrameError, match="one context at least, got 0"):
        SAMPLES.reader(two[:HEADER_BYTES] + bytes(5), plan)
    with pytest.raises(FrameError, match="at least 10 bytes, got 9"):
        SAMPLES.reader(two[:9], plan)
    with pytest.raises(FrameError, match=f"at least {HEADER_BYTES} bytes, got 3"):
        SAMPLES.reader(b"abc", plan)


def test_a_prior_that_is_off_by_one_never_breaks_anything() -> None:
    rng = np.random.default_rng(12)
    logits, prior = scene(40, 200)
    plan = plan_of(prior, 40.0)
    payload = encode(SAMPLES, logits, plan)
    for _ in range(300):
        other = prior.array.copy()
        at = int(rng.integers(other.size))
        other.flat[at] += 1 if other.flat[at] < 0 and rng.random() < 0.5 else -1
        sound_or_refused(payload, plan_of(ArrayPrior(np.clip(other, LEAST_PRIOR, 0)), 40.0))


def test_nothing_sent_is_the_prior() -> None:
    prior = make_prior(np.random.default_rng(1).normal(size=(6, 50)))
    plan = plan_of(prior, 30.0)
    decoded = decode(SAMPLES, b"", plan)
    assert decoded.probabilities is not None
    assert np.array_equal(decoded.probabilities, prior_probabilities(prior.array))
    (part,) = SAMPLES.reader(b"", plan).sparse()
    assert part.tokens.size == 0
    assert part.starts.tolist() == [0] * 7
    assert part.noise > 0


@pytest.mark.slow
def test_without_numba_the_bytes_are_the_same() -> None:
    """The kernels as plain Python: what a site without numba sends."""
    assert without_numba("tests.codecs.test_samples_bounds", "small") == small()


def small() -> list[str]:
    """Payloads in hexadecimal, and what they decode to."""
    out = []
    for away, bits in ((1.0, 40.0), (4.0, 300.0)):
        logits, prior = scene(6, 70, away)
        plan = plan_of(prior, bits)
        payload = encode(SAMPLES, logits, plan)
        labels = decode(SAMPLES, payload, plan).probabilities
        assert labels is not None
        out += [payload.hex(), str(np.abs(labels).sum(dtype=np.float64).round(4))]
    for shift in (-0.06, -0.01, 0.0, 1.2):
        out.append(str(sound_or_refused(recoded(logits, plan, steps.tau_to_step(0.05), shift), plan)))
    return out
