"""What a plan gives: bits, bytes and seconds for each site, and the bracket of the loss. No formula stands here.

Bits come from the allocators, bounds and conditions from `fpld.paper.theory`; inverse questions are a search. A bound
is a number only where its conditions hold, and `doubts` says which one fails where there is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.budget.allocators import equal_slopes
from fpld.budget.limits import KINDS
from fpld.budget.policy import Budget, usual_allocator
from fpld.errors import BudgetError, InputError
from fpld.paper import theory
from fpld.registry import allocators
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.planner.known import Known
    from fpld.types import Floats

POLICIES = ("uniform", "inverse")
"""Policies that a plan is compared with."""
CURVES = "curves"
"""The policy of equal slopes on measured loss curves; a run has it with `estimator = "curves"`."""
MEGABYTE = 1e6
_STEPS = 60  # of a bisection: the limit of float64


@dataclass(frozen=True, eq=False, slots=True)
class Forecast:
    """A plan's bits per probe context, and what follows from them."""

    known: Known
    policy: str
    bits: Floats

    @property
    def bits_per_coordinate(self) -> Floats:
        """Return the bits of each site as a configuration has them."""
        return self.bits / self.known.vocab

    @property
    def bytes_sent(self) -> list[int]:
        """Return the bytes of each site in a round, header and checksum included."""
        return self.known.bytes_sent(self.bits)

    @property
    def seconds(self) -> list[float | None]:
        """Return the time of each site's uplink in a round; None where the link is not known."""
        pairs = zip(self.known.sites, self.bytes_sent, strict=True)
        return [None if site.rate is None else 8 * count / site.rate for site, count in pairs]

    @property
    def round_seconds(self) -> float | None:
        """Return the time of a round's uplinks, side by side: that of the slowest; None if a link is not known."""
        seconds = [second for second in self.seconds if second is not None]
        return max(seconds) if len(seconds) == len(self.bits) else None

    @property
    def held_by(self) -> list[str]:
        """Say for each site what holds it: `link`, `cap`, `codec`, or nothing."""
        limits = self.known.uplinks.limits().most
        held = np.isclose(self.bits, limits.min(axis=0), rtol=1e-9)
        return [KINDS[int(which)] if at else "" for at, which in zip(held, limits.argmin(axis=0), strict=True)]

    @property
    def upper(self) -> theory.Upper | None:
        """Return Theorem 4's bound with its data term, whether or not it holds; None if clip levels are not known."""
        return _upper(self.known, self.bits)

    @property
    def lower(self) -> theory.Lower | None:
        """Return Theorem 2's bound of the bandwidth loss, whether or not it holds."""
        clips = self.known.clips
        if clips is None:
            return None
        c_p, bits = self.known.trace_constant, self.known.paper_bits(self.bits)
        return theory.matching_lower(bits, clips, vocab=self.known.vocab, c_p=c_p)

    @property
    def upper_holds(self) -> bool:
        """Return whether the upper bound is a promise: (SE) holds, and the codec is the theory's."""
        return self.upper is not None and self.upper.small_error.holds

    @property
    def lower_holds(self) -> bool:
        """Return whether the lower bound is one: (ND) and (SE') hold, and codec and dither are the theory's."""
        return self.lower is not None and self.lower.holds and not self._stratified

    @property
    def noise(self) -> float | None:
        """Return the variance of the mean target: of its logits, or of sampled labels, sum_i (w_i / n_i) / K^2.

        That is of independent draws; stratified ones have less. None if the sites' clip levels or weights are unknown.
        """
        if not self.known.sparse:
            return None if self.upper is None else 2 * self.upper.bandwidth
        if any(site.weight is None for site in self.known.sites):
            return None
        return float((self.known.weights / self.bits).sum()) / len(self.bits) ** 2

    @property
    def coding_loss(self) -> float | None:
        """Return the KL that coding adds to a site's logits, in nats per context, the mean of the measured curves."""
        if self.known.curves is None:
            return None
        levels, rates = np.array(self.known.curves).T
        return float(np.exp(levels - rates * np.sqrt(self.bits)).mean())

    @property
    def cost(self) -> float | None:
        """Return what bits make smaller: the noise of the mean target, or the coding loss."""
        return self.noise if self.known.sparse or self.known.theory else self.coding_loss

    def next_megabyte(self) -> list[float | None]:
        """Return by how much the cost would fall with one more megabyte a round at each site, links aside."""
        now = self.cost
        if now is None:
            return [None] * len(self.bits)
        most = self.known.uplinks.limits().most[KINDS.index("codec")]
        gains: list[float | None] = []
        for site in range(len(self.bits)):
            more = self.bits.copy()
            more[site] = min(more[site] + 8 * MEGABYTE / self.known.contexts, most[site])
            then = replace(self, bits=more).cost
            gains.append(None if then is None else max(now - then, 0.0))
        return gains

    def doubts(self) -> list[str]:
        """Say what is not forecast, and what is missing for it."""
        known, upper, lower = self.known, self.upper, self.lower
        if self.cost is None:
            return [_missing(known)]
        if upper is None or lower is None:
            return []
        found = []
        if not lower.non_degenerate:
            found.append("(ND) fails: c_p is 0, so there is no lower bound")
        if not upper.small_error.holds:
            found.append(
                f"(SE) fails: the cubic remainder may be {upper.small_error.value:.3g}, more than the quadratic term "
                f"{upper.small_error.limit:.3g}: there is no upper bound at so few bits"
            )
        if not lower.small_error.holds:
            found.append(
                f"(SE') fails: the cubic remainder may be {lower.small_error.value:.3g}, its limit is "
                f"{lower.small_error.limit:.3g}: there is no lower bound at so few bits"
            )
        if self._stratified and lower.holds:
            found.append(
                "the dither is stratified: sites that agree go below the lower bound, which is of independent dither"
            )
        return found

    @property
    def _stratified(self) -> bool:
        return self.known.stratified and self.known.channel == "wire" and len(self.bits) > 1


