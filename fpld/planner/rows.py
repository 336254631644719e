"""A forecast as rows: one for each site, one for each policy. The same on the terminal, in JSON and on pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.planner.forecast import POLICIES, forecast
from fpld.units import show_rate

if TYPE_CHECKING:
    from fpld.planner.forecast import Forecast

Row = dict[str, Any]


def policies(plan: Forecast) -> dict[str, Forecast]:
    """Return the plan, and beside it the other policies at the same total and under the same caps."""
    others = {name: forecast(plan.known, name, float(plan.bits.sum())) for name in POLICIES if name != plan.policy}
    return {plan.policy: plan, **others}


def site_rows(plan: Forecast) -> list[Row]:
    """Return one row for each site: what it sends, what holds it, what one more megabyte a round would buy."""
    known, others = plan.known, policies(plan)
    caps = known.caps() / known.vocab
    rows: list[Row] = []
    for i, site in enumerate(known.sites):
        rows.append(
            {
                "site": site.name,
                "uplink": "" if site.rate is None else show_rate(site.rate),
                "weight": site.allocation_weight,
                "clip": site.clip_level,
                "bits": float(plan.bits_per_coordinate[i]),
                "cap": float(caps[i]),
                "held_by": plan.held_by[i],
                "round_bytes": plan.bytes_sent[i],
                "round_seconds": plan.seconds[i],
                "next_megabyte": plan.next_megabyte()[i],
                **{name: float(other.bits_per_coordinate[i]) for name, other in others.items() if other is not plan},
            }
        )
    return rows


def policy_rows(plan: Forecast) -> list[Row]:
    """Return one row for each policy at the same total: cost, the bracket of the bandwidth loss, the data term."""
    return [_policy_row(name, each) for name, each in policies(plan).items()]


def advice(plan: Forecast) -> list[str]:
    """Say in sentences what the tables do not: the next megabyte, sites at their cap, doubts."""
    names = [site.name for site in plan.known.sites]
    held = {name: by for name, by in zip(names, plan.held_by, strict=True) if by}
    at_cap = ", ".join(f"{name} ({by})" for name, by in held.items())
    lines = [f"at their cap: {at_cap}" if held else "no site is at its cap"]
    gains = {name: gain for name, gain in zip(names, plan.next_megabyte(), strict=True) if gain is not None}
    free = {name: gain for name, gain in gains.items() if name not in held}
    if free:
        lines.append(_best(free, "within the caps"))
    if gains and (not free or max(gains.values()) > max(free.values())):
        lines.append(_best(gains, "if its cap were lifted"))
    return lines + [f"caution: {doubt}" for doubt in plan.doubts()]


def _best(gains: dict[str, float], where: str) -> str:
    best = max(gains, key=lambda name: gains[name])
    return f"the next megabyte a round buys most at {best}, {where}: {gains[best]:.3g} nats off the upper bound"


def _policy_row(name: str, plan: Forecast) -> Row:
    known, upper, lower, seconds = plan.known, plan.upper, plan.lower, plan.round_seconds
    sent = sum(plan.bytes_sent)
    return {
        "policy": name,
        "total": float(plan.bits_per_coordinate.sum()),
        "round_bytes": sent,
        "round_seconds": seconds,
        "rounds": known.rounds,
        "all_bytes": known.rounds * sent,
        "all_seconds": None if seconds is None else known.rounds * seconds,
        "lower": None if lower is None else lower.bandwidth,
        "upper": None if upper is None else upper.bandwidth,
        "data_term": None if upper is None else upper.data,
        "kl_at_most": None if upper is None else upper.total,
        "upper_holds": plan.upper_holds,
        "lower_holds": plan.lower_holds,
    }
