"""Forecast what a plan gives: bits, bytes and seconds for each site, and the bracket of the loss.

Bits come from the allocators, bounds and conditions from `fpld.paper.theory`. The inverse questions, the least total
or the shortest deadline for a target, are answered by bisection. A bound counts only where its conditions hold:
`Forecast.doubts` says which condition fails where there is no bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fpld import validation
from fpld.budget.allocators import equal_slopes
from fpld.budget.limits import LIMIT_KINDS
from fpld.budget.policy import Budget, usual_allocator
from fpld.errors import BudgetError, InputError
from fpld.paper import theory
from fpld.registry import allocators
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.planner.expected import Expectation
    from fpld.planner.inputs import PlanInputs
    from fpld.types import Floats

POLICIES = ("uniform", "inverse")
"""Policies that a plan is compared with."""
CURVES = "curves"
"""The policy of equal slopes on measured loss curves; in a run it is `estimator = "curves"`."""
MEGABYTE = 1e6
_PRIVATE = "no loss is forecast with [privacy]: `fpld plan CONFIG --epsilon` says what its noise leaves of the gain"
_BISECTION_STEPS = 60  # the precision of float64
_MAX_DEADLINE_SECONDS = 1e12
_UNLIMITED_BITS = 32.0  # per coordinate: noise of 2^-64 of the range


@dataclass(frozen=True, eq=False, slots=True)
class Forecast:
    """A plan: the bits per probe context of each site under a policy, and what follows from them.

    Where sites send updates, the bits are those of the payload for each weight.
    """

    inputs: PlanInputs
    policy: str
    bits: Floats

    @property
    def bits_per_coordinate(self) -> Floats:
        """Return the bits of each site in the configuration's unit."""
        return self.bits / self.inputs.coordinates

    @property
    def bytes_sent(self) -> list[int]:
        """Return the bytes of each site in a round, header and checksum included."""
        return self.inputs.bytes_sent(self.bits)

    @property
    def seconds(self) -> list[float | None]:
        """Return the seconds of each site's uplink in a round; None where the link is not known."""
        pairs = zip(self.inputs.sites, self.bytes_sent, strict=True)
        return [None if site.rate is None else 8 * count / site.rate for site, count in pairs]

    @property
    def round_seconds(self) -> float | None:
        """Return the seconds of the slowest uplink, as sites send at the same time; None if a link is not known."""
        seconds = [second for second in self.seconds if second is not None]
        return max(seconds) if len(seconds) == len(self.bits) else None

    @property
    def held_by(self) -> list[str]:
        """Return what limits each site: `link`, `cap`, `codec` (`updates`), or an empty string."""
        limits = self.inputs.limits().most
        kinds = self.inputs.limit_kinds
        reached = np.isclose(self.bits, limits.min(axis=0), rtol=1e-9)
        return [kinds[int(kind)] if at else "" for at, kind in zip(reached, limits.argmin(axis=0), strict=True)]

    @property
    def upper(self) -> theory.Upper | None:
        """Return Theorem 4's bound with its data term, whether or not it holds; None if clip levels are not known."""
        clips = self.inputs.clips
        if clips is None:
            return None
        bits = self.inputs.paper_bits(self.bits)
        return theory.heterogeneous_upper(bits, clips, vocab=self.inputs.vocab, samples=self.inputs.samples)

    @property
    def lower(self) -> theory.Lower | None:
        """Return Theorem 2's bound of the bandwidth loss, whether or not it holds."""
        clips = self.inputs.clips
        if clips is None:
            return None
        bits = self.inputs.paper_bits(self.bits)
        return theory.matching_lower(bits, clips, vocab=self.inputs.vocab, c_p=self.inputs.trace_constant)

    @property
    def upper_holds(self) -> bool:
        """Return whether the upper bound applies: (SE) holds, and the codec is the theory's."""
        return self.upper is not None and self.upper.small_error.holds

    @property
    def lower_holds(self) -> bool:
        """Return whether the lower bound applies: (ND) and (SE') hold, and codec and dither are the theory's."""
        return self.lower is not None and self.lower.holds and not self._stratified

    @property
    def noise(self) -> float | None:
        """Return the variance of the mean target's logits, or of sampled labels: sum_i (w_i / n_i) / K^2.

        It is that of independent draws; stratified ones have less. None if clip levels or weights are not known.
        """
        if not self.inputs.sparse:
            return None if self.upper is None else 2 * self.upper.bandwidth
        if any(site.weight is None for site in self.inputs.sites):
            return None
        return float((self.inputs.weights / self.bits).sum()) / len(self.bits) ** 2

    @property
    def coding_loss(self) -> float | None:
        """Return the KL that coding adds to a site's logits, the mean of the measured curves in nats per context."""
        if self.inputs.curves is None:
            return None
        levels, rates = np.array(self.inputs.curves).T
        return float(np.exp(levels - rates * np.sqrt(self.bits)).mean())

    @property
    def expected(self) -> Expectation | None:
        """Return the student to expect, by kept runs; None where they tell nothing of what is sent."""
        from fpld.planner.sending import planned_expectation

        return planned_expectation(self)

    @property
    def cost(self) -> float | None:
        """Return what more bits reduce: the noise of the mean target, or the coding loss."""
        return self.noise if self.inputs.sparse or self.inputs.theory else self.coding_loss

    def with_megabyte(self) -> list[Forecast]:
        """Return, for each site, the plan with one more megabyte a round there, whatever its link."""
        inputs = self.inputs
        most = inputs.uplinks.limits().most[LIMIT_KINDS.index("codec")]
        if inputs.updates is not None:
            most = inputs.limits().most[inputs.limit_kinds.index("updates")]
        plans = []
        for site in range(len(self.bits)):
            more = self.bits.copy()
            more[site] = min(more[site] + 8 * MEGABYTE / inputs.units, most[site])
            plans.append(replace(self, bits=more))
        return plans

    def next_megabyte(self) -> list[float | None]:
        """Return by how much one more megabyte a round at each site would lower the cost, whatever its link."""
        cost = self.cost
        if cost is None:
            return [None] * len(self.bits)
        costs = [plan.cost for plan in self.with_megabyte()]
        return [None if lower_cost is None else max(cost - lower_cost, 0.0) for lower_cost in costs]

    def doubts(self) -> list[str]:
        """Return sentences on what is not forecast: the condition that fails, or the input that is missing."""
        upper = self.upper
        lower = self.lower
        if self.inputs.updates is not None:
            return []  # the paper's bounds are of labels
        if self.cost is None:
            missing = _missing_input(self.inputs)
            return [missing] if missing else []
        if upper is None or lower is None:
            return []
        doubts = []
        if not lower.non_degenerate:
            doubts.append("(ND) fails: c_p is 0, so there is no lower bound")
        if not upper.small_error.holds:
            doubts.append(
                f"(SE) fails: the cubic remainder may be {upper.small_error.value:.3g}, more than the quadratic term "
                f"{upper.small_error.limit:.3g}: there is no upper bound at so few bits"
            )
        if not lower.small_error.holds:
            doubts.append(
                f"(SE') fails: the cubic remainder may be {lower.small_error.value:.3g}, its limit is "
                f"{lower.small_error.limit:.3g}: there is no lower bound at so few bits"
            )
        if self._stratified and lower.holds:
            doubts.append(
                "the dither is stratified: nodes that agree go below the lower bound, which is of independent dither"
            )
        return doubts

    @property
    def _stratified(self) -> bool:
        return self.inputs.stratified and self.inputs.channel == "wire" and len(self.bits) > 1


