"""Accounting against the library that does it, another library, and the closed form."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from scipy.stats import norm

from fpld.errors import InputError
from fpld.privacy import (
    DpSteps,
    Mechanism,
    PrivateText,
    RandomSource,
    calibrate_mechanism,
    epsilon,
    forecast_noise,
    noise_for,
)

pytestmark = pytest.mark.slow


DELTA = 1e-5
# noise multiplier, sampling rate, steps; all units in each step at the rate of 1
SETTINGS = [
    (0.7, 0.003, 100),
    (0.9, 0.01, 200),
    (1.0, 0.01, 1000),
    (1.2, 0.05, 200),
    (2.0, 0.05, 600),
    (3.0, 0.2, 600),
    (5.0, 0.3, 100),
    (7.0, 0.2, 600),
    (10.0, 0.5, 40),
    (20.0, 0.9, 100),
]
FULL = [(1.1, 1), (2.2, 1), (3.7, 1), (1.9, 3), (2.5, 3), (6.5, 3), (1.95, 10), (4.4, 10), (12.0, 10), (34.0, 600)]
ALL_SETTINGS = [*SETTINGS, *((noise, 1.0, steps) for noise, steps in FULL)]


@pytest.mark.parametrize(("noise", "rate", "steps"), ALL_SETTINGS)
def test_epsilon_is_that_of_dp_accounting(noise: float, rate: float, steps: int) -> None:
    """By its distributions themselves, not by its accountant, which ours goes through."""
    one = pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-4, use_connect_dots=True
    )
    expected = one.self_compose(steps).get_epsilon_for_delta(DELTA)
    assert epsilon([DpSteps(noise, rate, steps)], DELTA) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize(("noise", "rate", "steps"), ALL_SETTINGS)
def test_epsilon_is_that_of_opacus(noise: float, rate: float, steps: int) -> None:
    """Opacus brackets it by numerical accounting (PRV), and Rényi accounting is never below."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    found = epsilon([DpSteps(noise, rate, steps)], DELTA)
    numerical = PRVAccountant()
    moments = RDPAccountant()
    numerical.history = moments.history = [(noise, rate, steps)]
    error = 0.01
    upper = numerical.get_epsilon(DELTA, eps_error=error)
    assert upper - 2 * error - 0.002 * found <= found <= upper + 0.002 * found
    assert found <= moments.get_epsilon(DELTA) + 1e-6


@pytest.mark.parametrize(("noise", "steps"), FULL)
def test_without_sampling_it_is_the_closed_form(noise: float, steps: int) -> None:
    """Balle and Wang (2018): the Gaussian mechanism's exact curve, composed."""
    found = epsilon([DpSteps(noise, 1.0, steps)], DELTA)
    mu = math.sqrt(steps) / noise
    delta = norm.cdf(mu / 2 - found / mu) - math.exp(found) * norm.cdf(-mu / 2 - found / mu)
    assert delta == pytest.approx(DELTA, rel=0.01)


def test_noise_keeps_the_promise_and_a_little_less_would_not() -> None:
    for target, rate, steps in ((3.0, 0.2, 100), (1.0, 0.05, 60)):
        noise = noise_for(target, DELTA, rate=rate, steps=steps)
        assert epsilon([DpSteps(noise, rate, steps)], DELTA) <= target
        assert epsilon([DpSteps(noise - 0.002, rate, steps)], DELTA) > target


def test_noise_is_that_of_dp_accounting() -> None:
    rate = 0.3
    steps = 50
    target = 2.0
    expected = dp_accounting.calibrate_dp_mechanism(
        pld.PLDAccountant,
        lambda noise: dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps
        ),
        target,
        DELTA,
    )
    assert noise_for(target, DELTA, rate=rate, steps=steps) == pytest.approx(expected, abs=0.002)


def test_steps_compose_whatever_their_order() -> None:
    parts = [DpSteps(3.0, 0.2, 100), DpSteps(5.0, 0.3, 40), DpSteps(3.0, 0.2, 200)]
    together = epsilon(parts, DELTA)
    assert together == epsilon(parts[::-1], DELTA) == epsilon([DpSteps(3.0, 0.2, 300), DpSteps(5.0, 0.3, 40)], DELTA)
    assert together > max(epsilon([part], DELTA) for part in parts)
    assert epsilon([], DELTA) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be greater than 0"),
        ({"epsilon": math.inf}, "epsilon must be finite"),
        ({"delta": 0.0}, "delta must lie between 0 and 1"),
        ({"delta": 1.0}, "delta must lie between 0 and 1"),
        ({"rate": 1.5}, "rate must be at most 1"),
        ({"steps": 0}, "steps must be"),
        ({"epsilon": 1e-7, "rate": 1.0, "steps": 10**6}, "epsilon must be larger"),
    ],
)
def test_what_cannot_be_promised_is_refused(changes: dict[str, float], message: str) -> None:
    given = {"epsilon": 1.0, "delta": DELTA, "rate": 0.1, "steps": 100} | changes
    with pytest.raises(InputError, match=message):
        noise_for(given["epsilon"], given["delta"], rate=given["rate"], steps=int(given["steps"]))


def test_a_forecast_says_how_loud_the_noise_is() -> None:
    forecast = forecast_noise(1.0, DELTA, units=1000, numbers=10_000, steps=10, sites=4)
    assert forecast.noise == noise_for(1.0, DELTA, rate=1.0, steps=10)
    # Drawn, not by the formula: the norm of the mean of ten vectors of noise, in clips.
    drawn = np.random.default_rng(0).normal(0.0, forecast.noise / 1000, (10, 10_000)).mean(0)
    assert forecast.norm == pytest.approx(np.linalg.norm(drawn), rel=0.05)
    assert forecast.ratio == pytest.approx(2 * forecast.site_ratio)
    enough = forecast_noise(1.0, DELTA, units=forecast.units, numbers=10_000, steps=10, sites=4)
    assert enough.site_ratio == pytest.approx(1.0, rel=0.01)
    with pytest.raises(InputError, match="units must be"):
        forecast_noise(8.0, DELTA, units=0, numbers=1, steps=1)


def test_full_batches_take_every_unit_and_smaller_ones_a_share() -> None:
    text = PrivateText(np.zeros((40, 3), np.int32), np.arange(41))

    def mechanism(batch: int | None) -> Mechanism:
        return calibrate_mechanism(text, epsilon=1.0, delta=DELTA, clip=1.0, batch=batch, windows=1, steps=10)

    full = mechanism(None)
    assert (full.rate, full.noise) == (1.0, noise_for(1.0, DELTA, rate=1.0, steps=10))
    assert mechanism(10).rate == 0.25
    assert len(list(text.draw(full.rate, 1, RandomSource.seeded(0)))) == 40
