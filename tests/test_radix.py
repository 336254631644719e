"""Mixed-radix words: every layout fits its bits exactly, every symbol comes back, every other word is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpld import FrameError
from fpld.codecs.radix import MAX_LOW, WORD, layout, pack, radices, unpack

sizes = st.integers(2, 400).flatmap(lambda v: st.tuples(st.just(v), st.integers(0, 16 * v)))


@given(sizes)
def test_layout_takes_exactly_its_bits_and_every_coordinate_once(size: tuple[int, int]) -> None:
    vocab, bits = size
    plan = layout(vocab, bits)
    assert sum(group.lanes * group.width for group in plan.groups) + plan.low * vocab == bits
    assert plan.levels().shape == (vocab,)
    assert plan.levels().min() >= (2 if bits >= vocab else 1)
    for group in plan.groups:
        assert math.prod(group.radices) <= 2**group.width <= 2**WORD


@given(sizes, st.integers(0, 2**32 - 1))
def test_symbols_come_back(size: tuple[int, int], seed: int) -> None:
    plan = layout(*size)
    symbols = np.random.default_rng(seed).integers(0, plan.levels(), (3, size[0]))
    symbols[0] = plan.levels() - 1
    symbols[1] = 0
    bits = pack(symbols, plan)
    assert bits.shape == (3, size[1])
    assert np.array_equal(unpack(bits, plan), symbols)


@given(sizes, st.integers(0, 2**32 - 1))
def test_random_bits_are_refused_or_are_what_an_encoder_writes(size: tuple[int, int], seed: int) -> None:
    plan = layout(*size)
    bits = np.random.default_rng(seed).integers(0, 2, (1, size[1]), np.uint8)
    try:
        symbols = unpack(bits, plan)
    except FrameError:
        return
    assert ((symbols >= 0) & (symbols < plan.levels())).all()
    assert np.array_equal(pack(symbols, plan), bits)


@pytest.mark.parametrize(
    ("bits", "ratio"),
    [(1, 1.0), (1.5, 1.26), (2, 1.0), (2.37, 1.06), (3.37, 1.05), (4, 1.0), (5.5, 1.05), (8.37, 1.04)],
)
def test_fractional_bits_cost_little(bits: float, ratio: float) -> None:
    """Mean distortion over that of the ideal real number of levels 2^b; one N for all is at 3.3 for 1.5 bits."""
    levels = layout(32000, int(32000 * bits)).levels()
    assert np.mean(1.0 / (levels - 1) ** 2) * (2**bits - 1) ** 2 <= ratio + 1e-9


def test_golden_layout_and_bits() -> None:
    plan = layout(10, 17)
    assert [(group.lanes, group.width, group.radices) for group in plan.groups] == [
        (1, 17, (4, 4, 3, 3, 3, 3, 3, 3, 3, 3))
    ]
    bits = pack(np.array([[3, 0, 2, 1, 0, 2, 1, 0, 2, 1]]), plan)
    # By hand: the digits are the number 84031 of 104976, and ceil(84031 * 2^17 / 104976) = 104921.
    assert "".join(map(str, bits[0])) == f"{104921:017b}"


def test_radices_use_the_room() -> None:
    for width in range(25):
        for digits in range(1, 30):
            product = math.prod(radices(width, digits))
            assert product <= 2**width < product * 2 ** (1 if width < digits else 0.6 + digits / 8)


def test_low_bits_are_limited() -> None:
    assert layout(4, 64).low == MAX_LOW
    assert layout(4, 64).levels().tolist() == [65536] * 4
