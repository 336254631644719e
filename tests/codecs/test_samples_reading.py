"""Sampled labels are read as they are defined: candidates, several nodes in one pass, the prior once and in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld import FrameError, decode, encode
from fpld.codecs.samples import candidates, probabilities, steps
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.samples.decoder import decode_sparse
from fpld.codecs.samples.draws import context_draws, draw_keys, token_draw
from fpld.codecs.samples.probabilities import prior_probabilities
from fpld.numerics import softmax
from tests.codecs.test_samples import coded, plan_of, scene

if TYPE_CHECKING:
    from fpld.types import Array


def test_symbols_are_those_of_the_definition() -> None:
    """Against floor(d / tau + u) of all coordinates, with draws made the plain way."""
    logits, prior = scene(40, 3000, away=1.5)
    plan = plan_of(prior, 100.0)
    d = softmax(logits) - prior_probabilities(prior.array)
    keys = draw_keys(plan, range(40))
    u = (np.stack([context_draws(key, 3000) for key in keys]) + 0.5) / 2.0**32
    for tau in (1.0, 0.1, 0.01, 0.0003):
        step = steps.tau_to_step(tau)
        symbols, _ = coded(logits, plan, step, max(step - 300, 0))
        assert np.array_equal(symbols, np.floor(d / steps.step_to_tau(step) + u))
        assert np.count_nonzero(symbols) > 0
    assert [token_draw(keys[3], context_draws(keys[3], 3000)[v] >> 16, v) for v in (0, 7, 2999)] == [
        context_draws(keys[3], 3000)[v] for v in (0, 7, 2999)
    ]


@pytest.mark.parametrize(("change", "slots"), [(False, 1), (False, 3), (False, 8), (False, 2**16), (True, 1)])
def test_the_prefilter_leaves_out_no_candidate_and_is_the_same_in_numpy(change: bool, slots: int) -> None:
    rng = np.random.default_rng(3)
    _, prior = scene(1, 6001)
    flat = prior.array.ravel()
    key = rng.integers(0, 2**32, 5, np.uint32)
    key[4] >>= 16  # the shift of a slot
    p = (rng.lognormal(0, 2, flat.size) * np.exp(flat / 8)).astype(np.float32) if change else np.empty(0, np.float32)
    upper = context_draws(key, 6001) >> 16
    shifts = (rng.integers(0, slots, 20) << 16) // slots
    for tau in (4.0, 0.3, 0.02, 1e-4, 1e-6):
        bounds = candidates.prefilter_bounds(steps.log_ratios(steps.tau_to_step(tau)), slots)
        for lane in range(0, 6001, candidates.CHUNK_TOKENS):
            listed = []
            for prefilter in (candidates.prefilter, candidates.prefilter_reference):
                scratch = candidates.PrefilterScratch.allocate(6001)
                end = min(lane + candidates.CHUNK_TOKENS, 6001)
                count = prefilter(key, flat, p, 0, lane, end, 65536 / tau, bounds, scratch)
                listed.append(scratch.tokens[:count].copy())
                assert np.array_equal(scratch.halves[lane:end], upper[lane:end])
            assert np.array_equal(listed[0], listed[1])
            pi = np.exp(flat[lane:end] / 8)
            levels = -flat[lane:end]
            for shift in shifts:
                u = ((context_draws(key, 6001)[lane:end] + (shift << 16)) % 2**32 + 0.5) / 2.0**32
                needed = ((1 - u) * tau / pi < 15) | (u * tau / pi < 1.3)
                close = ((upper[lane:end] + shift) % 65536 + bounds.level_reach[levels]) % 65536 < bounds.level_width[
                    levels
                ]
                assert not (needed & ~close).any()
                if change:
                    x = (p[lane:end] - pi) / tau + u
                    needed |= (x < 0) | (x >= 1)
                assert np.isin(lane + np.flatnonzero(needed), listed[0]).all()


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
    together = list(decode_sparse(readers, ranges))
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
        list(decode_sparse([*readers, SAMPLES.reader(payloads[0][:-1], plans[0])]))


def test_one_pass_over_the_prior_serves_all_nodes() -> None:
    logits, prior = scene(100, 300)
    watched = Recording(prior.array)
    plans = [plan_of(watched, 30.0, node=k, slot=k, slots=4) for k in range(4)]
    payloads = [encode(SAMPLES, logits, plan) for plan in plans]
    watched.asked.clear()
    readers = [SAMPLES.reader(payload, plan) for payload, plan in zip(payloads, plans, strict=True)]
    assert len(list(decode_sparse(readers, [range(60), range(60, 100)]))) == 2
    assert watched.read_once()


def test_exponentials_and_sums_are_the_same_in_numpy() -> None:
    x = np.linspace(-120, 0, 20_001)
    for kind in (np.float32, np.float64):
        logits = x.astype(kind) + 7
        powers = []
        for function in (probabilities.exponentials, probabilities.exponentials_reference):
            powers.append(probabilities.context_buffer(x.size))
            function(logits, logits[-1], powers[-1])
        assert np.array_equal(powers[0], powers[1])
        truth = np.exp((logits - logits[-1]).astype(np.float32).astype(np.float64))
        ours = powers[0][: x.size]
        near = x > -86
        assert np.abs(ours[near] / truth[near] - 1).max() < 4e-7
        assert ours[~near].max() < 1e-37
        sums = [
            each(powers[0], np.empty(probabilities.SUM_LANES, np.float32))
            for each in (probabilities.lane_sum, probabilities.lane_sum_reference)
        ]
        assert sums[0] == sums[1] == pytest.approx(truth.sum(), rel=1e-6)


class Recording:
    """A prior that notes what it is asked for."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape = array.shape
        self.asked = list[range]()

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
    from fpld.codecs.samples import encoder

    monkeypatch.setattr(encoder, "HELD", 1 << 18)
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
    (sparse,) = SAMPLES.reader(payload, plan).sparse([range(50)])
    label = prior_probabilities(prior.array).astype(np.float64)
    for row in range(50):
        part = slice(sparse.starts[row], sparse.starts[row + 1])
        assert len(set(sparse.tokens[part].tolist())) == len(sparse.tokens[part])
        label[row, sparse.tokens[part]] += sparse.changes[part]
    labels = decode(SAMPLES, payload, plan).probabilities
    assert labels is not None
    assert np.allclose(labels, label, atol=1e-6)
    assert [str(field.dtype) for field in sparse[1:4]] == ["int64", "int32", "float32"]