def usual_policy(known: Known) -> str:
    """Return the policy if none is named: by measured curves, or the codec's usual one, or evenly.

    How the loss of a codec other than the theory's falls with bits is known from a run, and no weight stands in for it.
    """
    if known.curves is not None:
        return CURVES
    return usual_allocator(known.codec) if known.sparse or known.theory else "uniform"


def forecast(known: Known, policy: str | None = None, total: float | None = None) -> Forecast:
    """Share out `total` bits per context by a policy, or the usual one; without a total all send their caps."""
    policy = policy or usual_policy(known)
    if policy != CURVES:
        allocators.check(policy)
    caps, floors = known.caps(), known.floors()
    own = known.uplinks.limits().most[:2].min(axis=0)
    if total is None and not np.isfinite(own).all():
        unbounded = known.sites[int((~np.isfinite(own)).argmax())].name
        raise InputError(f"total must be given, or a limit for every site: {unbounded!r} has no link with a deadline")
    if total is not None:
        least, most = floors.sum(), caps.sum()
        if not least <= total <= most:
            raise BudgetError(f"total must be {_between(known, float(least), float(most))}, got {_size(known, total)}")
    if policy == CURVES:
        return Forecast(known, policy, caps if total is None else _by_curves(known, total))
    budget = Budget(caps, floors, known.vocab, total, policy, known.weights)
    return Forecast(known, policy, budget.bits(1))


def least_total(known: Known, kl: float) -> Forecast:
    """Return the plan of least total bits whose upper bound, data term included, is at most `kl`."""
    caps, floors = known.caps(), known.floors()
    best = Forecast(known, "optimal", _finite(known, caps))
    _refuse_unreachable(best, kl, lambda: _longer(known, kl))
    low = max(float(floors.sum()), 1.0)
    total = _bisect(lambda value: _promise(forecast(known, "optimal", value)) <= kl, low, float(best.bits.sum()))
    return forecast(known, "optimal", total)


