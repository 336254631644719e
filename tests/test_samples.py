"""Sampled labels: right on average, with the variance that they state, within the budget, and no trust in bytes.

What all codecs owe is in test_codecs.py; here is what is this one's own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fpld import BudgetError, FrameError, InputError, Plan, decode, encode
from fpld.codecs import ArrayPrior, make_prior
from fpld.codecs.prior import LEAST_PRIOR
from fpld.codecs.samples import chances as kernels
from fpld.codecs.samples import grid, sieving
from fpld.codecs.samples.chances import prior_chances
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.samples.draws import all_draws, draw, keys_of
from fpld.codecs.samples.head import HEAD_BYTES, Head
from fpld.codecs.samples.listing import Lister
from fpld.codecs.samples.material import Material
from fpld.codecs.samples.model import PLACES
from fpld.codecs.samples.reader import sparse_together
from fpld.codecs.samples.reading import Symbols
from fpld.codecs.samples.writing import write
from fpld.numerics import softmax
from tests.helpers import ADVERSARIAL, make_plan, without_numba

Array = np.ndarray[Any, np.dtype[Any]]


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
    material = Material(plan, step if finest is None else finest)
    material.add(rows, logits, prior)
    code = write(material, step, 1 << 22)
    source = Symbols(np.frombuffer(code.data, np.uint8).copy(), Head(step, 0.0), plan)
    (places,) = Lister([plan], step).list(rows, prior)
    starts, tokens, symbols = source.read(rows, prior, places)
    source.end()
    dense = np.zeros(plan.shape, np.int64)
    dense[np.repeat(rows, np.diff(starts)), tokens] = symbols
    return dense, code.variance / plan.contexts


def repeated(p: Array, pi: Array, contexts: int) -> tuple[Array, ArrayPrior, Array]:
    """The same distributions in every context: logits, prior, and d."""
    logits = np.log(np.maximum(np.tile(p, (contexts, 1)), 1e-30)).astype(np.float32)
    prior = make_prior(np.log(np.maximum(np.tile(pi, (contexts, 1)), 1e-30)))
    return logits, prior, softmax(logits[:1])[0] - prior_chances(prior.array[:1])[0]


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
    step = grid.step_number(tau)
    symbols, stated = coded(logits, plan_of(prior, 100.0), step, step - 100)
    x = d.astype(np.float64) / grid.step_size(step)
    f = x - np.floor(x)
    chance, floors = f * contexts, np.floor(x) * contexts
    above = symbols.sum(axis=0) - floors  # binomial: how often the symbol is the larger of the two that it can be
    tails = np.minimum(stats.binom.cdf(above, contexts, f), stats.binom.sf(above - 1, contexts, f))
    assert tails[chance > 1e-6].min(initial=1.0) > 1e-4 / (2 * 20 * len(PAIRS) * 3)
    assert not above[chance <= 1e-6].any()
    # Squares as well: the variance that is stated is one of that very mean.
    true = grid.step_size(step) ** 2 * (f * (1 - f)).sum()
    assert stated == pytest.approx(true, rel=0.15, abs=1e-5)


@pytest.mark.slow
def test_tiny_probabilities_are_right_on_average() -> None:
    """20,000 tokens of 2e-6 that the prior has at e^-40: their sum, which is Poisson; false-alarm rate 1e-4."""
    vocab, contexts, tau = 20_000, 400, 0.5
    p = np.full(vocab, 2e-6)
    p[0] = 1 - p[1:].sum()
    logits, prior, d = repeated(p, np.eye(vocab)[0], contexts)
    step = grid.step_number(tau)
    symbols, _ = coded(logits, plan_of(prior, 100.0), step)
    expected = contexts * float(d[1:].sum(dtype=np.float64)) / grid.step_size(step)
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
    x = d / Head.from_bytes(payload).tau
    f = x - np.floor(x)
    chances = decode(SAMPLES, payload, plan).chances
    assert chances is not None
    mean = (chances - prior_chances(prior.array)).mean(axis=0, dtype=np.float64) - d
    deviation = Head.from_bytes(payload).tau * np.sqrt(f * (1 - f) / contexts)
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
    assert decoded.chances is not None
    error = np.square(decoded.chances - softmax(logits)).sum(axis=1)
    assert abs(error.mean() - sum(stated) / 2000) < 4 * error.std() / math.sqrt(2000) + 0.02 * error.mean()
    # By tokens it is spread as the prior's probabilities, and given for the logarithm.
    label = np.maximum(decoded.chances, prior_chances(prior.array) / 64)
    assert (decoded.variance * np.square(label)).sum() == pytest.approx(sum(stated), rel=1e-3)
    assert np.allclose(decoded.values, np.log(label), atol=1e-5)


def test_symbols_are_those_of_the_definition() -> None:
    """Against floor(d / tau + u) of all coordinates, with draws made the plain way."""
    logits, prior = scene(40, 3000, away=1.5)
    plan = plan_of(prior, 100.0)
    d = softmax(logits) - prior_chances(prior.array)
    keys = keys_of(plan, range(40))
    u = (np.stack([all_draws(key, 3000) for key in keys]) + 0.5) / 2.0**32
    for tau in (1.0, 0.1, 0.01, 0.0003):
        step = grid.step_number(tau)
        found, _ = coded(logits, plan, step, max(step - 300, 0))
        assert np.array_equal(found, np.floor(d / grid.step_size(step) + u))
        assert np.count_nonzero(found) > 0
    assert [draw(keys[3], all_draws(keys[3], 3000)[v] >> 16, v) for v in (0, 7, 2999)] == [
        all_draws(keys[3], 3000)[v] for v in (0, 7, 2999)
    ]


@pytest.mark.parametrize(("change", "slots"), [(False, 1), (False, 3), (False, 8), (False, 2**16), (True, 1)])
def test_the_sieve_leaves_out_no_candidate_and_is_the_same_in_numpy(change: bool, slots: int) -> None:
    rng = np.random.default_rng(3)
    _, prior = scene(1, 6001)
    flat, key = prior.array.ravel(), rng.integers(0, 2**32, 5, np.uint32)
    key[4] >>= 16  # the shift of a slot
    p = (rng.lognormal(0, 2, flat.size) * np.exp(flat / 8)).astype(np.float32) if change else np.empty(0, np.float32)
    upper = all_draws(key, 6001) >> 16
    shifts = (rng.integers(0, slots, 20) << 16) // slots
    for tau in (4.0, 0.3, 0.02, 1e-4, 1e-6):
        bounds = grid.make_sieve(grid.log_ratios(grid.step_number(tau)), slots)
        for lane in range(0, 6001, sieving.LANES):
            found = []
            for sift in (sieving.sift, sieving.sift_reference):
                scratch = sieving.Scratch.make(6001)
                end = min(lane + sieving.LANES, 6001)
                count = sift(key, flat, p, 0, lane, end, 65536 / tau, bounds, scratch)
                found.append(scratch.places[:count].copy())
                assert np.array_equal(scratch.halves[lane:end], upper[lane:end])
            assert np.array_equal(found[0], found[1])
            pi, levels = np.exp(flat[lane:end] / 8), -flat[lane:end]
            for shift in shifts:
                u = ((all_draws(key, 6001)[lane:end] + (shift << 16)) % 2**32 + 0.5) / 2.0**32
                needed = ((1 - u) * tau / pi < 15) | (u * tau / pi < 1.3)
                close = ((upper[lane:end] + shift) % 65536 + bounds.reaches[levels]) % 65536 < bounds.widths[levels]
                assert not (needed & ~close).any()
                if change:
                    x = (p[lane:end] - pi) / tau + u
                    needed |= (x < 0) | (x >= 1)
                assert np.isin(lane + np.flatnonzero(needed), found[0]).all()


@pytest.mark.parametrize("name", ["few", "many", "ends apart", "one missing", "own draws", "a slot twice"])
def test_nodes_that_are_read_together_are_read_as_each_by_itself(name: str) -> None:
    logits, prior = scene(90, 700)
    count = {"many": 11}.get(name, 5)
    slots = {"own draws": 1, "one missing": 6}.get(name, count)
    places = [k // 2 if name == "a slot twice" else k for k in range(count)]
    plans = [
        plan_of(prior, 500.0 if name == "ends apart" and k == 2 else 30.0, node=k, slot=places[k] % slots, slots=slots)
        for k in range(count)
    ]
    payloads = [encode(SAMPLES, logits + np.float32(0.1 * k) * logits[::-1], plan) for k, plan in enumerate(plans)]
    if name == "one missing":
        payloads[3] = b""
    readers = [SAMPLES.reader(payload, plan) for payload, plan in zip(payloads, plans, strict=True)]
    ranges = [range(13), range(13, 13), range(13, 90)]
    together = list(sparse_together(readers, ranges))
    assert [len(nodes) for nodes in together] == [count] * 3
    for k, (payload, plan) in enumerate(zip(payloads, plans, strict=True)):
        alone = SAMPLES.reader(payload, plan)
        for nodes, expected in zip(together, alone.sparse(ranges), strict=True):
            assert nodes[k].rows == expected.rows
            assert nodes[k].noise == expected.noise
            for one, other in zip(nodes[k][1:4], expected[1:4], strict=True):
                assert np.array_equal(np.asarray(one), np.asarray(other))
        assert (readers[k].learnt is None) == (alone.learnt is None) == (payload == b"")
        assert payload == b"" or np.array_equal(np.asarray(readers[k].learnt), np.asarray(alone.learnt))
    with pytest.raises(FrameError, match="is cut or changed"):
        list(sparse_together([*readers, SAMPLES.reader(payloads[0][:-1], plans[0])]))


def test_one_pass_over_the_prior_serves_all_nodes() -> None:
    logits, prior = scene(100, 300)
    watched = Recording(prior.array)
    plans = [plan_of(watched, 30.0, node=k, slot=k, slots=4) for k in range(4)]
    payloads = [encode(SAMPLES, logits, plan) for plan in plans]
    watched.asked.clear()
    readers = [SAMPLES.reader(payload, plan) for payload, plan in zip(payloads, plans, strict=True)]
    assert len(list(sparse_together(readers, [range(60), range(60, 100)]))) == 2
    assert watched.read_once()


def test_exponentials_and_sums_are_the_same_in_numpy() -> None:
    x = np.linspace(-120, 0, 20_001)
    for kind in (np.float32, np.float64):
        logits, found = x.astype(kind) + 7, []
        for function in (kernels.exponentials, kernels.exponentials_reference):
            found.append(kernels.room_for(x.size))
            function(logits, logits[-1], found[-1])
        assert np.array_equal(found[0], found[1])
        truth = np.exp((logits - logits[-1]).astype(np.float32).astype(np.float64))
        ours, near = found[0][: x.size], x > -86
        assert np.abs(ours[near] / truth[near] - 1).max() < 4e-7
        assert ours[~near].max() < 1e-37
        sums = [each(found[0], np.empty(kernels.SUMS, np.float32)) for each in (kernels.total, kernels.total_reference)]
        assert sums[0] == sums[1] == pytest.approx(truth.sum(), rel=1e-6)


@pytest.mark.parametrize("total", [1e-6, 0.05, 3.0])
def test_a_prior_that_does_not_add_up_to_one_is_as_good(total: float) -> None:
    """Symbols below zero are found wherever they are, also beyond all candidates."""
    logits, prior = scene(30, 500)
    lower = ArrayPrior(np.clip(prior.array + round(8 * math.log(total)), LEAST_PRIOR, 0).astype(np.int16))
    plan = plan_of(lower, 100.0)
    u = (np.stack([all_draws(key, 500) for key in keys_of(plan, range(30))]) + 0.5) / 2.0**32
    step = grid.step_number(0.003)
    found, _ = coded(logits, plan, step, step - 200)
    expected = np.floor((softmax(logits) - prior_chances(lower.array)) / grid.step_size(step) + u)
    assert np.array_equal(found, expected)
    assert (found < 0).any()


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
def test_where_chances_tie_two_steps_fill_the_budget(vocab: int, seen: int, bits: float) -> None:
    """Symbols that are all equal change together from one step to the next, and the length jumps."""
    logits, prior = tied(1500, vocab, seen)
    plan = plan_of(prior, bits)
    payload = encode(SAMPLES, logits, plan)
    head = Head.from_bytes(payload)
    assert 0 < head.finer < 1500
    assert 0.99 * plan.budget_bytes <= len(payload) <= plan.budget_bytes
    taus = head.taus(range(1500))
    assert np.allclose(taus[[0, head.finer - 1]], grid.step_size(head.step - 1))
    assert np.allclose(taus[[head.finer, -1]], grid.step_size(head.step))
    u = (np.stack([all_draws(key, vocab) for key in keys_of(plan, range(1500))]) + 0.5) / 2.0**32
    d = softmax(logits) - prior_chances(prior.array)
    steps = np.where(np.arange(1500) < head.finer, grid.step_size(head.step - 1), head.tau)[:, None]
    label = prior_chances(prior.array) + steps * np.floor(d / steps + u)
    chances = decode(SAMPLES, payload, plan).chances
    assert chances is not None
    # Beside float32's last digit, and the few symbols that hang by it.
    assert (np.abs(chances - label) > 1e-5).mean() < 1e-3
    f = d / steps - np.floor(d / steps)
    assert head.noise == pytest.approx((steps**2 * f * (1 - f)).sum() / 1500, rel=0.05)
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
            noise[vocab, bits] = Head.from_bytes(encode(SAMPLES, logits, plan_of(prior, bits))).noise
    assert noise[250, 30.0] < noise[250, 10.0] / 3
    assert noise[4000, 30.0] < 2 * noise[250, 30.0]


def test_more_contexts_than_are_held_are_coded_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from fpld.codecs.samples import coding

    logits, prior = scene(600, 200)
    plan = plan_of(prior, 60.0)
    held = encode(SAMPLES, logits, plan)
    monkeypatch.setattr(coding, "HELD", 100 * 200)
    for stride in (7, 600):
        payload = SAMPLES.encode((logits[at : at + stride] for at in range(0, 600, stride)), plan)
        assert 0.99 * plan.budget_bytes <= len(payload) <= plan.budget_bytes
        assert abs(Head.from_bytes(payload).step - Head.from_bytes(held).step) <= 4


class Recording:
    """A prior that notes what it is asked for."""

    def __init__(self, array: Array) -> None:
        self.array, self.shape, self.asked = array, array.shape, list[range]()

    @property
    def digest(self) -> bytes:
        return bytes(32)

    def block(self, rows: range) -> Array:
        self.asked.append(rows)
        return self.array[rows.start : rows.stop]

    def read_once(self) -> bool:
        once = [row for rows in self.asked for row in rows] == list(range(self.shape[0]))
        small = max(map(len, self.asked)) * self.shape[1] <= 1 << 20
        self.asked.clear()
        return once and small


def test_the_prior_is_read_once_in_order_and_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from fpld.codecs.samples import coding

    monkeypatch.setattr(coding, "HELD", 1 << 18)
    logits, prior = scene(1500, 1000)
    watched = Recording(prior.array)
    plan = plan_of(watched, 20.0)
    payload = SAMPLES.encode([logits[:700], logits[700:]], plan)
    assert watched.read_once()
    reader = SAMPLES.reader(payload, plan)
    reader.check()
    assert watched.read_once()
    (whole,) = reader.sparse([range(1500)])
    assert watched.read_once()
    assert len(list(reader.blocks([range(1499), range(1499, 1500)]))) == 2
    assert watched.read_once()
    parts = list(reader.sparse([range(100), range(100, 100), range(100, 1500)]))
    assert [part.rows for part in parts] == [range(100), range(100, 100), range(100, 1500)]
    assert np.array_equal(np.concatenate([part.tokens for part in parts]), whole.tokens)
    assert np.array_equal(np.concatenate([part.changes for part in parts]), whole.changes)
    assert sum(part.noise for part in parts) == pytest.approx(whole.noise)


def test_sparse_changes_are_the_dense_labels() -> None:
    logits, prior = scene(50, 300)
    plan = plan_of(prior, 40.0)
    payload = encode(SAMPLES, logits, plan)
    (found,) = SAMPLES.reader(payload, plan).sparse([range(50)])
    label = prior_chances(prior.array).astype(np.float64)
    for row in range(50):
        own = slice(found.starts[row], found.starts[row + 1])
        assert len(set(found.tokens[own].tolist())) == len(found.tokens[own])
        label[row, found.tokens[own]] += found.changes[own]
    chances = decode(SAMPLES, payload, plan).chances
    assert chances is not None
    assert np.allclose(chances, label, atol=1e-6)
    assert [str(part.dtype) for part in found[1:4]] == ["int64", "int32", "float32"]


def test_what_was_learnt_saves_bits_in_the_next_round() -> None:
    logits, prior = scene(300, 200, away=0.15)
    plan = plan_of(prior, 20.0)
    reader = SAMPLES.reader(encode(SAMPLES, logits, plan), plan)
    reader.check()
    learnt = reader.learnt
    assert learnt is not None
    assert (learnt.shape, str(learnt.dtype)) == ((PLACES,), "uint16")
    more = plan_of(prior, 20.0, round=4, learnt=learnt)
    payload = encode(SAMPLES, logits, more)
    SAMPLES.reader(payload, more).check()
    assert Head.from_bytes(payload).noise < 0.99 * Head.from_bytes(encode(SAMPLES, logits, plan)).noise
    with pytest.raises(FrameError):
        SAMPLES.reader(payload, plan_of(prior, 20.0, round=4)).check()
    for wrong in (learnt[1:], learnt.astype(np.int32), np.zeros_like(learnt)):
        with pytest.raises(InputError, match="learnt must be"):
            encode(SAMPLES, logits, plan_of(prior, 20.0, learnt=wrong))


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
        np.abs(part.changes).max(initial=0) <= 1.001 + Head.from_bytes(payload).tau
        for part in reader.sparse()
        if payload
    )
    chances = decode(SAMPLES, payload, plan).chances
    assert chances is not None
    assert np.isfinite(chances).all()


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
    finest = Head.from_bytes(payload).step == 0  # then there is no more to send
    assert len(payload) >= 0.99 * plan.budget_bytes or (finest and (prior, kind) in LITTLE)


def sound_or_refused(payload: bytes, plan: Plan) -> bool:
    """Whether a payload is refused; if not, all that is read is within what symbols can be."""
    try:
        reader = SAMPLES.reader(payload, plan)
        reader.check()
    except FrameError:
        return True
    tau = Head.from_bytes(payload).tau if payload else 0.0
    for part in reader.sparse():
        assert part.tokens.size == part.changes.size == part.starts[-1] <= 16 * len(payload)
        assert (np.diff(part.starts) >= 0).all()
        assert ((part.tokens >= 0) & (part.tokens < plan.vocab)).all()
        assert np.abs(part.changes).max(initial=0) <= 2 + 2 * tau
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
        (Head(grid.STEPS, 0.1), "step must be below"),
        (Head(grid.OFFSET, -0.1), "noise must lie"),
        (Head(grid.OFFSET, 2.1), "noise must lie"),
        (Head(grid.OFFSET, math.nan), "noise must lie"),
        (Head(grid.OFFSET, math.inf), "noise must lie"),
        (Head(0, 1e-9, 3), "not 0 beside a finer one, got 0"),
        (Head(grid.OFFSET, 0.1, 6), "fewer contexts than 6"),
    ],
)
def test_heads_that_no_encoder_writes_are_refused(head: Head, match: str) -> None:
    plan = plan_of(make_prior(np.zeros((6, 50))), 100.0)
    with pytest.raises(FrameError, match=match):
        SAMPLES.reader(head.to_bytes() + b"\1", plan)
    two = Head(grid.OFFSET, 0.1, 3).to_bytes()
    assert Head.from_bytes(two).finer == 3
    with pytest.raises(FrameError, match="one context at least, got 0"):
        SAMPLES.reader(two[:HEAD_BYTES] + bytes(5), plan)
    with pytest.raises(FrameError, match="at least 10 bytes, got 9"):
        SAMPLES.reader(two[:9], plan)
    with pytest.raises(FrameError, match=f"at least {HEAD_BYTES} bytes, got 3"):
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
    assert decoded.chances is not None
    assert np.array_equal(decoded.chances, prior_chances(prior.array))
    (part,) = SAMPLES.reader(b"", plan).sparse()
    assert part.tokens.size == 0
    assert part.starts.tolist() == [0] * 7
    assert part.noise > 0


@pytest.mark.slow
def test_without_numba_the_bytes_are_the_same() -> None:
    """The kernels as plain Python: what a site without numba sends."""
    assert without_numba("tests.test_samples", "small") == small()


def small() -> list[str]:
    """Payloads in hexadecimal, and what they decode to."""
    out = []
    for away, bits in ((1.0, 40.0), (4.0, 300.0)):
        logits, prior = scene(6, 70, away)
        plan = plan_of(prior, bits)
        payload = encode(SAMPLES, logits, plan)
        chances = decode(SAMPLES, payload, plan).chances
        assert chances is not None
        out += [payload.hex(), str(np.abs(chances).sum(dtype=np.float64).round(4))]
    return out
