"""Accounting against the library that does it, another library, and the closed form."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting import pld
from scipy.stats import norm

from fpld.errors import InputError
from fpld.privacy import DpSteps, epsilon, noise_for

pytestmark = pytest.mark.slow


DELTA = 1e-5
# noise multiplier, sampling rate, steps
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


@pytest.mark.parametrize(("noise", "rate", "steps"), SETTINGS)
def test_epsilon_is_that_of_dp_accounting(noise: float, rate: float, steps: int) -> None:
    """By its distributions themselves, not by its accountant, which ours goes through."""
    one = pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-4, use_connect_dots=True
    )
    expected = one.self_compose(steps).get_epsilon_for_delta(DELTA)
    assert epsilon([DpSteps(noise, rate, steps)], DELTA) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize(("noise", "rate", "steps"), SETTINGS)
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


@pytest.mark.parametrize(("noise", "steps"), [(2.0, 1), (5.0, 16), (34.0, 600)])
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
