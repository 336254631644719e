"""The paper's statements as functions, each with its terms and not only their sum.

The paper: P. Dubey and X. Huo, *Matching Rates and Optimal Allocation for Federated Probe-Logit Distillation under
Heterogeneous Bandwidth Budgets*. Theorems 1 to 5, Corollary 6 and Lemmas 7 to 9 are numbered as there. Bits are per
coordinate here (b = B/V) unless a name says otherwise.

    softmax KL        its second-order expansion (Appendix B.2) and the trace of the Hessian (Lemma 7)
    upper bounds      Theorem 1 (equal budgets) and Theorem 4 (unequal budgets)
    lower bound       Theorem 2, and both bounds for an error whose variance differs by coordinate
    refinement        Theorem 3
    conditions        (ND), (SE) and (SE')
    allocation        Theorem 5 for dense labels, and the same sum for sampled ones
    adaptivity        Corollary 6, Lemmas 8 and 9: the cost of estimated weights
    rate-distortion   reverse water-filling, a bound for any code

The paper asks that a cubic remainder be small and leaves its constant open. Here it is a number. The mean of K
independent uniform errors is sub-Gaussian with its variance sigma^2, so the largest of V of them has E max^3 <= sigma^3
(x^3 + 3x + 3/x) at x = sqrt(2 log 2V); times C of `expand_kl` this bounds the remainder. The conditions are sufficient
and not sharp: where they fail, the bounds may still hold.

A quantizer's step halves with each bit of a coordinate, so the variance of a dense label is w_i 4^-b_i. A sampled label
is an unbiased estimate from draws: its variance is w_i / n_i, which halves when the bits double. The sum over nodes is
then least for bits in proportion to sqrt(w_i), and the gain over a uniform split is bounded by Cauchy-Schwarz.

Reverse water-filling bounds any code of independent Gaussian coordinates. One with residual variance s2 and weight w
costs w D at distortion D and takes 1/2 log2(s2 / D) bits, so the least weighted loss at a rate has w D = min(w s2,
level) everywhere (Cover and Thomas, 10.3.3): only the products w s2 count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld import validation
from fpld.errors import InputError
from fpld.numerics import kl as kl
from fpld.numerics import softmax as softmax

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

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


def expand_kl(logits: Reals, error: Reals) -> Expansion:
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


def c_q(clip: float) -> float:
    """Return Assumption 5's distortion constant C_q = L^2 / 3."""
    return validation.real("clip", clip, above=0.0) ** 2 / 3


def c_3(clip: float) -> float:
    """Return Theorem 1's bandwidth constant c_3 = C_q / 2 = L^2 / 6."""
    return c_q(clip) / 2


def c_lb(clip: float, c_p: float) -> float:
    """Return Theorem 2's constant c_lb = c_p L^2 / 12."""
    return validation.real("c_p", c_p, least=0.0) * c_q(clip) / 4


def mean_variance(bits: ArrayLike, clip: ArrayLike, nodes: int | None = None) -> float:
    """Return sigma^2 = K^-2 sum_i (L_i^2 / 3) 2^(-2 b_i), the variance of the averaged dither (Appendix B.5).

    `bits` and `clip` are numbers, or one for each node; with numbers only, `nodes` says how many nodes there are.

    >>> round(mean_variance(2.0, 1.0, nodes=4) * 192, 9)
    1.0
    """
    rates = np.asarray(bits, np.float64)
    clips = np.asarray(clip, np.float64)
    shape = np.broadcast_shapes(rates.shape, clips.shape) or (1 if nodes is None else nodes,)
    if nodes is not None and shape != (validation.integer("nodes", nodes, least=1),):
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


@dataclass(frozen=True, slots=True)
class UpperInputs:
    """What the terms of Theorems 1 and 4 depend on besides budgets, clips and the vocabulary.

    The paper gives c_1 and c_2 only in order of magnitude; c_1 = 1/2 with d = 1 is exact for the simulator, whose
    logits have noise 1/n.

    Parameters
    ----------
    samples
        n, the training samples of a node.
    contexts
        m, the probe contexts.
    dimension
        d, of the model class.
    coverage
        rho, of the probe set.
    delta
        The probability with which the bound may fail.
    optimization, fit
        Slack terms that are added as they are.
    c_1, c_2
        Constants of the data term and of the probe term.
    """

    samples: float = math.inf
    contexts: float = math.inf
    dimension: float = 1.0
    coverage: float = 1.0
    delta: float = 0.05
    optimization: float = 0.0
    fit: float = 0.0
    c_1: float = 0.5
    c_2: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise InputError(f"delta must be between 0 and 1, got {self.delta:g}")


