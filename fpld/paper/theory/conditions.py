"""The conditions under which the bounds hold: (ND), (SE) and (SE'), with their constants made explicit.

The paper asks that a cubic remainder be small and leaves its constant open. Here it is a number. The mean
of K independent uniform errors is sub-Gaussian with its own variance sigma^2, so the largest of V of them has
E max^3 <= s^3 (x^3 + 3x + 3/x) at x = sqrt(2 log 2V); times C of `cumulants.expand` this bounds the remainder. It is
sufficient and not sharp: where it fails, the bounds may still hold.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld import _check
from fpld.paper.theory.cumulants import CUBIC, hessian_trace

if TYPE_CHECKING:
    from fpld.types import Reals


class Condition(NamedTuple):
    """A condition `value <= limit` (or, for ND, `value > limit`), and whether it holds."""

    holds: bool
    value: float
    limit: float


def nd(probabilities: Reals) -> Condition:
    """Return (ND): E_X[1 - |p(.|X)|^2] = c_p > 0 over the contexts; `value` is c_p.

    >>> nd(np.array([[0.5, 0.5], [1.0, 0.0]]))
    Condition(holds=True, value=0.25, limit=0.0)
    """
    c_p = float(np.mean(hessian_trace(probabilities).trace))
    return Condition(c_p > 0, c_p, 0.0)


def cubic_remainder(variance: float, vocab: int) -> float:
    """Bound |E kappa_3| <= C E|e|_inf^3 for an error of this variance per coordinate: C'' sigma^3 (log V)^(3/2)."""
    sigma = math.sqrt(_check.real("variance", variance, least=0.0))
    x = math.sqrt(2.0 * math.log(2.0 * _check.integer("vocab", vocab, least=2)))
    return CUBIC * sigma**3 * (x**3 + 3.0 * x + 3.0 / x)


def se(variance: float, vocab: int) -> Condition:
    """Return (SE): the cubic remainder is at most the quadratic term sigma^2 / 2."""
    value = cubic_remainder(variance, vocab)
    return Condition(value <= variance / 2, value, variance / 2)


def bracket_conditions(lower: float, upper: float, vocab: int) -> dict[str, bool]:
    """Return whether (SE), (SE') and (ND) hold for a bracket of `weighted_bracket`, a mean over contexts.

    For one variance sigma^2 the bounds are c_p sigma^2 / 4 and sigma^2 / 2: so sigma^2 and c_p follow from them.

    >>> bracket_conditions(1e-6, 4e-6, vocab=256)
    {'SE': True, "SE'": True, 'ND': True}
    >>> bracket_conditions(0.1, 0.4, vocab=256)
    {'SE': False, "SE'": False, 'ND': True}
    """
    variance, c_p = 2 * upper, 2 * lower / upper if upper > 0 else 0.0
    return {"SE": se(variance, vocab).holds, "SE'": se_prime(variance, vocab, c_p).holds, "ND": c_p > 0}


def se_prime(variance: float, vocab: int, c_p: float) -> Condition:
    """Return (SE'): the cubic remainder is at most c_p sigma^2 / 4, half of what the lower bound needs."""
    value, limit = cubic_remainder(variance, vocab), _check.real("c_p", c_p, least=0.0) * variance / 4
    return Condition(value <= limit, value, limit)