def shortest_deadline(known: Known, kl: float) -> Forecast:
    """Return the plan of shortest deadline, every site sending at its cap, whose upper bound is at most `kl`."""
    if any(site.rate is None for site in known.sites):
        raise InputError("a deadline needs the link of every site")
    least = known.uplinks.least_deadline() * (1 + 1e-9) or 1e-6
    most = max(least, 1.0)

    def at(deadline: float) -> Forecast:
        return forecast(known.with_deadline(deadline))

    while most < 1e12 and not _promise(at(most)) <= kl:
        most *= 2
    _refuse_unreachable(at(most), kl, lambda: "raise the caps")
    return at(_bisect(lambda deadline: _promise(at(deadline)) <= kl, least, most))


def _upper(known: Known, bits: Floats) -> theory.Upper | None:
    clips = known.clips
    if clips is None:
        return None
    return theory.heterogeneous_upper(known.paper_bits(bits), clips, vocab=known.vocab, samples=known.samples)


def _by_curves(known: Known, total: float) -> Floats:
    if known.curves is None:
        raise InputError("policy 'curves' needs loss curves: plan from a run with estimator = \"curves\" in [budget]")
    levels, rates = np.array(known.curves).T
    return equal_slopes(levels, rates, total, known.caps(), known.floors())


def _missing(known: Known) -> str:
    """Say what would make a forecast possible."""
    if known.sparse:
        return "no noise is forecast: give weights, or plan from a finished run"
    if known.theory:
        return "no bracket is forecast: give clip levels or weights, or plan from a finished run"
    return (
        f"no loss is forecast: the paper's bounds are not of the codec {known.codec!r}, and no loss curves were "
        'measured: plan from a run with estimator = "curves" in [budget]'
    )


def _promise(plan: Forecast) -> float:
    """Return the upper bound; infinite where it does not hold."""
    upper = plan.upper
    if not plan.known.theory:
        raise InputError(
            f"a target is of the paper's bound, which is not about the codec {plan.known.codec!r}: give a total, and "
            "see what it costs"
        )
    if upper is None:
        raise InputError("a target needs clip levels or weights, or a finished run to plan from")
    return upper.total if plan.upper_holds else math.inf


def _longer(known: Known, kl: float) -> str:
    """Say what would make a target feasible that the caps do not reach."""
    if any(site.rate is None for site in known.sites):
        return "raise the caps"
    least = shortest_deadline(known, kl).known.deadline or 0.0
    return f"feasible is a deadline of {math.ceil(10 * least) / 10:g} s"


def _refuse_unreachable(best: Forecast, kl: float, advice: Callable[[], str]) -> None:
    kl = _check.real("target", kl, above=0.0)
    promise, upper = _promise(best), best.upper
    if upper is not None and upper.data >= kl:
        raise BudgetError(
            f"target must be greater than the data term {upper.data:.3g}, which no bits make smaller, got {kl:g}"
        )
    if math.isinf(promise):
        raise BudgetError(f"target {kl:g} is out of reach: with all sites at their caps (SE) fails: {advice()}")
    if not promise <= kl:
        raise BudgetError(
            f"target must be at least {promise:.3g}, what all sites at their caps give, got {kl:g}: {advice()}"
        )


def _finite(known: Known, caps: Floats) -> Floats:
    """Replace the cap of a site that has none by what no one would notice: 2^-64 of the range."""
    return np.where(np.isfinite(caps), caps, 32.0 * known.vocab)


def _bisect(good: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least value in [low, high] that is good, from above: `high` is good, and what is given is."""
    if good(low):
        return low
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _between(known: Known, least: float, most: float) -> str:
    if not math.isfinite(most):
        return f"at least {_size(known, least)}"
    return f"from {_size(known, least)} (what the codec needs) to {_size(known, most)} (what the sites may send)"


def _size(known: Known, total: float) -> str:
    return f"{total / known.vocab:.4g} bits per coordinate ({show_size(total * known.contexts / 8)} a round)"