def heterogeneous_upper(
    bits: ArrayLike, clip: ArrayLike, *, vocab: int, nodes: int | None = None, **inputs: float
) -> Upper:
    """Theorem 4: c_1 d/(Kn) + c_2 rho sqrt(V log(V/delta)/m) + (1/2K^2) sum_i C_q,i 2^(-2 b_i) + slack.

    `bits` and `clip` are numbers, or one for each node; `inputs` are fields of `UpperInputs`.
    """
    terms = UpperInputs(**inputs)
    sigma2 = mean_variance(bits, clip, nodes)
    count = nodes or max(np.size(bits), np.size(clip))
    return Upper(
        data=terms.c_1 * terms.dimension / (count * terms.samples),
        probe=terms.c_2 * terms.coverage * math.sqrt(vocab * math.log(vocab / terms.delta) / terms.contexts),
        bandwidth=sigma2 / 2,
        optimization=terms.optimization,
        fit=terms.fit,
        small_error=se(sigma2, vocab),
    )


def fpld_upper(nodes: int, bits: float, clip: float, *, vocab: int, **inputs: float) -> Upper:
    """Theorem 1: the bandwidth term is (c_3 / K) 2^(-2b); the other terms as in `heterogeneous_upper`.

    >>> bound = fpld_upper(nodes=4, bits=4, clip=1.0, vocab=256, samples=30_000)
    >>> f"{bound.bandwidth:.3e} + {bound.data:.3e} = {bound.total:.3e}"
    '1.628e-04 + 4.167e-06 = 1.669e-04'
    """
    return heterogeneous_upper(float(bits), float(clip), vocab=vocab, nodes=nodes, **inputs)


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
    validation.integer("rounds", rounds, least=1)
    sigma2 = mean_variance(rounds * float(bits), float(clip), nodes)
    once = mean_variance(float(bits), float(clip), nodes)
    return Refined(sigma2 / 2, cubic_remainder(sigma2, vocab), once / 2, se(sigma2, vocab))


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
    sigma = math.sqrt(validation.real("variance", variance, least=0.0))
    x = math.sqrt(2.0 * math.log(2.0 * validation.integer("vocab", vocab, least=2)))
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
    variance = 2 * upper
    c_p = 2 * lower / upper if upper > 0 else 0.0
    return {"SE": se(variance, vocab).holds, "SE'": se_prime(variance, vocab, c_p).holds, "ND": c_p > 0}


def se_prime(variance: float, vocab: int, c_p: float) -> Condition:
    """Return (SE'): the cubic remainder is at most c_p sigma^2 / 4, half of what the lower bound needs."""
    value = cubic_remainder(variance, vocab)
    limit = validation.real("c_p", c_p, least=0.0) * variance / 4
    return Condition(value <= limit, value, limit)


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
    w = validation.vector("weights", weights)
    b = validation.vector("bits", bits, size=w.size)
    return Objective(w * np.exp2(-2 * b / vocab) / w.size**2)


def allocation_optimum(weights: ArrayLike, total: float, vocab: int) -> float:
    """Theorem 5: the least F without caps and floors, w_g 2^(-2 B_tot / (KV)) / K.

    >>> round(allocation_optimum([1, 1, 16, 16], 2048, 256), 12)
    0.0625
    """
    w = validation.vector("weights", weights)
    return float(np.exp(np.log(w).mean()) * np.exp2(-2 * total / (w.size * vocab)) / w.size)


def label_objective(bits: ArrayLike, weights: ArrayLike) -> Objective:
    """Return the noise of the mean label, K^-2 sum_i w_i / n_i; `bits` are n_i, per probe context.

    >>> label_objective([10, 10, 40, 40], [1, 1, 16, 16]).total
    0.0625
    """
    w = validation.vector("weights", weights)
    n = validation.vector("bits", bits, size=w.size)
    return Objective(w / n / w.size**2)


