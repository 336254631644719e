"""The contract of a codec, one row for each codec: within budget, round trip, any block, no trust in bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fpld import BudgetError, FrameError, InputError, decode, encode
from fpld.codecs import make_prior
from fpld.numerics import centre, kl
from fpld.registry import codecs
from tests.codecs.codec_rows import OWN, ROWS, Row, draw, each_codec
from tests.helpers import ADVERSARIAL

if TYPE_CHECKING:
    from fpld import Decoded, Plan


# Bits per coordinate at which a codec is near its least, and has something to send.
LOW = {row.name: max(1.2 * row.least().bits / 50, 1.0) for row in ROWS}


def sound(decoded: Decoded, shape: tuple[int, int]) -> bool:
    """Every field is float32, finite and broadcasts to the values; no variance is negative."""
    fields = [decoded.values, decoded.variance, decoded.bias]
    fields += [] if decoded.probabilities is None else [decoded.probabilities]
    broadcast = all(np.broadcast_shapes(field.shape, shape) == shape for field in fields)
    finite = all(field.dtype == np.float32 and np.isfinite(field).all() for field in fields)
    return decoded.values.shape == shape and broadcast and finite and bool((decoded.variance >= 0).all())


def same(one: Decoded, other: Decoded) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        return np.array_equal(np.broadcast_to(a, one.values.shape), np.broadcast_to(b, one.values.shape))

    return one.values.shape == other.values.shape and all(map(equal, one, other))


def part_of(whole: Decoded, rows: range) -> Decoded:
    fields = (None if f is None else np.broadcast_to(f, whole.values.shape)[rows.start : rows.stop] for f in whole)
    return type(whole)(*fields)  # type: ignore[arg-type]


def test_every_codec_of_the_package_has_a_row() -> None:
    assert {id(row.codec) for row in OWN} == {id(codecs.get(name)) for name in codecs.names()}
    codes = {row.codec.code for row in ROWS}
    assert len(codes) == len({type(row.codec) for row in ROWS})
    assert codes <= set(range(1, 65536))


@each_codec
def test_a_rich_budget_gives_the_distribution_back(row: Row) -> None:
    plan = row.plan()
    values = draw(*plan.shape)
    decoded = decode(row.codec, encode(row.codec, values, plan), plan)
    assert sound(decoded, plan.shape)
    assert kl(values, decoded.values - decoded.bias - values).max() < 0.02


@each_codec
def test_any_ranges_give_that_part_of_the_whole(row: Row) -> None:
    plan = row.plan(contexts=23)
    payload = encode(row.codec, draw(*plan.shape), plan)
    whole = decode(row.codec, payload, plan)
    for edges in ((0, 23), (0, 1, 2, 9, 23), (0, 0, 5, 5, 20, 23, 23), range(24)):
        ranges = [range(*pair) for pair in pairwise(edges)]
        found = list(row.codec.reader(payload, plan).blocks(ranges))
        assert len(found) == len(ranges)
        for rows, block in zip(ranges, found, strict=True):
            assert same(block, part_of(whole, rows))
    own = list(row.codec.reader(payload, plan).blocks())
    assert np.array_equal(np.concatenate([block.values for block in own]), whole.values)
    for start in range(0, 23, 4):
        rows = range(start, min(start + 6, 23))
        assert same(decode(row.codec, payload, plan, rows), part_of(whole, rows))


@each_codec
def test_a_reader_that_seeks_begins_anywhere_and_another_refuses(row: Row) -> None:
    plan = row.plan(contexts=9)
    payload = encode(row.codec, draw(*plan.shape), plan)
    reader = row.codec.reader(payload, plan)
    if row.codec.traits.seeks:
        (last,) = reader.blocks([range(7, 9)])
        (first,) = reader.blocks([range(2)])
        whole = decode(row.codec, payload, plan)
        assert same(last, part_of(whole, range(7, 9)))
        assert same(first, part_of(whole, range(2)))
    else:
        with pytest.raises(InputError, match="rows must follow each other from the first context on"):
            next(reader.blocks([range(7, 9)]))


@each_codec
def test_blocks_as_they_come_give_the_same_bytes(row: Row) -> None:
    plan = row.plan(contexts=23)
    logits = draw(*plan.shape)
    whole = encode(row.codec, logits, plan)
    for stride in (1, 5, 22):
        blocks = (logits[start : start + stride] for start in range(0, 23, stride))
        assert row.codec.encode(blocks, plan) == whole
    with pytest.raises(InputError, match="23 contexts in all, got 20"):
        row.codec.encode((logits[start : start + 5] for start in range(0, 20, 5)), plan)
    with pytest.raises(InputError, match=r"n at most 3 at context 20, got \(5, 50\)"):
        row.codec.encode((logits[:5] for _ in range(5)), plan)
    with pytest.raises(InputError, match=r"n at most 0 at context 23"):
        row.codec.encode([logits, logits[:1]], plan)


@each_codec
def test_the_least_budget_works_and_less_is_refused(row: Row) -> None:
    plan = row.least()
    values = draw(*plan.shape)
    assert sound(decode(row.codec, encode(row.codec, values, plan), plan), plan.shape)
    with pytest.raises(BudgetError, match="bits must be at least"):
        encode(row.codec, values, row.plan(bits=plan.bits * 0.8))


@each_codec
@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(2, 300),
    st.floats(1, 20),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.integers(0, 2**32 - 1),
)
def test_no_budget_is_exceeded(row: Row, contexts: int, vocab: int, factor: float, kind: str, seed: int) -> None:
    plan = row.least(contexts=contexts, vocab=vocab)
    plan = row.plan(contexts=contexts, vocab=vocab, bits=plan.bits * factor)
    payload = encode(row.codec, ADVERSARIAL[kind](np.random.default_rng(seed), plan.shape), plan)
    assert 8 * len(payload) <= contexts * plan.bits
    assert sound(decode(row.codec, payload, plan), plan.shape)


def refused(row: Row, payload: bytes, plan: Plan) -> bool:
    """Whether a check refuses a payload; if not, nothing in it fails, and what it decodes to is sound."""
    try:
        row.codec.reader(payload, plan).check()
    except FrameError:
        with pytest.raises(FrameError):
            decode(row.codec, payload, plan)
        return True
    assert sound(decode(row.codec, payload, plan), plan.shape)
    return False


@each_codec
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_hostile_payloads_are_refused_or_decode_to_finite_values(row: Row, data: st.DataObject) -> None:
    plan = row.plan(contexts=3, rate=data.draw(st.sampled_from([LOW[row.name], 33.0])))
    payload = encode(row.codec, draw(*plan.shape), plan)
    kind = data.draw(st.sampled_from(["noise", "altered", "cut", "longer", "empty"]))
    if kind == "noise":
        payload = data.draw(st.binary(min_size=len(payload), max_size=len(payload)))
    elif kind == "altered":
        altered = bytearray(payload)
        for _ in range(data.draw(st.integers(1, 30))):
            altered[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        payload = bytes(altered)
    elif kind == "cut":
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    else:
        payload = payload + data.draw(st.binary(min_size=1, max_size=9)) if kind == "longer" else b""
    refused(row, payload, plan)
    refused(row, memoryview(payload), plan)  # type: ignore[arg-type]


@each_codec
def test_what_an_encoder_wrote_passes_and_a_byte_more_does_not(row: Row) -> None:
    for rate in (LOW[row.name], 33.0):
        plan = row.plan(rate=rate)
        payload = encode(row.codec, draw(*plan.shape), plan)
        assert not refused(row, payload, plan)
        assert refused(row, payload + b"\0", plan)


@each_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_place(row: Row, bad: float) -> None:
    plan = row.plan()
    values = draw(*plan.shape)
    values[4, 17] = bad
    with pytest.raises(InputError, match="context 4, token 17"):
        encode(row.codec, values, plan)
    with pytest.raises(InputError, match="context 4, token 17"):
        row.codec.encode([values[:3], values[3:]], plan)


@each_codec
def test_wrong_shapes_types_and_rows_are_refused(row: Row) -> None:
    plan = row.plan()
    with pytest.raises(InputError, match=r"shape .*\(6, 50\).*\(50, 6\)"):
        encode(row.codec, draw(50, 6), plan)
    with pytest.raises(InputError, match="floating"):
        encode(row.codec, np.zeros(plan.shape, np.int64), plan)
    payload = encode(row.codec, draw(*plan.shape), plan)
    for wrong in (range(5, 7), range(0, 6, 2)):
        with pytest.raises(InputError, match="rows"):
            decode(row.codec, payload, plan, rows=wrong)
        with pytest.raises(InputError, match="rows"):
            list(row.codec.reader(payload, plan).blocks([wrong]))


@each_codec
def test_half_precision_equal_and_denormal_logits_have_a_defined_result(row: Row) -> None:
    plan = row.plan()
    half = draw(*plan.shape).astype(np.float16)
    assert encode(row.codec, half, plan) == encode(row.codec, half.astype(np.float32), plan)
    for values in (np.full(plan.shape, 2.5, np.float16), np.full(plan.shape, 1e-310), np.zeros(plan.shape)):
        decoded = decode(row.codec, encode(row.codec, values, plan), plan, dtype=np.float64)
        assert decoded.values.dtype == np.float64
        assert np.abs(centre(decoded.values)).max() < 1e-2


@each_codec
def test_traits_are_what_the_codec_does(row: Row) -> None:
    """A prior and a slot change the bytes only of a codec that says so; one that refines codes any real numbers."""
    traits = row.codec.traits
    size = {"contexts": 40, "vocab": 60, "rate": max(4.0, LOW[row.name])}
    logits = draw(40, 60)
    prior = make_prior(draw(40, 60, seed=5))
    for field, changes in (("prior", {"prior": prior}), ("dither", {"slot": 2, "slots": 5})):
        plain = row.plan(**size)  # type: ignore[arg-type]
        changed = row.plan(**{**size, **changes})  # type: ignore[arg-type]
        if not getattr(traits, field):
            assert encode(row.codec, logits, plain) == encode(row.codec, logits, changed)
    if traits.refines:
        plan = row.plan(contexts=40, vocab=60)
        residual = (logits - draw(40, 60, seed=7)) / 30
        decoded = decode(row.codec, encode(row.codec, residual, plan), plan)
        assert np.abs(centre(decoded.values - residual)).max() < 2e-3 * (plan.clip or 1)
    if not traits.prior:
        assert row.codec.reader(encode(row.codec, logits, row.plan(**size)), row.plan(**size)).learnt is None  # type: ignore[arg-type]


def test_codecs_that_need_a_prior_or_dither_make_use_of_it() -> None:
    logits = draw(40, 60)
    found = {}
    for row in OWN:
        plan = row.plan(contexts=40, vocab=60, rate=max(4.0, LOW[row.name]))
        found[row.name] = encode(row.codec, logits, plan)
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize("row", [row for row in OWN if not row.codec.traits.prior], ids=lambda row: row.name)
def test_reported_variance_and_bias_are_the_measured_ones(row: Row) -> None:
    """Means of squared errors and of exp(error - bias) over their expectations; false-alarm rate 1e-4 each."""
    plan = row.plan(contexts=500, vocab=200, rate=2.6 if "uniform" in row.name else 32.0)
    values = draw(*plan.shape)
    decoded = decode(row.codec, encode(row.codec, values, plan), plan, dtype=np.float64)
    error = decoded.values - values
    if not decoded.variance.any():
        assert not error.any()
        assert not decoded.bias.any()
        return
    scaled = np.square(error) / decoded.variance
    limit = stats.norm.isf(1e-4 / 2)
    assert abs(scaled.mean() - 1) < limit * np.sqrt(0.8 / scaled.size)  # the variance of a squared uniform
    factor = np.exp(error - decoded.bias)
    assert abs(factor.mean() - 1) < limit * factor.std() / np.sqrt(factor.size)
    assert abs(np.exp(error).mean() - 1) > 2 * limit * factor.std() / np.sqrt(factor.size)  # so the line above can fail
