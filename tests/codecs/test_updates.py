"""Updates in a few bits per weight: their bytes, their error against the known constants, no bias, hostile bytes."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg, stats

from fpld.codecs import updates
from fpld.codecs.updates import (
    HEADER,
    LEVELS,
    MIN_CHUNK,
    SCALE,
    UPDATE_ERRORS,
    affordable_bits,
    check_update,
    chunk_sizes,
    decode_update,
    encode_update,
    share_bits,
    update_bytes,
)
from fpld.errors import FrameError, InputError


def model(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "embedding": rng.normal(size=(100, 37)),
        "bias": rng.normal(size=(5,)).astype(np.float32),
        "a scalar": np.asarray(rng.normal(size=())),
        "nothing": np.zeros((0, 3)),
        "layer": 100 * rng.normal(size=(3, 4, 50)),
    }


@pytest.mark.parametrize("bits", [1, 1.7, 2, 3.5, 8])
def test_names_and_shapes_come_back(bits: float) -> None:
    update = model(np.random.default_rng(0))
    data = encode_update(update, bits=bits, seed=3)
    check_update(data, update)
    back = decode_update(memoryview(data), update, seed=3)
    assert list(back) == list(update)
    for name, array in update.items():
        assert back[name].shape == array.shape
        assert back[name].dtype == np.float32
    shuffled = dict(reversed(update.items()))
    assert encode_update(shuffled, bits=bits, seed=3) == data


def test_the_scale_makes_the_product_with_the_update_its_square() -> None:
    x = np.random.default_rng(0).normal(size=1500)
    for bits in range(1, 9):
        back = decode_update(encode_update({"x": x}, bits=bits, seed=3), {"x": x}, seed=3)["x"]
        assert np.dot(x, back) == pytest.approx(np.square(x).sum(), rel=1e-4)


@pytest.mark.parametrize("count", [1, 7, 256, 257, 1000, 65535, 65537, 1_144_080])
def test_bytes_are_the_levels_the_scales_and_the_header(count: int) -> None:
    update = {"w": np.random.default_rng(0).normal(size=count)}
    sizes = chunk_sizes(count)
    assert 0 <= sum(sizes) - count < MIN_CHUNK
    assert all(size & (size - 1) == 0 for size in sizes)
    for bits in (1, 3):
        data = encode_update(update, bits=bits, seed=0)
        assert len(data) == update_bytes(count, bits) == HEADER.size + 4 * len(sizes) + bits * sum(sizes) // 8
        stated = HEADER.size + 32 * bits + 4 * (count // updates.MAX_CHUNK + 9)
        assert len(data) - math.ceil(count * bits / 8) <= stated


tensors = st.lists(
    st.tuples(st.integers(0, 3000), st.floats(-30, 10)), min_size=1, max_size=8
).filter(lambda sizes: any(size for size, _ in sizes))  # fmt: skip


@given(tensors, st.floats(1, 8), st.booleans(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_no_update_is_longer_than_its_budget(
    shapes: list[tuple[int, float]], bits: float, weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    update = {str(i): math.exp(power) * rng.normal(size=size) for i, (size, power) in enumerate(shapes)}
    weights = {name: float(rng.lognormal(0, 3)) for name in update} if weighted else None
    data = encode_update(update, bits=bits, seed=seed, weights=weights)
    assert len(data) <= update_bytes(sum(array.size for array in update.values()), bits)
    back = decode_update(data, update, seed=seed)
    assert all(np.isfinite(array).all() for array in back.values())


@given(st.integers(1, 200_000), st.integers(0, 250_000), st.floats(1, 8))
def test_affordable_bits_are_the_most_that_fit(count: int, capacity: int, most: float) -> None:
    bits = affordable_bits(count, capacity, most)
    if bits == 0:
        assert update_bytes(count, 1) > capacity
    else:
        assert 1 <= bits <= most
        assert update_bytes(count, bits) <= capacity
        assert bits == most or update_bytes(count, min(bits * (1 + 1e-9) + 8.1 / sum(chunk_sizes(count)), 8)) > capacity


def test_levels_are_those_of_lloyd_and_max() -> None:
    """Each level is the mean of the normal variable between the midpoints to its neighbours, to its last digit."""
    for bits, levels in enumerate(LEVELS, 1):
        assert len(levels) == 2**bits
        np.testing.assert_array_equal(levels, -levels[::-1])
        scaled = levels.astype(float) * (math.sqrt(2 / math.pi) if bits == 1 else 1)
        edges = np.concatenate([[-np.inf], (scaled[1:] + scaled[:-1]) / 2, [np.inf]])
        chances = np.diff(stats.norm.cdf(edges))
        means = -np.diff(stats.norm.pdf(edges))
        np.testing.assert_allclose(scaled, means / chances, atol=1.5e-4)
        kept = float((scaled * means).sum())  # 1 - D
        error = float((scaled**2 * chances).sum()) / kept**2 - 1
        assert error == pytest.approx(UPDATE_ERRORS[bits - 1], rel=1e-4)
    # J. Max, Quantizing for minimum distortion, 1960, table I: D of 2, 4, 8, 16 levels.
    distortions = [error / (1 + error) for error in UPDATE_ERRORS[:4]]
    np.testing.assert_allclose(distortions, [0.3634, 0.1175, 0.03454, 0.009497], rtol=1e-3)


def test_rotation_is_hadamards_and_its_own_inverse() -> None:
    for size in (256, 512, 4096):
        x = np.random.default_rng(size).normal(size=(2, size)).astype(np.float32)
        np.testing.assert_allclose(updates._hadamard(x), x @ linalg.hadamard(size) / math.sqrt(size), atol=1e-4)
        np.testing.assert_allclose(updates._hadamard(updates._hadamard(x)), x, atol=1e-5)


SHAPES = {
    "normal": lambda rng: rng.normal(size=1500),
    "few weights are large": lambda rng: np.where(np.arange(300) < 3, [1.0, 0.5, 0.1] * 100, 1e-4),
    "one weight": lambda rng: np.eye(1, 256)[0],
    "heavy tails": lambda rng: rng.standard_t(2, size=900),
}


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_mean_of_many_has_no_bias(kind: str, bits: int) -> None:
    """The mean over R seeds misses x by a square of E|e|^2 / R, known to some 10 %; a threshold of 1.6 times it.

    The square is a sum over at least 256 coordinates of a mean's square, each nearly a normal's: its relative
    standard deviation is at most sqrt(2 / 256) = 0.09, and 1.6 is six of them: a false alarm below 1e-6 for each row.
    """
    x = np.asarray(SHAPES[kind](np.random.default_rng(1)))
    draws = 600
    back = np.array(
        [
            decode_update(encode_update({"x": x}, bits=bits, seed=seed), {"x": x}, seed=seed)["x"]
            for seed in range(draws)
        ]
    )
    error = np.square(back - x).sum(axis=1).mean()
    assert np.square(back.mean(axis=0) - x).sum() < 1.6 * error / draws


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_error_is_the_known_constant(bits: int) -> None:
    """For d -> infinity the square of the error is D / (1 - D) |x|^2, with one bit pi/2 - 1.

    Over 2^18 weights it varies by some 0.3 %, and a share of it that grows with the bits comes from the tails: 3 % are
    at least six standard deviations, a false alarm below 1e-8.
    """
    assert UPDATE_ERRORS[0] == pytest.approx(math.pi / 2 - 1, rel=1e-5)
    x = np.random.default_rng(2).lognormal(0, 2, size=1 << 18) * np.random.default_rng(3).choice([-1, 1], size=1 << 18)
    back = decode_update(encode_update({"x": x}, bits=bits, seed=1), {"x": x}, seed=1)["x"]
    assert np.square(back - x).sum() / np.square(x).sum() == pytest.approx(UPDATE_ERRORS[bits - 1], rel=0.03)


def test_bits_go_where_they_lower_the_error_most() -> None:
    """Against all shares of bits that fit, for three tensors of equal size and of very different values."""
    sizes = [4096] * 3
    capacity = update_bytes(sum(sizes), 3.1)
    for values in ([1.0, 1.0, 1.0], [1.0, 30.0, 900.0], [1e-6, 1.0, 1.0], [0.0, 0.0, 1.0]):

        def error(widths: list[int], values: list[float] = values) -> float:
            return sum(value * UPDATE_ERRORS[width - 1] for value, width in zip(values, widths, strict=True))

        shares = [list(widths) for widths in itertools.product(range(1, 9), repeat=3)]
        best = min(error(widths) for widths in shares if updates._length(sizes, widths) <= capacity)
        assert error(share_bits(sizes, values, 3.1)) == pytest.approx(best)


def test_default_weights_do_not_let_large_tensors_take_all_bits() -> None:
    rng = np.random.default_rng(0)
    update = {"large": 10 * rng.normal(size=9000), "small": rng.normal(size=9000)}
    for bits in (2, 3):
        assert encode_update(update, bits=bits, seed=0)[3] == bits
    by_square = encode_update(update, bits=2.5, seed=0, weights={"large": 1.0, "small": 1.0})
    assert list(by_square[HEADER.size : HEADER.size + 2]) == [3, 1]


def test_zeros_stay_zeros_and_the_seed_is_the_key() -> None:
    zeros = {"x": np.zeros(300)}
    x = {"x": np.random.default_rng(0).normal(size=3000)}
    for bits in (1, 2.5):
        assert not decode_update(encode_update(zeros, bits=bits, seed=1), zeros, seed=1)["x"].any()
        data = encode_update(x, bits=bits, seed=1)
        assert encode_update(x, bits=bits, seed=1) == data != encode_update(x, bits=bits, seed=2)
        wrong = decode_update(data, x, seed=2)["x"]
        assert abs(np.corrcoef(wrong, x["x"])[0, 1]) < 0.1  # 5.5 standard deviations of none


def check_golden(data: bytes, golden: str, first: int, count: int) -> None:
    """Compare with recorded bytes; the scales are float sums, whose last bit depends on the processor."""
    recorded = bytes.fromhex(golden)
    last = first + SCALE.itemsize * count
    assert data[:first] + data[last:] == recorded[:first] + recorded[last:]
    scales, expected = (np.frombuffer(each, SCALE, count, first) for each in (data, recorded))
    assert np.allclose(scales, expected, rtol=3e-7, atol=0)


def test_golden_bytes() -> None:
    check_golden(encode_update({"w": np.arange(20.0)}, bits=1, seed=12345), GOLDEN_ONE_BIT, HEADER.size, 1)
    update = {"b": np.arange(300.0), "a": np.linspace(-1, 1, 256)}
    data = encode_update(update, bits=1.6, seed=12345)
    check_golden(data, GOLDEN_SHARED, HEADER.size + 2, 3)
    assert list(data[HEADER.size : HEADER.size + 2]) == [2, 1]


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3e38])
def test_scales_that_are_none_are_refused(scale: float) -> None:
    x = {"x": np.ones(300)}
    data = bytearray(encode_update(x, bits=1, seed=0))
    data[HEADER.size : HEADER.size + 4] = struct.pack("<f", scale)
    for read in (check_update, lambda data, like: decode_update(data, like, seed=0)):
        with pytest.raises(FrameError, match="scales of an update"):
            read(bytes(data), x)


def test_bytes_of_another_update_are_refused() -> None:
    x = {"x": np.ones(300), "y": np.ones(4)}
    data = encode_update(x, bits=1, seed=0)
    for wrong in (data[:-1], data + b"\0", data[:3] + b"\2" + data[4:]):
        with pytest.raises(FrameError, match="bytes long"):
            decode_update(wrong, x, seed=0)
    with pytest.raises(FrameError, match="at least"):
        decode_update(b"", x, seed=0)
    with pytest.raises(FrameError, match="must begin with"):
        decode_update(b"B" + data[1:], x, seed=0)
    with pytest.raises(FrameError, match=r"305 weights, got .* 304"):
        decode_update(data, {"x": np.ones(305)}, seed=0)
    with pytest.raises(FrameError, match="must state 1 to 8 bits"):
        decode_update(data[:3] + b"\x09" + data[4:], x, seed=0)
    for widths in (b"\x00\x01", b"\x09\x01", b"\x01"):
        with pytest.raises(FrameError, match="must state 1 to 8 bits"):
            decode_update(data[:3] + b"\0" + data[4:12] + widths, x, seed=0)
    with pytest.raises(FrameError, match="state them once"):
        decode_update(data[:3] + b"\0" + data[4:12] + b"\1\1" + data[12:], x, seed=0)


def test_any_bytes_are_an_update_or_refused() -> None:
    """Ten thousand mutations: FrameError and nothing else, and what is decoded is finite."""
    rng = np.random.default_rng(0)
    like = {"a": rng.normal(size=(20, 30)), "b": 1e-3 * rng.normal(size=90), "c": np.ones(3)}
    samples = [encode_update(like, bits=bits, seed=0) for bits in (1, 1.5, 2.5, 8)]
    decoded = 0
    for number in range(10_000):
        data = bytearray(samples[number % len(samples)])
        for _ in range(int(rng.integers(1, 4))):
            # Half of the changes are in the header and the scales.
            place = int(rng.integers(0, 40 if rng.integers(2) else len(data) + 1))
            kind = rng.integers(8)
            if kind == 0:
                del data[place:]
            elif kind == 1:
                data[place:place] = rng.bytes(int(rng.integers(1, 9)))
            elif place < len(data):
                data[place] = int(rng.integers(256))
        try:
            check_update(bytes(data), like)
        except FrameError:
            with pytest.raises(FrameError):
                decode_update(bytes(data), like, seed=0)
            continue
        decoded += 1
        back = decode_update(bytes(data), like, seed=0)
        assert all(np.isfinite(array).all() for array in back.values())
    assert 1000 < decoded < 9000


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({}, "at least one weight"),
        ({"x": np.zeros(0)}, "at least one weight"),
        ({"x": np.array([1.0, np.nan])}, r"update\['x'\] must hold finite"),
        ({"x": np.array([1e37])}, r"update\['x'\] must hold finite"),
        ({"x": np.array([1, 2])}, r"update\['x'\] must be floating-point"),
    ],
)
def test_an_update_that_cannot_be_sent_is_refused(update: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode_update(update, bits=1, seed=0)


def test_arguments_are_checked() -> None:
    x = {"x": np.ones(3)}
    with pytest.raises(InputError, match="seed must be an integer"):
        encode_update(x, bits=1, seed=-1)
    for bits in (0.5, 8.5, math.nan):
        with pytest.raises(InputError, match="bits per weight must be from 1 to 8"):
            encode_update(x, bits=bits, seed=0)
    for weights in ({}, {"x": -1.0}, {"x": math.nan}):
        with pytest.raises(InputError, match=r"weights\['x'\]"):
            encode_update(x, bits=2, seed=0, weights=weights)


GOLDEN_ONE_BIT = "626974011400000000000000974b7d40ee424f4a48afaaabd4af34e5a3dba3aa9b955eaa661dd59566255bbaa7a0b83b"
GOLDEN_SHARED = (
    "626974002c0200000000000002014cc73d43fcb90c435f50273fbd60a17c4174c603d551f5cb896de09f48c6f4522667ac194b4d8e"
    "42d229d2285eeb3e4b01485b06003033336c594c80c37ed9344039df66593f8106340060f71b4fdab2ee56b526aaaaba986f69df5f16"
    "9586d4e4be9a5ae1439d5b1ca6bb95986d1d5311afe9518828fb92a1a92a98ae2e2995a6eaa99ba5b2873e2fad761b"
)
