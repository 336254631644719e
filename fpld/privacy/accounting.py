"""Accounting of DP-SGD: the epsilon that steps have spent, and the noise that an epsilon takes.

Accounting is by the privacy loss distribution of `dp-accounting` (Google), which bounds the true epsilon from above:
the Gaussian mechanism under Poisson sampling, composed over all steps. `noise_for` inverts the bound, and errs on the
safe side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld import validation
from fpld.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fpld.privacy.sampling import PrivateText

_NOISE_GRID = 1000  # noise multipliers are multiples of a thousandth
_MIN_NOISE = 0.2
_MAX_NOISE = 1e5
_LOG_STRIDE = 0.3  # of the noise, while bounds of it are searched


class DpSteps(NamedTuple):
    """A number of equal steps of DP-SGD: noise multiplier, sampling rate of a unit, how many steps."""

    noise: float
    rate: float
    steps: int


def epsilon(taken: Iterable[DpSteps], delta: float) -> float:
    """Return the epsilon of all steps together, at `delta`; that of no steps is 0."""
    _check_delta(delta)
    total = _merged(taken)
    return _epsilon(total, delta) if total else 0.0


def noise_for(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """Return the least noise multiplier, in thousandths, with which `steps` steps spend at most `epsilon`.

    Parameters
    ----------
    rate
        Probability of a unit to take part in a step.
    """
    validation.real("epsilon", epsilon, above=0.0)
    _check_delta(delta)
    validation.real("rate", rate, above=0.0)
    if rate > 1:
        raise InputError(f"rate must be at most 1, got {rate:g}")
    validation.integer("steps", steps, least=1)
    return _noise(float(epsilon), float(delta), float(rate), int(steps))


@lru_cache
def _noise(target: float, delta: float, rate: float, steps: int) -> float:
    """Search for the root between two bounds in logarithms, where the curve is nearly straight."""
    from scipy.optimize import brentq  # dp-accounting brings it

    def excess(log_noise: float) -> float:
        return math.log(max(_epsilon((DpSteps(math.exp(log_noise), rate, steps),), delta), 1e-9) / target)

    # The search starts near the noise of a Gaussian mechanism without sampling, for rate^2 * steps steps.
    least = math.log(_MIN_NOISE)
    low = high = max(least, math.log(2.0 * rate * math.sqrt(steps * math.log(1 / delta)) / target))
    while high > math.log(_MAX_NOISE) or excess(high) > 0:
        low = high
        high = high + _LOG_STRIDE
        if high > math.log(_MAX_NOISE):
            raise InputError(f"epsilon must be larger: {target:g} needs more noise than {_MAX_NOISE:g} times the clip")
    while low == high or excess(low) <= 0:
        if low <= least:
            return _MIN_NOISE
        high = low
        low = max(low - _LOG_STRIDE, least)
    noise = math.ceil(math.exp(brentq(excess, low, high, xtol=0.5 / _NOISE_GRID)) * _NOISE_GRID) / _NOISE_GRID
    # The root is approximate: end on the safe side of it.
    while _epsilon((DpSteps(noise, rate, steps),), delta) > target:
        noise = (round(noise * _NOISE_GRID) + 1) / _NOISE_GRID
    return noise


@lru_cache
def _epsilon(taken: tuple[DpSteps, ...], delta: float) -> float:
    library = accounting_library()
    accountant = library.pld.PLDAccountant()
    for noise, rate, steps in taken:
        event = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
        accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, got {delta!r}")


def _merged(taken: Iterable[DpSteps]) -> tuple[DpSteps, ...]:
    """Add up steps of equal noise and rate: their order does not matter to composition."""
    steps: dict[tuple[float, float], int] = {}
    for each in taken:
        steps[each.noise, each.rate] = steps.get((each.noise, each.rate), 0) + each.steps
    return tuple(DpSteps(*key, count) for key, count in sorted(steps.items()) if count)


def accounting_library() -> Any:
    """Import dp-accounting; raise MissingExtraError without it."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError as error:
        raise MissingExtraError("accounting of privacy", "privacy") from error
    return dp_accounting


SIGNAL_SHARE = 0.01
"""What the square of a text's mean gradient is taken to be, over the mean square of its units' gradients.

It differs with the text: `python -m benchmarks.privacy_limits` measures its root, `signal`.
"""


class NoiseForecast(NamedTuple):
    """What a promise does to a gradient.

    Attributes
    ----------
    noise
        The noise multiplier of each step.
    norm
        The norm of the noise in the mean of all steps, in clips.
    ratio
        That norm over the norm of the mean gradient, taken to be the root of `SIGNAL_SHARE` in clips.
    site_ratio
        The same after a mean over all sites, whose noises are independent.
    units
        How many units a site needs for a `site_ratio` of 1.
    """

    noise: float
    norm: float
    ratio: float
    site_ratio: float
    units: int


def forecast_noise(
    epsilon: float, delta: float, *, units: int, numbers: int, steps: int, sites: int = 1, batch: int | None = None
) -> NoiseForecast:
    """Return how loud the noise is beside the gradient.

    Parameters
    ----------
    units, numbers
        Of a site: units of text, and trained numbers.
    batch
        Units that take part in a step on average; None: all of them. `NoiseForecast.units` is for as large a share.
    """
    for name, value in (("units", units), ("numbers", numbers), ("sites", sites)):
        validation.integer(name, value, least=1)
    rate = 1.0 if batch is None else batch / units
    noise = noise_for(epsilon, delta, rate=rate, steps=steps)
    whole = noise / rate * math.sqrt(numbers / steps)
    signal = math.sqrt(SIGNAL_SHARE)
    site_ratio = whole / units / signal / math.sqrt(sites)
    return NoiseForecast(noise, whole / units, whole / units / signal, site_ratio, math.ceil(site_ratio * units))


@dataclass(frozen=True, slots=True)
class Mechanism:
    """The Gaussian mechanism of one DP-SGD step.

    A unit takes part with probability `rate`. Its gradient, over at most `windows` of its windows, is clipped to the
    norm `clip`; noise of standard deviation `noise` * `clip` is added to every coordinate of the sum.
    """

    noise: float
    rate: float
    clip: float
    windows: int

    def spent(self, steps: int) -> DpSteps:
        """Return the record of `steps` steps, for the accounting."""
        return DpSteps(self.noise, self.rate, steps)


def calibrate_mechanism(
    text: PrivateText, *, epsilon: float, delta: float, clip: float, batch: int | None, windows: int, steps: int
) -> Mechanism:
    """Return the mechanism that spends at most `epsilon` in `steps` steps, with `batch` units a step on average.

    Parameters
    ----------
    batch
        None: all units take part in each step.

    Raises
    ------
    InputError
        If the text has fewer units than `batch`, or no noise keeps within `epsilon`.
    """
    least = batch or 1
    if text.units < least:
        raise InputError(
            f"privacy.batch must be at most the number of units in a node's text, {text.units}, got {least}: a step "
            "cannot take more units than there are"
        )
    rate = 1.0 if batch is None else batch / text.units
    return Mechanism(noise_for(epsilon, delta, rate=rate, steps=steps), rate, clip, windows)
