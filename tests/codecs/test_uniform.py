"""The uniform codec's own: errors within half a step, budgets to the byte, ranges that each context states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpld import BudgetError, FrameError, InputError, decode, encode
from fpld.codecs import UniformCodec
from tests.codecs.codec_rows import draw
from tests.helpers import ADVERSARIAL, make_plan

CODEC = UniformCodec()
PLANS = [{"clip": 3.0}, {"clip": None, "bits": 150.25}, {"clip": 3.0, "slot": 2, "slots": 5}]


@pytest.mark.parametrize("fields", PLANS)
def test_round_trip_within_the_reported_error(fields: dict[str, Any]) -> None:
    plan = make_plan(**fields)
    values = draw(*plan.shape)
    decoded = decode(CODEC, encode(CODEC, values, plan), plan)
    assert (np.abs(decoded.values - values) <= np.sqrt(3 * decoded.variance) + 1e-5).all()


@settings(max_examples=300)
@given(
    st.integers(1, 40),
    st.integers(2, 300),
    st.floats(1, 20),
    st.booleans(),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.integers(0, 2**32 - 1),
)
def test_it_fills_any_real_budget_and_never_exceeds_it(
    contexts: int, vocab: int, rate: float, own: bool, kind: str, seed: int
) -> None:
    plan = make_plan(contexts=contexts, vocab=vocab, bits=vocab * rate + (40 if own else 0), clip=None if own else 2.0)
    values = ADVERSARIAL[kind](np.random.default_rng(seed), plan.shape)
    payload = encode(CODEC, values, plan)
    assert 8 * len(payload) <= contexts * plan.bits
    assert 8 * (len(payload) + 1) >= min(contexts * plan.bits, contexts * vocab * 15)
    decoded = decode(CODEC, payload, plan, dtype=np.float64)
    true = values if own else np.clip(values, -2, 2)
    # The channel is float32: half a step, and a few units in the last place of the range.
    slack = 2.0**-22 * max(np.abs(true).max(), plan.clip or 2.0**-24)
    assert (np.abs(decoded.values - true) <= np.sqrt(3 * decoded.variance) * (1 + 1e-6) + slack).all()


@pytest.mark.parametrize("fields", PLANS)
@given(st.data())
def test_any_bytes_of_the_right_length_decode_to_values_in_range(fields: dict[str, Any], data: st.DataObject) -> None:
    plan = make_plan(**fields)
    size = CODEC.payload_bytes(plan)
    try:
        decoded = decode(CODEC, data.draw(st.binary(min_size=size, max_size=size)), plan)
    except FrameError:
        assert plan.clip is None  # a range that is not a number
        return
    if plan.clip is not None:
        assert (np.abs(decoded.values) <= plan.clip + np.sqrt(3 * decoded.variance) + 1e-5).all()


def test_below_one_bit_per_coordinate_is_an_error_that_says_so() -> None:
    with pytest.raises(BudgetError, match=r"at least 50 per probe context \(one bit per coordinate\).*got 49.9"):
        encode(CODEC, draw(6, 50), make_plan(bits=49.9))
    with pytest.raises(BudgetError, match="set clip"):
        encode(CODEC, draw(6, 50), make_plan(bits=60.0, clip=None))


def test_logits_beyond_half_precision_need_a_clip() -> None:
    with pytest.raises(InputError, match="set clip"):
        encode(CODEC, np.full((6, 50), 1e6), make_plan(bits=100.0, clip=None))


def test_a_range_for_each_context_beats_one_clip_on_uneven_contexts() -> None:
    values = draw(40, 256) * np.linspace(0.1, 1, 40)[:, None].astype(np.float32)
    errors = []
    for clip in (3.0, None):
        plan = make_plan(contexts=40, vocab=256, bits=4 * 256.0, clip=clip)
        decoded = decode(CODEC, encode(CODEC, values, plan), plan).values
        errors.append(float(np.square(decoded - values).mean()))
    assert errors[1] < errors[0] / 1.8
