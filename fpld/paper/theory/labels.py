"""What Theorem 5's sum becomes for labels that are sampled: variance w_i / n_i instead of w_i 4^-b_i.

A quantizer's step halves with each bit of a coordinate. A sampled label is an unbiased estimate from draws, so that its
variance halves when its bits double. The sum over nodes is then minimal for bits in proportion to sqrt(w_i), not
for equal w_i 4^-b_i, and what the best split gains over the uniform one is bounded by Cauchy-Schwarz.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.paper.theory.allocation import Objective

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def label_objective(bits: ArrayLike, weights: ArrayLike) -> Objective:
    """Return the noise of the mean label, K^-2 sum_i w_i / n_i; `bits` are n_i, per probe context.

    >>> label_objective([10, 10, 40, 40], [1, 1, 16, 16]).total
    0.0625
    """
    w = _check.vector("weights", weights)
    n = _check.vector("bits", bits, size=w.size)
    return Objective(w / n / w.size**2)


def label_optimum(weights: ArrayLike, total: float) -> float:
    """Return the least noise without caps and floors, (sum_i sqrt(w_i))^2 / (K^2 B_tot), at n_i ~ sqrt(w_i).

    >>> label_optimum([1, 1, 16, 16], total=100)
    0.0625
    """
    w = _check.vector("weights", weights)
    return float(np.sqrt(w).sum() ** 2 / (w.size**2 * total))


def label_gain(weights: ArrayLike) -> float:
    """Return the noise of equal bits over the least, K sum_i w_i / (sum_i sqrt(w_i))^2.

    At least 1 by Cauchy-Schwarz, with equality for equal weights; at most K, where one node has all the noise. Bits
    in proportion to w_i are as noisy as equal ones.

    >>> label_gain([1, 1, 16, 16])
    1.36
    """
    w = _check.vector("weights", weights)
    return float(w.size * w.sum() / np.sqrt(w).sum() ** 2)
