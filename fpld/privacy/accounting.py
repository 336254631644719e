"""How much privacy steps of DP-SGD have spent, and how much noise a promise takes.

Accounting is by the privacy loss distribution of `dp-accounting` (Google), which bounds the true epsilon from above:
the Gaussian mechanism under Poisson sampling, composed over all steps.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld import _check
from fpld.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterable

_GRID = 1000  # noise multipliers are multiples of a thousandth
_LEAST_NOISE, _MOST_NOISE = 0.2, 1e5
_STRIDE = 0.3  # of the logarithm, while bounds are looked for


class Spent(NamedTuple):
    """Steps of DP-SGD that were made alike: noise multiplier, chance of a unit to take part, number of steps."""

    noise: float
    rate: float
    steps: int


def epsilon(spent: Iterable[Spent], delta: float) -> float:
    """Return the epsilon of all steps together, at `delta`; nothing spent is 0."""
    _share("delta", delta)
    total = _merged(spent)
    return _epsilon(total, delta) if total else 0.0


def noise_for(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """Return the least noise multiplier, in thousandths, with which so many steps spend at most `epsilon`."""
    _check.real("epsilon", epsilon, above=0.0)
    _share("delta", delta)
    _check.real("rate", rate, above=0.0)
    if rate > 1:
        raise InputError(f"rate must be at most 1, got {rate:g}")
    _check.integer("steps", steps, least=1)
    return _noise(float(epsilon), float(delta), float(rate), int(steps))


@lru_cache
def _noise(target: float, delta: float, rate: float, steps: int) -> float:
    """Search between two bounds in logarithms, where the curve is nearly straight, and end on the safe side."""
    from scipy.optimize import brentq  # dp-accounting brings it

    def excess(log_noise: float) -> float:
        return math.log(max(_epsilon((Spent(math.exp(log_noise), rate, steps),), delta), 1e-9) / target)

    # Near what a Gaussian mechanism without sampling would take for rate^2 * steps steps.
    least = math.log(_LEAST_NOISE)
    low = high = max(least, math.log(2.0 * rate * math.sqrt(steps * math.log(1 / delta)) / target))
    while high > math.log(_MOST_NOISE) or excess(high) > 0:
        low, high = high, high + _STRIDE
        if high > math.log(_MOST_NOISE):
            raise InputError(f"epsilon must be larger: {target:g} needs more noise than {_MOST_NOISE:g} times the clip")
    while low == high or excess(low) <= 0:
        if low <= least:
            return _LEAST_NOISE
        low, high = max(low - _STRIDE, least), low
    noise = math.ceil(math.exp(brentq(excess, low, high, xtol=0.5 / _GRID)) * _GRID) / _GRID
    while _epsilon((Spent(noise, rate, steps),), delta) > target:  # a root is only near
        noise = (round(noise * _GRID) + 1) / _GRID
    return noise


@lru_cache
def _epsilon(spent: tuple[Spent, ...], delta: float) -> float:
    found = library()
    accountant = found.pld.PLDAccountant()
    for noise, rate, steps in spent:
        event = found.PoissonSampledDpEvent(rate, found.GaussianDpEvent(noise))
        accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def _share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise InputError(f"{name} must lie between 0 and 1, got {value!r}")


def _merged(spent: Iterable[Spent]) -> tuple[Spent, ...]:
    """Add up steps that are alike: composition does not ask for their order."""
    steps: dict[tuple[float, float], int] = {}
    for each in spent:
        steps[each.noise, each.rate] = steps.get((each.noise, each.rate), 0) + each.steps
    return tuple(Spent(*key, count) for key, count in sorted(steps.items()) if count)


def library() -> Any:
    """Return the library that accounts, or say how to get it."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError as error:
        raise MissingExtraError("accounting of privacy", "privacy") from error
    return dp_accounting
