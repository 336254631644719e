"""Units of text, the draws that choose among them, and the noise: each for what it is."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fpld.errors import InputError
from fpld.privacy import PrivateText, RandomSource, calibrate_mechanism, cut_text
from fpld.privacy.sampling import PADDING, by_window

ALARM = 1e-6
"""The false-alarm rate of each statistical test here; seeds are fixed, so that none ever comes by chance."""


def units(count: int) -> PrivateText:
    return PrivateText(np.arange(count)[:, None], np.arange(count + 1))


def test_every_token_is_in_one_window_of_its_own_document() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 60)
    groups = rng.integers(0, 25, 60)
    tokens = np.arange(lengths.sum())
    text = cut_text(tokens, lengths, groups, window=7)
    kept = text.windows[text.windows != PADDING]
    assert len(set(kept.tolist())) == len(kept)
    # A single token at the end of a document predicts nothing and is left out.
    assert len(kept) == len(tokens) - sum(length % 8 == 1 for length in lengths)
    owner = np.repeat(groups, lengths)
    for unit in range(text.units):
        rows = text.windows[text.starts[unit] : text.starts[unit + 1]]
        assert len({int(owner[token]) for token in rows[rows != PADDING]}) == 1
    assert text.units == len({int(group) for group, length in zip(groups, lengths, strict=True) if length > 1})
    assert by_window(text).units == len(text.windows)


@pytest.mark.slow
def test_the_sampler_is_poisson() -> None:
    """Every unit by itself with the same chance: numbers of units and of pairs are binomial."""
    count = 40
    rate = 0.15
    steps = 20_000
    text = units(count)
    chance = RandomSource.seeded(1)
    taken = np.zeros((steps, count), bool)
    for step in range(steps):
        for windows in text.draw(rate, 1, chance):
            taken[step, windows[0]] = True
    sizes = taken.sum(axis=1)
    assert sizes.min() == 0  # an empty step comes with chance 0.85^40 = 0.0015
    expected = stats.binom.pmf(np.arange(16), count, rate) * steps
    seen = np.bincount(sizes, minlength=count + 1)
    table = np.append(seen[:16], seen[16:].sum()), np.append(expected, steps - expected.sum())
    assert stats.chisquare(*table).pvalue > ALARM
    each = taken.sum(axis=0)
    assert stats.binomtest(int(each.max()), steps, rate).pvalue > ALARM / count
    assert stats.binomtest(int(each.min()), steps, rate).pvalue > ALARM / count
    pairs = (taken.T.astype(int) @ taken.astype(int))[np.triu_indices(count, 1)]
    deviation = np.sqrt(steps * rate**2 * (1 - rate**2))
    assert abs(pairs - steps * rate**2).max() < deviation * stats.norm.isf(ALARM / pairs.size)
    follows = (taken[1:] & taken[:-1]).sum()  # no step depends on the one before
    assert stats.binomtest(int(follows), (steps - 1) * count, rate**2).pvalue > ALARM


def test_of_a_long_unit_some_windows_are_drawn_all_with_the_same_chance() -> None:
    text = PrivateText(np.arange(12)[:, None], np.array([0, 2, 12]))
    chance = RandomSource.seeded(2)
    seen = np.zeros(12)
    for _ in range(4000):
        short, long = text.draw(1.0, 3, chance)
        assert short.ravel().tolist() == [0, 1]
        assert len(set(long.ravel().tolist())) == 3
        seen[long.ravel()] += 1
    assert stats.chisquare(seen[2:]).pvalue > ALARM


@pytest.mark.parametrize("chance", [RandomSource.seeded(3), RandomSource.secret()], ids=["seeded", "secret"])
def test_noise_is_normal_and_draws_are_uniform(chance: RandomSource) -> None:
    """The secret draws change with every run of this test: its false-alarm rate is real, 2e-6."""
    found = chance.normals(200_001)
    assert found.shape == (200_001,)
    assert stats.kstest(found, "norm").pvalue > ALARM
    assert abs(np.corrcoef(found[:100_000], found[100_000:200_000])[0, 1]) < stats.norm.isf(ALARM / 2) / 100_000**0.5
    assert stats.kstest(chance.uniforms(100_000), "uniform").pvalue > ALARM


def test_secret_draws_are_not_repeated() -> None:
    assert not np.array_equal(RandomSource.secret().normals(4), RandomSource.secret().normals(4))


def test_a_unit_larger_than_the_data_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"privacy.batch must be at most the number of units in a node's text, 5, got 8"
    ):
        calibrate_mechanism(units(5), epsilon=1.0, delta=1e-5, clip=1.0, batch=8, windows=1, steps=10)
