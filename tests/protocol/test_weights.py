"""Packed weights: round trips of every bit pattern, golden bytes, hostile bytes, and how much smaller they are."""

from __future__ import annotations

import hashlib
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest

from fpld.errors import InputError, ProtocolError
from fpld.protocol.weights import HEADER, decode_delta, delta_digests, encode_delta, round_weights, weights_digest

RNG = np.random.default_rng(3)
Weights = dict[str, np.ndarray[Any, Any]]


def patterns(dtype: str, size: int) -> np.ndarray[Any, Any]:
    """Return numbers of every kind of bit pattern but NaN: huge, tiny, of either sign, infinite, minus zero."""
    kind = np.dtype(dtype)
    found = RNG.integers(0, 256, size * kind.itemsize, dtype=np.uint8).view(kind)
    if kind.kind == "f":
        found = np.where(np.isnan(found), kind.type(-0.0), found)
        found[:4] = [0.0, -0.0, np.inf, -np.inf]
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int32", "int16", "uint8"])
def test_every_bit_comes_back(dtype: str) -> None:
    old = {"b": patterns(dtype, 4000).reshape(40, 100), "a": patterns(dtype, 16), "c": np.zeros((0, 3), dtype)}
    new = {
        name: patterns(dtype, array.size).reshape(array.shape) if array.size else array for name, array in old.items()
    }
    new["a"] = old["a"].copy()
    found = decode_delta(encode_delta(new, old), old)
    assert {name: (value.tobytes(), value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.tobytes(), value.dtype, value.shape) for name, value in new.items()
    }


def test_a_number_without_a_shape_and_views_are_arrays_too() -> None:
    old = {"one": np.array(2.0, np.float32), "turned": np.arange(12, dtype=np.float32).reshape(3, 4).T}
    new = {"one": np.array(-3.5, np.float32), "turned": old["turned"] + 1}
    found = decode_delta(encode_delta(new, old), old)
    assert weights_digest(found) == weights_digest(new)
    assert found["one"].shape == ()


def test_golden_bytes() -> None:
    """The stream inside zlib, whose own bytes are each machine's: a change here is a new version."""
    old: Weights = {"w": np.array([1.0, -2.0, 0.5], np.float32), "same": np.array([7], np.int64)}
    new: Weights = {"w": np.array([1.0, -2.1, 0.75], np.float32), "same": np.array([7], np.int64)}
    data = encode_delta(new, old)
    assert data[:8] == b"FPWD" + bytes.fromhex("01000000")
    assert delta_digests(data) == (weights_digest(old), weights_digest(new))
    assert zlib.decompress(data[HEADER.size :]).hex() == "0001" + "00cb00" + "00cc00" + "000c80" + "000000"
    half = zlib.decompress(encode_delta(round_weights(new, 16), old)[HEADER.size :])
    assert half.hex() == "0002" + "006500" + "000004"


def test_what_students_look_like_takes_less() -> None:
    """Weights that change by a twentieth of their spread: three quarters of the bytes, and with 16 bits a third."""
    old = {"w": RNG.normal(0, 0.05, (300, 300)).astype(np.float32)}
    new = {"w": old["w"] + RNG.normal(0, 0.0025, (300, 300)).astype(np.float32)}
    size = old["w"].nbytes
    assert len(encode_delta(new, old)) < 0.78 * size
    assert len(encode_delta(round_weights(new, 16), old)) < 0.38 * size
    assert len(encode_delta(old, old)) < 200


def test_sixteen_bits_are_the_nearest_and_too_large_ones_are_said() -> None:
    weights: Weights = {"w": RNG.normal(0, 1, 1000).astype(np.float32), "n": np.arange(3)}
    found = round_weights(weights, 16)
    assert found["w"].dtype == np.float32
    assert np.array_equal(found["w"], weights["w"].astype(np.float16).astype(np.float32))
    assert np.array_equal(round_weights(found, 16)["w"], found["w"])
    assert np.array_equal(found["n"], weights["n"])
    assert round_weights(weights, 32)["w"] is weights["w"]
    with pytest.raises(InputError, match=r"combine\.weight_bits must be 32: a weight of 'w' is 100000"):
        round_weights({"w": np.array([1.0, -1e5], np.float32)}, 16)


@pytest.mark.slow
def test_hostile_bytes_are_refused_and_allocate_nothing() -> None:
    old = {"w": RNG.normal(0, 1, 500).astype(np.float32)}
    new = {"w": old["w"] + np.float32(0.01)}
    good = encode_delta(new, old)
    head = good[: HEADER.size]
    body = good[HEADER.size :]
    stream = zlib.decompress(body)
    for bad, message in (
        (b"", "at least 72 bytes"),
        (b"FPWX" + good[4:], "must be of version 1"),
        (good[:4] + b"\x02" + good[5:], "must be of version 1"),
        (good[:8] + bytes(32) + good[40:], "are a difference to are not here"),
        (good[:40] + bytes(32) + good[72:], "digest"),
        (head + b"not zlib", "must be a zlib stream"),
        (good[:-3], "one whole zlib stream"),
        (good + b"more", "one whole zlib stream"),
        (head + zlib.compress(b"\x07" + stream[1:]), "forms 0, 1 or"),
        (head + zlib.compress(b""), "forms 0, 1 or"),
        (head + zlib.compress(stream[:-1]), "are cut off"),
        (head + zlib.compress(b"\x00" + stream[1:]), "must hold 1 bytes"),
        (head + zlib.compress(bytes([1]) + bytes(len(stream) - 1)), "digest"),
    ):
        with pytest.raises(ProtocolError, match=message):
            decode_delta(bad, old)
    bomb = head + zlib.compress(bytes(1 << 28), 9)
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="at most 2001 bytes"):
        decode_delta(bomb, old)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    flipped = 0
    for place in range(0, len(good), 7):
        flip = bytearray(good)
        flip[place] ^= 16
        try:
            assert weights_digest(decode_delta(bytes(flip), old)) == weights_digest(new)  # a bit that zlib ignores
        except ProtocolError:
            flipped += 1
    assert flipped > len(good) / 8


def test_weights_of_another_shape_are_not_packed() -> None:
    old = {"w": np.zeros(3, np.float32)}
    for new in ({"w": np.zeros(4, np.float32)}, {"w": np.zeros(3)}, {"v": np.zeros(3, np.float32)}, {}):
        with pytest.raises(InputError, match="same shape and type"):
            encode_delta(new, old)


def test_the_digest_is_that_of_a_plain_file() -> None:
    assert weights_digest({}) == hashlib.sha256((24).to_bytes(8, "little") + b'{"__metadata__":{}}     ').hexdigest()
