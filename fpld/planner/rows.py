"""A forecast as rows: one for each site, one for each policy. The same on the terminal, in JSON and on pages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.config import MOST_MESSAGE
from fpld.planner.forecast import POLICIES, forecast, usual_policy
from fpld.report.tables import filled
from fpld.units import show_rate

if TYPE_CHECKING:
    from fpld.planner.forecast import Forecast

Row = dict[str, Any]


def policies(plan: Forecast) -> dict[str, Forecast]:
    """Return the plan, and beside it the other policies at the same total, where they would share it out otherwise."""
    names = [name for name in (usual_policy(plan.known), *POLICIES) if name != plan.policy]
    others = {name: forecast(plan.known, name, float(plan.bits.sum())) for name in names}
    return {plan.policy: plan} | {
        name: other for name, other in others.items() if not np.allclose(other.bits, plan.bits, rtol=1e-6)
    }


def site_rows(plan: Forecast) -> list[Row]:
    """Return one row for each site: what it sends, what holds it, what one more megabyte a round would buy."""
    known, others = plan.known, policies(plan)
    caps = known.caps() / known.vocab
    rows: list[Row] = []
    for i, site in enumerate(known.sites):
        rows.append(
            {
                "site": site.name,
                "uplink": None if site.rate is None else show_rate(site.rate),
                "weight": site.allocation_weight if known.sparse or known.theory else None,
                "clip": site.clip_level if known.theory else None,
                "bits": float(plan.bits_per_coordinate[i]),
                "context_bits": float(plan.bits[i]),
                "cap": float(caps[i]) if np.isfinite(caps[i]) else None,
                "held_by": plan.held_by[i] or None,
                "round_bytes": plan.bytes_sent[i],
                "downlink_bytes": known.downlink,
                "down_weights": None if known.student is None else round(known.student),
                "down_prior": None if known.student is None else known.prior_notes or None,
                "round_seconds": plan.seconds[i],
                "next_megabyte": plan.next_megabyte()[i],
                **{name: float(other.bits_per_coordinate[i]) for name, other in others.items() if other is not plan},
            }
        )
    return filled(rows)


def policy_rows(plan: Forecast) -> list[Row]:
    """Return one row for each policy at the same total: what is sent, and what it costs.

    That is the noise of the mean target and the bracket of the loss, or the coding loss of measured curves.
    """
    return filled([_policy_row(name, each) for name, each in policies(plan).items()])


def advice(plan: Forecast) -> list[str]:
    """Say in sentences what the tables do not: the next megabyte, sites at their cap, doubts."""
    names = [site.name for site in plan.known.sites]
    held = {name: by for name, by in zip(names, plan.held_by, strict=True) if by}
    at_cap = ", ".join(f"{name} ({by})" for name, by in held.items())
    lines = [f"at their cap: {at_cap}" if held else "no site is at its cap"]
    gains = {name: gain for name, gain in zip(names, plan.next_megabyte(), strict=True) if gain is not None}
    what = "off the noise of the mean target" if plan.coding_loss is None else "nats off the coding loss"
    free = {name: gain for name, gain in gains.items() if name not in held}
    if free:
        lines.append(_best(free, "within the caps", what))
    if gains and (not free or max(gains.values()) > max(free.values())):
        lines.append(_best(gains, "if its cap were lifted", what))
    return lines + [f"caution: {doubt}" for doubt in [*plan.doubts(), *_too_large(plan)]]


def _too_large(plan: Forecast) -> list[str]:
    """Say which messages a network's engine would refuse."""
    sizes = {f"a frame of {site.name}": sent for site, sent in zip(plan.known.sites, plan.bytes_sent, strict=True)}
    sizes["a student"] = plan.known.downlink or 0
    return [
        f"{what} would have {size:,.0f} bytes, over a network at most {MOST_MESSAGE:,} are carried"
        for what, size in sizes.items()
        if size > MOST_MESSAGE
    ]


def _best(gains: dict[str, float], where: str, what: str) -> str:
    best = max(gains, key=lambda name: gains[name])
    return f"the next megabyte a round buys most at {best}, {where}: {gains[best]:.3g} {what}"


def _policy_row(name: str, plan: Forecast) -> Row:
    known, seconds, sent = plan.known, plan.round_seconds, sum(plan.bytes_sent)
    down = None if known.downlink is None else len(plan.bits) * known.downlink
    return {
        "policy": name,
        "total": float(plan.bits_per_coordinate.sum()),
        "round_bytes": sent,
        "downlink_bytes": down,
        "round_seconds": seconds,
        "rounds": known.rounds,
        "all_bytes": known.rounds * sent,
        "all_seconds": None if seconds is None else known.rounds * seconds,
        "noise": plan.noise,
        "coding_loss": plan.coding_loss,
        **_bracket(plan),
    }


def _bracket(plan: Forecast) -> Row:
    """Return the bounds that hold; None stands for those that do not."""
    upper = plan.upper if plan.upper_holds else None
    lower = plan.lower if plan.lower_holds else None
    return {
        "lower": None if lower is None else lower.bandwidth,
        "upper": None if upper is None else upper.bandwidth,
        "data_term": None if upper is None or plan.known.samples == math.inf else upper.data,
        "kl_at_most": None if upper is None else upper.total,
    }