def label_optimum(weights: ArrayLike, total: float) -> float:
    """Return the least noise without caps and floors, (sum_i sqrt(w_i))^2 / (K^2 B_tot), at n_i ~ sqrt(w_i).

    >>> label_optimum([1, 1, 16, 16], total=100)
    0.0625
    """
    w = validation.vector("weights", weights)
    return float(np.sqrt(w).sum() ** 2 / (w.size**2 * total))


def label_gain(weights: ArrayLike) -> float:
    """Return the noise of equal bits over the least, K sum_i w_i / (sum_i sqrt(w_i))^2.

    At least 1 by Cauchy-Schwarz, with equality for equal weights; at most K, where one node has all the noise. Bits
    in proportion to w_i are as noisy as equal ones.

    >>> label_gain([1, 1, 16, 16])
    1.36
    """
    w = validation.vector("weights", weights)
    return float(w.size * w.sum() / np.sqrt(w).sum() ** 2)


def reach(clip: ArrayLike, bits: float) -> Floats:
    """Lemma 9: R = L (1 + 2^(-b_0)), how far a decoded value can lie from zero at b_0 warm-up bits.

    >>> float(reach(4.0, 1.0))
    6.0
    """
    clips = np.asarray(clip, np.float64)
    result: Floats = clips * (1.0 + 2.0 ** -validation.real("bits", bits, least=0.0))
    return result


def transfer(eta: float) -> float:
    """Lemma 8: F(B-hat) / F(B*) <= 1 + 2 eta + 4 eta^2 when each weight is off by at most a share eta <= 1/2."""
    eta = validation.real("eta", eta, least=0.0)
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
    w_min = validation.real("least_weight", least_weight, above=0.0)
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
    w = validation.vector("weights", weights)
    if not (np.isfinite(w) & (w > 0)).all():
        raise InputError("weights must be finite and greater than 0")
    cap = float(np.max(clip))
    constant = c_ad(cap, bits, float(w.min()))
    largest = float(concentration(cap, bits, nodes=w.size, contexts=contexts, rounds=rounds, delta=delta))
    by_node = concentration(clip, bits, nodes=w.size, contexts=contexts, rounds=rounds, delta=delta)
    eta_by_node = float(np.max(by_node / w))
    return Adaptive(
        bound=1.0 + constant * math.sqrt(math.log(w.size / delta) / (contexts * rounds)),
        direct=transfer(eta_by_node) if eta_by_node <= 0.5 else math.inf,
        eta=largest / float(w.min()),
        c_ad=constant,
    )


def reverse_water_filling(products: ArrayLike, rate: float) -> float:
    """Return the least mean of w D at `rate` bits per coordinate, for products w s2 of weight and variance.

    >>> reverse_water_filling([1.0, 1.0], rate=1.0)
    0.25
    """
    products = _products(products)
    rate = validation.real("rate", rate, least=0.0)
    # Sorted, the k largest are above the level: mean over all of 1/2 log2(product / level) is the rate.
    logs = np.log2(products[products > 0])
    if logs.size == 0:
        return 0.0
    counts = np.arange(1, logs.size + 1)
    levels = (np.cumsum(logs) - 2 * rate * products.size) / counts
    above = int(np.nonzero(levels <= logs)[0].max()) if rate > 0 else 0
    level = 2.0 ** levels[above] if rate > 0 else products[0]
    return float(np.minimum(products, level).mean())


def rate_for(products: ArrayLike, loss: float) -> float:
    """Return the least bits per coordinate at which the mean of w D is `loss`; 0 if it is so without a bit.

    >>> rate_for([1.0, 1.0], loss=0.25)
    1.0
    """
    products = _products(products)
    loss = validation.real("loss", loss, above=0.0)
    if loss >= products.mean():
        return 0.0
    # The mean of min(product, level) is piecewise linear in the level: the k largest are cut.
    below = products.sum() - np.cumsum(products)
    counts = np.arange(1, products.size + 1)
    levels = (loss * products.size - below) / counts
    following = np.append(products[1:], 0.0)
    cut = int(np.nonzero(levels >= following)[0].min())
    return float((0.5 * np.log2(products[: cut + 1] / levels[cut])).sum() / products.size)


def _products(products: ArrayLike) -> Floats:
    """Return the products, the largest first."""
    array = np.asarray(products, np.float64).ravel()
    if array.size == 0 or not np.isfinite(array).all() or (array < 0).any():
        raise InputError("products must be finite numbers of at least 0, and not empty")
    return np.sort(array)[::-1]
