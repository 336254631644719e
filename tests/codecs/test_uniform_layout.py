"""Mixed-radix words: every layout fits its bytes exactly, every symbol comes back, any bytes are symbols."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpld.codecs.uniform.layout import MAX_LEVELS, MAX_RADIX, WORD, make_layout, pack_symbols, radices, unpack_symbols

sizes = st.integers(2, 400).flatmap(lambda v: st.tuples(st.just(v), st.integers(0, 2 * v)))


@given(sizes)
def test_layout_takes_exactly_its_bytes_and_every_coordinate_once(size: tuple[int, int]) -> None:
    vocab, count = size
    plan = make_layout(vocab, count)
    assert sum(g.lanes * g.width // 8 for g in plan.groups) + sum(p.length for p in plan.planes) == count
    assert sum(plane.width for plane in plan.planes) == plan.low
    assert plan.levels().shape == (vocab,)
    assert plan.levels().min() >= (2 if 8 * count >= vocab else 1)
    assert plan.levels().max() <= MAX_LEVELS
    for group in plan.groups:
        assert math.prod(group.radices) <= 2**group.width <= 2**WORD
        assert max(group.radices, default=1) <= MAX_RADIX


@given(sizes, st.integers(0, 2**32 - 1))
def test_symbols_come_back(size: tuple[int, int], seed: int) -> None:
    plan = make_layout(*size)
    symbols = np.random.default_rng(seed).integers(0, plan.levels(), (3, size[0]))
    symbols[0] = plan.levels() - 1
    symbols[1] = 0
    data = pack_symbols(symbols, plan)
    assert data.shape == (3, size[1])
    assert np.array_equal(unpack_symbols(data, plan), symbols)


@given(sizes, st.integers(0, 2**32 - 1))
def test_any_bytes_are_symbols_below_their_levels(size: tuple[int, int], seed: int) -> None:
    plan = make_layout(*size)
    data = np.random.default_rng(seed).integers(0, 256, (2, size[1]), np.uint8)
    symbols = unpack_symbols(data, plan)
    assert ((symbols >= 0) & (symbols < plan.levels())).all()
    assert np.array_equal(unpack_symbols(pack_symbols(symbols, plan), plan), symbols)


@pytest.mark.parametrize(
    ("bits", "ratio"),
    [
        *((bits, 1.0) for bits in (1, 2, 3, 4, 5, 6, 7, 8, 12, 15)),
        *((1.5, 1.26), (2.37, 1.08), (3.37, 1.07), (5.5, 1.08), (7.5, 1.07), (8.37, 1.05)),
    ],
)
def test_fractional_bits_cost_little(bits: float, ratio: float) -> None:
    """Mean distortion over that of the ideal real number of levels 2^b; one N for all is at 3.3 for 1.5 bits."""
    levels = make_layout(32000, int(4000 * bits)).levels()
    assert np.mean(1.0 / (levels - 1) ** 2) * (2**bits - 1) ** 2 <= ratio + 1e-9


def test_golden_layout_and_bytes() -> None:
    plan = make_layout(10, 3)
    assert [(g.start, g.lanes, g.width, g.radices) for g in plan.groups] == [
        (0, 1, 16, (5, 5, 5, 5, 5, 5, 4)),
        (7, 1, 8, (7, 6, 6)),
    ]
    data = pack_symbols(np.array([[4, 0, 2, 1, 3, 2, 1, 6, 0, 5]]), plan)
    # By hand: the digits are the numbers 51169 of 62500 and 221 of 252, and the words ceil(51169 2^16 / 62500) = 53655
    # and ceil(221 2^8 / 252) = 225, lower byte first.
    assert data[0].tolist() == [53655 % 256, 53655 // 256, 225]


def test_golden_planes() -> None:
    """Five bits: a digit of 16 levels, and a plane of one raw bit, eight coordinates a byte."""
    plan = make_layout(16, 10)
    assert plan.low == 1
    symbols = np.arange(16, dtype=np.int64)[None] * 2 + np.array([1, 0, 0, 1] * 4)
    data = pack_symbols(symbols, plan)
    # A plane of two bytes: byte j holds coordinates j, j + 2, ..., the first in its lowest bit.
    assert data[0, -2:].tolist() == [0b01010101, 0b10101010]
    assert np.array_equal(unpack_symbols(data, plan), symbols)


def test_radices_use_the_room() -> None:
    for width in range(17):
        for digits in range(1, 30):
            product = math.prod(radices(width, digits, 2**16))
            assert product <= 2**width < product * 2 ** (1 if width < digits else 0.6 + digits / 8)