def usual_policy(inputs: PlanInputs) -> str:
    """Return the default policy: by measured curves if there are any, else the codec's usual one, else `uniform`.

    For a codec that the theory does not cover, only a run shows how the loss falls with bits.
    """
    if inputs.curves is not None:
        return CURVES
    if inputs.updates is not None:
        return "optimal"  # Theorem 5 is about any coordinates
    return usual_allocator(inputs.codec) if inputs.sparse or inputs.theory else "uniform"


def forecast(inputs: PlanInputs, policy: str | None = None, total: float | None = None) -> Forecast:
    """Allocate `total` bits per context by a policy.

    Parameters
    ----------
    policy
        An allocator, or `curves`; by default `usual_policy`.
    total
        The sum over all sites; by default every site sends at its cap.

    Raises
    ------
    BudgetError
        If the total is less than the codec needs, or more than the caps allow.
    InputError
        If there is no total and a site has no cap.
    """
    policy = policy or usual_policy(inputs)
    if policy != CURVES:
        allocators.check(policy)
    caps = inputs.caps()
    floors = inputs.floors()
    site_limits = inputs.limits().most[:2].min(axis=0)  # of link and cap, without the codec's
    if total is None and inputs.updates is None and not np.isfinite(site_limits).all():
        unbounded = inputs.sites[int((~np.isfinite(site_limits)).argmax())].name
        raise InputError(f"total must be given, or a limit for every node: {unbounded!r} has no link with a deadline")
    if total is not None:
        least = floors.sum()
        most = caps.sum()
        if not least <= total <= most:
            raise BudgetError(
                f"total must be {_between(inputs, float(least), float(most))}, got {_size(inputs, total)}"
            )
    if policy == CURVES:
        return Forecast(inputs, policy, caps if total is None else _by_curves(inputs, total))
    budget = Budget(caps, floors, inputs.coordinates, total, policy, inputs.weights)
    return Forecast(inputs, policy, budget.bits(1))


