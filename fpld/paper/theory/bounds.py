"""Theorems 1 to 4: upper bound, matching lower bound, sequential refinement, heterogeneous budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.errors import InputError
from fpld.paper.theory.conditions import Condition, cubic_remainder, se, se_prime

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Floats, Reals


def c_q(clip: float) -> float:
    """Return Assumption 5's distortion constant C_q = L^2 / 3."""
    return _check.real("clip", clip, above=0.0) ** 2 / 3


def c_3(clip: float) -> float:
    """Return Theorem 1's bandwidth constant c_3 = C_q / 2 = L^2 / 6."""
    return c_q(clip) / 2


def c_lb(clip: float, c_p: float) -> float:
    """Return Theorem 2's constant c_lb = c_p L^2 / 12."""
    return _check.real("c_p", c_p, least=0.0) * c_q(clip) / 4


def mean_variance(bits: ArrayLike, clip: ArrayLike, nodes: int | None = None) -> float:
    """Return sigma^2 = K^-2 sum_i (L_i^2 / 3) 2^(-2 b_i), the variance of the averaged dither (Appendix B.5).

    `bits` and `clip` are numbers, or one for each node; with numbers only, `nodes` says how many nodes there are.

    >>> round(mean_variance(2.0, 1.0, nodes=4) * 192, 9)
    1.0
    """
    rates, clips = np.asarray(bits, np.float64), np.asarray(clip, np.float64)
    shape = np.broadcast_shapes(rates.shape, clips.shape) or (1 if nodes is None else nodes,)
    if nodes is not None and shape != (_check.integer("nodes", nodes, least=1),):
        raise InputError(f"bits and clip must each be a number or have one entry for each of {nodes} nodes")
    if not (np.isfinite(rates) & (rates >= 0)).all():
        raise InputError(f"bits must be finite and at least 0, got {rates}")
    if not (np.isfinite(clips) & (clips > 0)).all():
        raise InputError(f"clip must be finite and greater than 0, got {clips}")
    return float(np.broadcast_to(clips**2 / 3 * np.exp2(-2 * rates), shape).sum() / shape[0] ** 2)


@dataclass(frozen=True, slots=True)
class Upper:
    """The terms of Theorems 1 and 4, and whether (SE) holds; without it the bound need not hold."""

    data: float
    probe: float
    bandwidth: float
    optimization: float
    fit: float
    small_error: Condition

    @property
    def total(self) -> float:
        """Return the bound: the sum of the terms."""
        return self.data + self.probe + self.bandwidth + self.optimization + self.fit


def heterogeneous_upper(
    bits: ArrayLike,
    clip: ArrayLike,
    *,
    vocab: int,
    nodes: int | None = None,
    samples: float = math.inf,
    contexts: float = math.inf,
    dimension: float = 1.0,
    coverage: float = 1.0,
    delta: float = 0.05,
    optimization: float = 0.0,
    fit: float = 0.0,
    c_1: float = 0.5,
    c_2: float = 1.0,
) -> Upper:
    """Theorem 4: c_1 d/(Kn) + c_2 rho sqrt(V log(V/delta)/m) + (1/2K^2) sum_i C_q,i 2^(-2 b_i) + slack.

    n = `samples` a node, m = `contexts`, d = `dimension`, rho = `coverage`. The paper gives c_1 and c_2 only in
    order of magnitude; c_1 = 1/2 with d = 1 is exact for the simulator, whose logits have noise 1/n.
    """
    sigma2 = mean_variance(bits, clip, nodes)
    count = nodes or max(np.size(bits), np.size(clip))
    if not 0 < delta < 1:
        raise InputError(f"delta must be between 0 and 1, got {delta:g}")
    return Upper(
        data=c_1 * dimension / (count * samples),
        probe=c_2 * coverage * math.sqrt(vocab * math.log(vocab / delta) / contexts),
        bandwidth=sigma2 / 2,
        optimization=optimization,
        fit=fit,
        small_error=se(sigma2, vocab),
    )


def fpld_upper(nodes: int, bits: float, clip: float, *, vocab: int, **terms: float) -> Upper:
    """Theorem 1: the bandwidth term is (c_3 / K) 2^(-2b); the other terms as in `heterogeneous_upper`.

    >>> bound = fpld_upper(nodes=4, bits=4, clip=1.0, vocab=256, samples=30_000)
    >>> f"{bound.bandwidth:.3e} + {bound.data:.3e} = {bound.total:.3e}"
    '1.628e-04 + 4.167e-06 = 1.669e-04'
    """
    return heterogeneous_upper(float(bits), float(clip), vocab=vocab, nodes=nodes, **terms)


@dataclass(frozen=True, slots=True)
class Lower:
    """Theorem 2's bound on the bandwidth contribution, and whether (ND) and (SE') hold."""

    bandwidth: float
    non_degenerate: bool
    small_error: Condition

    @property
    def holds(self) -> bool:
        """Return whether both conditions hold, and with them the bound."""
        return self.non_degenerate and self.small_error.holds


def matching_lower(bits: ArrayLike, clip: ArrayLike, *, vocab: int, c_p: float, nodes: int | None = None) -> Lower:
    """Theorem 2: bandwidth KL >= (c_lb / K) 2^(-2b); in general c_p sigma^2 / 4, which also takes unequal budgets.

    >>> bound = matching_lower(4.0, 1.0, vocab=256, c_p=0.99, nodes=4)
    >>> round(bound.bandwidth / (c_lb(1.0, 0.99) / 4 * 2**-8), 9)
    1.0
    """
    sigma2 = mean_variance(bits, clip, nodes)
    return Lower(c_p * sigma2 / 4, c_p > 0, se_prime(sigma2, vocab, c_p))


def weighted_bracket(probabilities: Reals, variance: Reals) -> Floats:
    """Theorems 2 and 4 for an error whose variance differs by coordinate, summed over contexts: [lower, upper].

    KL is tr(H Cov)/2 = sum_v p_v (1 - p_v) var_v / 2 to second order. Dropping the factor 1 - p_v bounds it from above,
    as the trace bound does; half of it is what (SE') leaves from below. With one variance for all this is sigma^2/2
    and c_p sigma^2/4. `variance` is that of the mean over nodes.

    >>> weighted_bracket(np.array([[0.5, 0.5]]), np.array([[0.2, 0.4]])).round(4).tolist()
    [0.0375, 0.15]
    """
    weighted = np.asarray(probabilities, np.float64) * variance
    whole = weighted.sum()
    weighted *= 1 - np.asarray(probabilities, np.float64)
    return np.array([weighted.sum() / 4, whole / 2])


@dataclass(frozen=True, slots=True)
class Refined:
    """Theorem 3: the bound after T rounds of refinement, its remainder, and where vanilla FPLD stalls."""

    bandwidth: float
    remainder: float
    vanilla: float
    small_error: Condition


def refinement_upper(nodes: int, bits: float, clip: float, rounds: int, *, vocab: int) -> Refined:
    """Theorem 3: (C_3'/K) 2^(-2Tb) + cubic remainder with C_3' = c_3, while vanilla stays at (c_3/K) 2^(-2b).

    >>> four = refinement_upper(nodes=4, bits=2, clip=1.0, rounds=4, vocab=256)
    >>> four.vanilla / four.bandwidth == 16**3
    True
    """
    _check.integer("rounds", rounds, least=1)
    sigma2 = mean_variance(rounds * float(bits), float(clip), nodes)
    once = mean_variance(float(bits), float(clip), nodes)
    return Refined(sigma2 / 2, cubic_remainder(sigma2, vocab), once / 2, se(sigma2, vocab))
