"""Sampled labels are read as they are defined: candidates, several nodes in one pass, the prior once and in order."""

from __future__ import annotations

import numpy as np
import pytest

from fpld import FrameError, decode, encode
from fpld.codecs.samples import chances as kernels
from fpld.codecs.samples import grid, sieving
from fpld.codecs.samples.chances import prior_chances
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.samples.draws import all_draws, draw, keys_of
from fpld.codecs.samples.reader import sparse_together
from fpld.numerics import softmax
from tests.test_samples import Array, coded, plan_of, scene


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
