"""The contract of a codec, one row for each codec: within budget, round trip, any block, honest variance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fpld import BudgetError, Codec, FrameError, InputError, UniformCodec
from fpld.codecs import Float32Codec
from tests.helpers import ADVERSARIAL, make_plan

# A codec and the plan fields that it is tried under.
CODECS = [
    pytest.param(UniformCodec(), {"clip": 3.0}, id="uniform-clip"),
    pytest.param(UniformCodec(), {"clip": None, "bits": 150.25}, id="uniform-range"),
    pytest.param(UniformCodec(), {"clip": 3.0, "slot": 2, "slots": 5}, id="uniform-stratified"),
    pytest.param(Float32Codec(), {"clip": None, "bits": 1600.0}, id="float32"),
]


def logits(shape: tuple[int, int], seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).uniform(-3, 3, shape).astype(np.float32)


@pytest.mark.parametrize(("codec", "fields"), CODECS)
def test_round_trip_within_the_reported_error(codec: Codec, fields: dict[str, Any]) -> None:
    plan = make_plan(**fields)
    values = logits(plan.shape)
    decoded, variance = codec.decode(codec.encode(values, plan), plan)
    assert decoded.shape == plan.shape
    assert decoded.dtype == np.float32
    assert (np.abs(decoded - values) <= np.sqrt(3 * variance) + 1e-5).all()


@pytest.mark.parametrize(("codec", "fields"), CODECS)
def test_reported_variance_is_the_measured_one(codec: Codec, fields: dict[str, Any]) -> None:
    """Mean of squared errors over its expectation; false-alarm rate 1e-4 (variance of a squared uniform)."""
    plan = make_plan(**{**fields, "contexts": 500, "vocab": 200, "bits": 520.0})
    if codec.least_bits(plan) > plan.bits:
        plan = replace(plan, bits=codec.least_bits(plan))
    values = logits(plan.shape)
    decoded, variance = codec.decode(codec.encode(values, plan), plan, dtype=np.float64)
    if not variance.any():
        assert np.array_equal(decoded, values)
        return
    scaled = np.square(decoded - values) / variance
    assert abs(scaled.mean() - 1) < stats.norm.isf(1e-4 / 2) * np.sqrt(0.8 / scaled.size)


@pytest.mark.parametrize(("codec", "fields"), CODECS)
def test_a_block_is_that_part_of_the_whole(codec: Codec, fields: dict[str, Any]) -> None:
    plan = make_plan(**{**fields, "contexts": 23})
    payload = codec.encode(logits(plan.shape), plan)
    values, variance = codec.decode(payload, plan)
    for start in range(23):
        part = codec.decode(payload, plan, rows=range(start, min(start + 4, 23)))
        assert np.array_equal(part.values, values[start : start + 4])
        whole = np.broadcast_to(variance, values.shape)[start : start + 4]
        assert np.array_equal(np.broadcast_to(part.variance, part.values.shape), whole)


@pytest.mark.parametrize(("codec", "fields"), CODECS)
@pytest.mark.parametrize("cut", ["shorter", "longer", "empty"])
def test_payloads_of_another_length_are_refused(codec: Codec, fields: dict[str, Any], cut: str) -> None:
    plan = make_plan(**fields)
    payload = codec.encode(logits(plan.shape), plan)
    wrong = {"shorter": payload[:-1], "longer": payload + b"\0", "empty": b""}[cut]
    with pytest.raises(FrameError, match="payload"):
        codec.decode(wrong, plan)


@pytest.mark.parametrize(("codec", "fields"), CODECS)
def test_the_least_budget_works_and_less_is_refused(codec: Codec, fields: dict[str, Any]) -> None:
    plan = make_plan(**fields)
    plan = replace(plan, bits=codec.least_bits(plan))
    values = logits(plan.shape)
    assert codec.decode(codec.encode(values, plan), plan).values.shape == plan.shape
    with pytest.raises(BudgetError, match="bits must be at least"):
        codec.encode(values, replace(plan, bits=plan.bits * 0.8))


@pytest.mark.parametrize(("codec", "fields"), CODECS)
@given(st.data())
def test_hostile_payloads_give_an_error_or_values_in_range(
    codec: Codec, fields: dict[str, Any], data: st.DataObject
) -> None:
    plan = make_plan(**fields)
    size = len(codec.encode(logits(plan.shape), plan))
    payload = data.draw(st.binary(min_size=size, max_size=size))
    try:
        values, variance = codec.decode(payload, plan)
    except FrameError:
        return
    assert np.isfinite(values).all()
    assert (variance >= 0).all()
    if plan.clip is not None:
        assert (np.abs(values) <= plan.clip + np.sqrt(3 * variance) + 1e-5).all()


@pytest.mark.parametrize(("codec", "fields"), CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_place(codec: Codec, fields: dict[str, Any], bad: float) -> None:
    plan = make_plan(**fields)
    values = logits(plan.shape)
    values[4, 17] = bad
    with pytest.raises(InputError, match="context 4, token 17"):
        codec.encode(values, plan)


@pytest.mark.parametrize(("codec", "fields"), CODECS)
def test_wrong_shapes_types_and_rows_are_refused(codec: Codec, fields: dict[str, Any]) -> None:
    plan = make_plan(**fields)
    with pytest.raises(InputError, match=r"shape .*\(6, 50\).*\(50, 6\)"):
        codec.encode(logits((50, 6)), plan)
    with pytest.raises(InputError, match="floating"):
        codec.encode(np.zeros(plan.shape, np.int64), plan)
    payload = codec.encode(logits(plan.shape), plan)
    with pytest.raises(InputError, match="rows"):
        codec.decode(payload, plan, rows=range(5, 7))


@pytest.mark.parametrize(("codec", "fields"), CODECS)
def test_half_precision_equal_and_denormal_logits_have_a_defined_result(codec: Codec, fields: dict[str, Any]) -> None:
    plan = make_plan(**fields)
    for values in (np.full(plan.shape, 2.5, np.float16), np.full(plan.shape, 1e-310), np.zeros(plan.shape)):
        decoded, variance = codec.decode(codec.encode(values, plan), plan, dtype=np.float64)
        assert (np.abs(decoded - values) <= np.sqrt(3 * variance) + 1e-6).all()


@settings(max_examples=300)
@given(
    st.integers(1, 40),
    st.integers(2, 300),
    st.floats(1, 20),
    st.booleans(),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.integers(0, 2**32 - 1),
)
def test_uniform_never_exceeds_any_real_budget(
    contexts: int, vocab: int, rate: float, own: bool, kind: str, seed: int
) -> None:
    codec = UniformCodec()
    plan = make_plan(contexts=contexts, vocab=vocab, bits=vocab * rate + (40 if own else 0), clip=None if own else 2.0)
    values = ADVERSARIAL[kind](np.random.default_rng(seed), plan.shape)
    payload = codec.encode(values, plan)
    assert 8 * len(payload) <= contexts * plan.bits
    assert 8 * len(payload) > min(contexts * plan.bits, contexts * vocab * 16) - 8
    decoded, variance = codec.decode(payload, plan, dtype=np.float64)
    true = values if own else np.clip(values, -2, 2)
    assert (np.abs(decoded - true) <= np.sqrt(3 * variance) * (1 + 1e-9) + 1e-9).all()


def test_below_one_bit_per_coordinate_is_an_error_that_says_so() -> None:
    with pytest.raises(BudgetError, match=r"at least 50 per probe context \(one bit per coordinate\).*got 49.9"):
        UniformCodec().encode(logits((6, 50)), make_plan(bits=49.9))
    with pytest.raises(BudgetError, match="set clip"):
        UniformCodec().encode(logits((6, 50)), make_plan(bits=60.0, clip=None))


def test_logits_beyond_half_precision_need_a_clip() -> None:
    with pytest.raises(InputError, match="set clip"):
        UniformCodec().encode(np.full((6, 50), 1e6), make_plan(bits=100.0, clip=None))


def test_golden_payload() -> None:
    """These bytes are the format: a change here is a new version of the wire."""
    plan = make_plan(contexts=2, vocab=10, bits=25.0)
    values = np.linspace(-3, 3, 20).reshape(2, 10)
    payload = UniformCodec().encode(values, plan)
    assert payload.hex() == "01861a8492cf"
    plan = make_plan(contexts=2, vocab=10, bits=58.0, clip=None)
    assert UniformCodec().encode(values, plan).hex() == "51beb03d513eb03d07ed1f07ed24"


def test_a_range_for_each_context_beats_one_clip_on_uneven_contexts() -> None:
    values = logits((40, 256)) * np.linspace(0.1, 1, 40)[:, None].astype(np.float32)
    errors = []
    for clip in (3.0, None):
        plan = make_plan(contexts=40, vocab=256, bits=4 * 256.0, clip=clip)
        decoded = UniformCodec().decode(UniformCodec().encode(values, plan), plan).values
        errors.append(float(np.square(decoded - values).mean()))
    assert errors[1] < errors[0] / 1.8
