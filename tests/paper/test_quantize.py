"""The channel of Assumptions 5 and 5': error exactly uniform, mean zero, independent of everything else.

Every statistical test is one large draw on a fixed seed with a false-alarm rate of 1e-4.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fpld import InputError
from fpld.codecs.dither import Dither
from fpld.paper.quantize import Quantizer, paper_quantizer, wire_quantizer

ALARM = 1e-4
SHAPE = (400, 500)

QUANTIZERS = [
    pytest.param(paper_quantizer(1.5, 0.0), id="paper-0-bits"),
    pytest.param(paper_quantizer(1.5, 1.0), id="paper-1-bit"),
    pytest.param(paper_quantizer(1.5, 2.37), id="paper-2.37-bits"),
    pytest.param(wire_quantizer(1.5, 2), id="wire-2-levels"),
    pytest.param(wire_quantizer(1.5, 5), id="wire-5-levels"),
    pytest.param(wire_quantizer(1.5, 65536), id="wire-16-bits"),
]


def dither(node: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return Dither.derive(bytes(16), round=5, node=node).block(range(SHAPE[0]), SHAPE[1])


def inputs() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Values that sit on edges, on zero and in between: what a quantizer without dither would be biased on."""
    rng = np.random.default_rng(4)
    values = rng.choice([-1.5, -0.75, 0.0, 0.1, 1.5], SHAPE)
    return np.where(rng.random(SHAPE) < 0.5, values, rng.uniform(-1.5, 1.5, SHAPE))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_error_is_uniform_with_mean_zero(quantizer: Quantizer) -> None:
    error = (quantizer(inputs(), dither(0)) - inputs()) / quantizer.step
    assert np.abs(error).max() <= 0.5 + 1e-9
    assert stats.kstest(error.ravel() + 0.5, "uniform").pvalue > ALARM
    assert abs(error.mean()) < stats.norm.isf(ALARM / 2) * np.sqrt(1 / 12 / error.size)
    assert error.var() * quantizer.step**2 == pytest.approx(float(quantizer.variance), rel=0.02)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_error_is_independent_of_the_input(quantizer: Quantizer) -> None:
    values = inputs()
    error = ((quantizer(values, dither(0)) - values) / quantizer.step).ravel()
    for value in (-1.5, 0.0, 0.1, 1.5):  # the same distribution at every input
        assert stats.kstest(error[values.ravel() == value] + 0.5, "uniform").pvalue > ALARM / 4
    limit = stats.norm.isf(ALARM / 2) / np.sqrt(error.size)
    for feature in (values.ravel(), np.square(values.ravel())):
        assert abs(np.corrcoef(feature, error)[0, 1]) < limit
        assert abs(np.corrcoef(feature, np.square(error))[0, 1]) < limit


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_errors_are_independent_across_nodes_and_coordinates(quantizer: Quantizer) -> None:
    values = inputs()
    first, second = (quantizer(values, dither(node)) - values for node in (0, 1))
    limit = stats.norm.isf(ALARM / 2) / np.sqrt(first.size)
    for one, other in ((first, second), (first[:, 1:], first[:, :-1]), (first[1:], first[:-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < limit * 1.01
        assert abs(np.corrcoef(np.square(one.ravel()), np.square(other.ravel()))[0, 1]) < limit * 1.01


@given(st.floats(0.01, 100), st.integers(2, 70000), st.integers(0, 2**32 - 1), st.floats(-1, 1))
def test_wire_never_needs_more_symbols_than_it_has(clip: float, levels: int, word: int, place: float) -> None:
    quantizer = wire_quantizer(clip, levels)
    u = np.array([(2 * word + 1 - 2**32) / 2**33])
    index = quantizer.encode(np.array([place * clip]), u)
    assert 0 <= index[0] < levels
    assert abs(quantizer.decode(index, u)[0] - place * clip) <= quantizer.step / 2 * (1 + 1e-9)


def test_paper_channel_takes_one_symbol_more_than_it_charges() -> None:
    quantizer = paper_quantizer(1.0, 2.0)
    ends = quantizer.encode(np.array([-1.0, 1.0]), np.array([-0.49, 0.49]))
    assert ends[1] - ends[0] + 1 == 2**2 + 1


def test_wire_variance_over_the_papers() -> None:
    """DESIGN's 4x at one bit and 1.14x at four: ((2^b) / (2^b - 1))^2."""
    for bits, ratio in ((1, 4.0), (4, 1.1378)):
        assert float(wire_quantizer(1, 2**bits).variance / paper_quantizer(1, bits).variance) == pytest.approx(
            ratio, rel=1e-4
        )


def test_values_outside_are_clipped_and_nothing_is_sent_with_one_level() -> None:
    assert abs(float(wire_quantizer(1, 9)(np.array([50.0]), np.array([0.2]))[0]) - 1) <= 0.125
    silent = wire_quantizer(2.0, 1)
    assert silent(np.array([1.7]), np.array([0.3])).tolist() == [0.0]
    assert float(silent.variance) == 4.0


@pytest.mark.parametrize("clip", [0.0, -1.0, np.nan, np.inf])
def test_bad_clips_are_refused(clip: float) -> None:
    with pytest.raises(InputError, match="clip"):
        paper_quantizer(clip, 2.0)


@pytest.mark.parametrize("bits", [-0.1, np.nan, np.inf])
def test_bad_bits_are_refused(bits: float) -> None:
    with pytest.raises(InputError, match="bits"):
        paper_quantizer(1.0, bits)


def test_bad_levels_are_refused() -> None:
    with pytest.raises(InputError, match="levels"):
        wire_quantizer(1.0, [2, 0])
