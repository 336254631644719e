"""Corollary 6: what an allocation from estimated weights costs; Lemmas 8 and 9 behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Floats


def reach(clip: ArrayLike, bits: float) -> Floats:
    """Lemma 9: R = L (1 + 2^(-b_0)), how far a decoded value can lie from zero at b_0 warm-up bits.

    >>> float(reach(4.0, 1.0))
    6.0
    """
    clips = np.asarray(clip, np.float64)
    result: Floats = clips * (1.0 + 2.0 ** -_check.real("bits", bits, least=0.0))
    return result


def transfer(eta: float) -> float:
    """Lemma 8: F(B-hat) / F(B*) <= 1 + 2 eta + 4 eta^2 when each weight is off by at most a share eta <= 1/2."""
    eta = _check.real("eta", eta, least=0.0)
    if eta > 0.5:
        raise InputError(f"eta must be at most 1/2 for Lemma 8, got {eta:g}")
    return 1.0 + 2.0 * eta + 4.0 * eta**2


def concentration(
    clip: ArrayLike, bits: float, *, nodes: int, contexts: float, rounds: int = 1, delta: float = 0.05
) -> Floats:
    """Lemma 9: |w-hat_i - w_i| <= R_i^2 sqrt(log(2K/delta) / (2 m T_0)) for all i, with probability 1 - delta."""
    if not 0 < delta < 1:
        raise InputError(f"delta must be between 0 and 1, got {delta:g}")
    half_width = math.sqrt(math.log(2 * nodes / delta) / (2 * contexts * rounds))
    result: Floats = reach(clip, bits) ** 2 * half_width
    return result


def c_ad(clip: float, bits: float, least_weight: float) -> float:
    """Corollary 6's constant c_ad = (3 R^2 / w_min) sqrt((log 2 + 1) / 2)."""
    w_min = _check.real("least_weight", least_weight, above=0.0)
    return 3.0 * float(reach(clip, bits)) ** 2 / w_min * math.sqrt((math.log(2.0) + 1.0) / 2.0)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Corollary 6: the bound on F(B-hat) / F(B*), its parts, and whether its proof reaches this sample size.

    `bound` is the corollary's 1 + c_ad sqrt(log(K/delta) / (m T_0)). `direct` composes Lemmas 8 and 9 without the
    last simplification, node by node; it is sharper, and infinite where eta is over 1/2.
    """

    bound: float
    direct: float
    eta: float
    c_ad: float

    @property
    def valid(self) -> bool:
        """Return whether eta <= 1/4, which the corollary's last step needs."""
        return self.eta <= 0.25


def adaptive_bound(
    weights: ArrayLike, clip: ArrayLike, bits: float, *, contexts: float, rounds: int = 1, delta: float = 0.05
) -> Adaptive:
    """Corollary 6 for weights w_i, clips L_i (the paper's L is the largest) and b_0 = `bits` in the warm-up.

    >>> round(adaptive_bound([1.0, 1.0], 1.0, bits=4.0, contexts=10_000).bound, 4)
    1.0598
    """
    w = _check.vector("weights", weights)
    if not (np.isfinite(w) & (w > 0)).all():
        raise InputError("weights must be finite and greater than 0")
    cap = float(np.max(clip))
    constant = c_ad(cap, bits, float(w.min()))
    largest = float(concentration(cap, bits, nodes=w.size, contexts=contexts, rounds=rounds, delta=delta))
    own = concentration(clip, bits, nodes=w.size, contexts=contexts, rounds=rounds, delta=delta)
    eta_own = float(np.max(own / w))
    return Adaptive(
        bound=1.0 + constant * math.sqrt(math.log(w.size / delta) / (contexts * rounds)),
        direct=transfer(eta_own) if eta_own <= 0.5 else math.inf,
        eta=largest / float(w.min()),
        c_ad=constant,
    )
