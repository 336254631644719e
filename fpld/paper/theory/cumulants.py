"""Softmax, its Hessian's trace (Lemma 7), and softmax-KL by the exact cumulant identity (Appendix B.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.numerics import kl, softmax

if TYPE_CHECKING:
    from fpld.types import Floats, Reals

# A variable in [-a, a] has a third central moment of at most (2a)^3 / (6 sqrt 3); Taylor's remainder has a sixth.
CUBIC = 8.0 / (6.0 * 3.0**0.5) / 6.0


class Trace(NamedTuple):
    """The trace of the softmax Hessian, between its two bounds."""

    lower: Floats
    trace: Floats
    upper: float


def hessian_trace(probabilities: Reals) -> Trace:
    """Lemma 7: tr(diag p - p p^T) = 1 - |p|^2, at most 1 and at least 1 - max p.

    >>> lower, trace, upper = hessian_trace(np.array([0.5, 0.25, 0.25]))
    >>> float(lower), float(trace), upper
    (0.5, 0.625, 1.0)
    """
    p = np.asarray(probabilities, np.float64)
    return Trace(1.0 - p.max(axis=-1), 1.0 - np.square(p).sum(axis=-1), 1.0)


class Expansion(NamedTuple):
    """KL to second order: `exact = quadratic + remainder`, and |remainder| <= bound."""

    exact: Floats
    quadratic: Floats
    remainder: Floats
    bound: Floats


def expand(logits: Reals, error: Reals) -> Expansion:
    """Appendix B.2: KL = e^T H e / 2 + kappa_3(e) with |kappa_3| <= C |e|_inf^3: the small-error check.

    The paper leaves C open; C = 8 / (36 sqrt 3) = 0.128 holds, since the remainder is a sixth of a third central
    moment of a variable in [-|e|_inf, |e|_inf].
    """
    p = softmax(logits)
    e = np.asarray(error, np.float64)
    centred = e - (p * e).sum(axis=-1, keepdims=True)
    quadratic = (p * centred * centred).sum(axis=-1) / 2
    exact = kl(logits, e)
    bound = CUBIC * np.abs(e).max(axis=-1) ** 3
    return Expansion(exact, quadratic, exact - quadratic, bound)
