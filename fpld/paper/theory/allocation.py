"""Theorem 5: the objective that an allocation minimizes, and its least value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Floats


@dataclass(frozen=True, eq=False, slots=True)
class Objective:
    """F(B), and what each node adds to it."""

    terms: Floats

    @property
    def total(self) -> float:
        """Return F(B): the sum of the nodes' terms."""
        return float(self.terms.sum())


def objective(bits: ArrayLike, weights: ArrayLike, vocab: int) -> Objective:
    """Theorem 5: F(B) = K^-2 sum_i w_i 2^(-2 B_i / V); `bits` here are B_i, per probe context.

    >>> objective([256, 256, 768, 768], [1, 1, 16, 16], vocab=256).total
    0.0625
    """
    w = _check.vector("weights", weights)
    b = _check.vector("bits", bits, size=w.size)
    return Objective(w * np.exp2(-2 * b / vocab) / w.size**2)


def allocation_optimum(weights: ArrayLike, total: float, vocab: int) -> float:
    """Theorem 5: the least F without caps and floors, w_g 2^(-2 B_tot / (KV)) / K.

    >>> round(allocation_optimum([1, 1, 16, 16], 2048, 256), 12)
    0.0625
    """
    w = _check.vector("weights", weights)
    return float(np.exp(np.log(w).mean()) * np.exp2(-2 * total / (w.size * vocab)) / w.size)