def least_total(inputs: PlanInputs, kl: float) -> Forecast:
    """Return the plan of least total bits whose upper bound, data term included, is at most `kl`.

    Raises
    ------
    BudgetError
        If no plan within the caps reaches `kl`.
    """
    caps = inputs.caps()
    best = Forecast(inputs, "optimal", np.where(np.isfinite(caps), caps, _UNLIMITED_BITS * inputs.vocab))
    _check_reachable(best, kl, lambda: _feasible_deadline(inputs, kl))
    low = max(float(inputs.floors().sum()), 1.0)
    total = _bisect(lambda value: _guaranteed(forecast(inputs, "optimal", value)) <= kl, low, float(best.bits.sum()))
    return forecast(inputs, "optimal", total)


def shortest_deadline(inputs: PlanInputs, kl: float) -> Forecast:
    """Return the plan of shortest deadline, every site sending at its cap, whose upper bound is at most `kl`.

    Raises
    ------
    BudgetError
        If no deadline reaches `kl`.
    """
    if any(site.rate is None for site in inputs.sites):
        raise InputError("a deadline needs the link of every node")
    least = inputs.uplinks.least_deadline() * (1 + 1e-9) or 1e-6
    most = max(least, 1.0)

    def at(deadline: float) -> Forecast:
        return forecast(replace(inputs, deadline=deadline))

    while most < _MAX_DEADLINE_SECONDS and not _guaranteed(at(most)) <= kl:
        most *= 2
    _check_reachable(at(most), kl, lambda: "raise the caps")
    return at(_bisect(lambda deadline: _guaranteed(at(deadline)) <= kl, least, most))


def _by_curves(inputs: PlanInputs, total: float) -> Floats:
    if inputs.curves is None:
        raise InputError("policy 'curves' needs loss curves: plan from a run with estimator = \"curves\" in [budget]")
    levels, rates = np.array(inputs.curves).T
    return equal_slopes(levels, rates, total, inputs.caps(), inputs.floors())


def _missing_input(inputs: PlanInputs) -> str:
    """Return a sentence on what would make a forecast possible; none of labels, whose loss kept runs tell."""
    if inputs.sparse:
        return "" if inputs.learning is not None else _PRIVATE
    if inputs.theory:
        return "no bounds are forecast: give clip levels or weights, or plan from a finished run"
    return (
        f"no loss is forecast: the paper's bounds are not of the codec {inputs.codec!r}, and no loss curves were "
        'measured: plan from a run with estimator = "curves" in [budget]'
    )


def _guaranteed(plan: Forecast) -> float:
    """Return the upper bound; infinite where it does not hold."""
    upper = plan.upper
    if not plan.inputs.theory:
        what = f"the codec {plan.inputs.codec!r}" if plan.inputs.updates is None else "updates"
        raise InputError(
            f"a target is of the paper's bound, which is not about {what}: give a total, and see what it costs"
        )
    if upper is None:
        raise InputError("a target needs clip levels or weights, or a finished run to plan from")
    return upper.total if plan.upper_holds else math.inf


def _feasible_deadline(inputs: PlanInputs, kl: float) -> str:
    """Return advice for a target that the caps do not reach."""
    if any(site.rate is None for site in inputs.sites):
        return "raise the caps"
    least = shortest_deadline(inputs, kl).inputs.deadline or 0.0
    return f"feasible is a deadline of {math.ceil(10 * least) / 10:g} s"


def _check_reachable(best: Forecast, kl: float, advice: Callable[[], str]) -> None:
    """Raise BudgetError, with advice, if the best plan does not reach a target."""
    kl = validation.real("target", kl, above=0.0)
    bound = _guaranteed(best)
    upper = best.upper
    if upper is not None and upper.data >= kl:
        raise BudgetError(
            f"target must be greater than the data term {upper.data:.3g}, which no bits make smaller, got {kl:g}"
        )
    if math.isinf(bound):
        raise BudgetError(f"target {kl:g} is out of reach: with all nodes at their caps (SE) fails: {advice()}")
    if not bound <= kl:
        raise BudgetError(
            f"target must be at least {bound:.3g}, what all nodes at their caps give, got {kl:g}: {advice()}"
        )


def _bisect(good: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least good value in [low, high] by bisection of its logarithm; `high` must be good."""
    if good(low):
        return low
    for _ in range(_BISECTION_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _between(inputs: PlanInputs, least: float, most: float) -> str:
    if not math.isfinite(most):
        return f"at least {_size(inputs, least)}"
    needs = "the codec needs" if inputs.updates is None else "one bit per weight needs"
    return f"from {_size(inputs, least)} (what {needs}) to {_size(inputs, most)} (what the nodes may send)"


def _size(inputs: PlanInputs, total: float) -> str:
    of_one = "context" if inputs.updates is None else inputs.bit_unit
    return f"{total:,.6g} bits per {of_one} ({show_size(total * inputs.units / 8)} a round)"
