"""Render a plan: rows for the terminal, JSON and pages, sentences of advice, figures, and a self-contained page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import __version__
from fpld.config import MOST_MESSAGE
from fpld.planner.forecast import POLICIES, forecast, usual_policy
from fpld.planner.sending import (
    expected_rows,
    megabyte_shares,
    missing_runs,
    sending_advice,
    shown_expected,
)
from fpld.report.charts import Axis, Chart, Series
from fpld.report.page import render_page, template_environment
from fpld.report.tables import drop_empty_columns
from fpld.units import show_rate, show_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.planner.forecast import Forecast

Row = dict[str, Any]
_CURVE_POINTS = 25
_COSTS = {
    "noise": "noise of the mean target",
    "coding_loss": "coding loss (nats per context)",
    "kl_at_most": "KL at most (nats)",
}


def plan_charts(plan: Forecast) -> list[Chart]:
    """Return the figures of a plan: the allocation, and the expected student or the cost by total, where forecast."""
    charts = [_allocation_chart(plan)]
    if plan.expected is not None:
        return [*charts, _expected_chart(plan)]
    return charts if plan.cost is None else [*charts, _cost_chart(plan)]


def _allocation_chart(plan: Forecast) -> Chart:
    """Return a chart of the bits of each site under each policy."""
    names = [site.name for site in plan.inputs.sites]
    series = [Series(name, "bars", names, each.bits.tolist()) for name, each in compare_policies(plan).items()]
    ends = ", ".join(f"{name} {bits:.3g}" for name, bits in zip(names, series[0].y, strict=True))
    unit = plan.inputs.bit_unit
    return Chart(
        name="allocation",
        title="Bits for each node",
        alt=f"Bits per {unit} of each node; {plan.policy}: {ends}.",
        x=Axis("node", "band"),
        y=Axis(f"bits per {unit}"),
        series=series,
        caption="All policies share out the same total within the same caps.",
    )


def _cost_chart(plan: Forecast) -> Chart:
    """Return a chart of the cost against the bytes of a round, from the least that is feasible to the caps."""
    series = []
    for name in compare_policies(plan):
        plans = [forecast(plan.inputs, name, total) for total in _totals(plan)]
        costs = [each.cost or math.nan for each in plans]
        series.append(Series(name, "line", [sum(each.bytes_sent) for each in plans], costs))
    series.append(Series("this plan", "dots", [sum(plan.bytes_sent)], [plan.cost or math.nan]))
    what = "Noise of the mean target" if plan.coding_loss is None else "Coding loss"
    return Chart(
        name="cost-by-total",
        title=f"{what} against what is sent in a round",
        alt=(
            f"{what} falls from {series[0].y[0]:.3g} to {series[0].y[-1]:.3g} as the round's bytes grow; this plan has "
            f"{series[-1].y[0]:.3g}."
        ),
        x=Axis("sent by all nodes in a round (bytes)", "log", "B"),
        y=Axis("variance" if plan.coding_loss is None else "KL (nats per context)", "log"),
        series=series,
        caption="Policies share out the same total; lower is better.",
    )


def _totals(plan: Forecast) -> list[float]:
    """Return totals from the least that is feasible to the caps."""
    planned = float(plan.bits.sum())
    least = max(float(plan.inputs.floors().sum()), planned / 64)
    most = float(plan.inputs.caps().sum())
    most = most if np.isfinite(most) else 4 * planned
    totals = np.geomspace(least, most, _CURVE_POINTS).clip(least, most) if most > least else np.array([least])
    return [float(total) for total in totals]


def _expected_chart(plan: Forecast) -> Chart:
    """Return a chart of the expected student against the bytes of a round, with the range of the plan's policy."""
    series = []
    bounds: dict[str, list[float]] = {"low": [], "high": []}
    for name in compare_policies(plan):
        pairs = [
            (sum(each.bytes_sent), expected.share)
            for each in (forecast(plan.inputs, name, total) for total in _totals(plan))
            if (expected := each.expected) is not None
        ]
        sent = [float(count) for count, _ in pairs]
        series.append(Series(name, "line", sent, [100 * share.value for _, share in pairs]))
        if name == plan.policy:
            for end in bounds:
                bounds[end] = [100 * getattr(share, end) for _, share in pairs]
    series += [Series(f"90 % range: {end}", "line", series[0].x, values) for end, values in bounds.items()]
    now = plan.expected
    share = math.nan if now is None else 100 * now.share.value
    series.append(Series("this plan", "dots", [sum(plan.bytes_sent)], [share]))
    return Chart(
        name="expected-by-total",
        title="Expected student against what is sent in a round",
        alt=(
            f"The student is expected to come {series[0].y[0]:.0f} to {series[0].y[-1]:.0f} % of the way from the base "
            f"to the mixture as the round's bytes grow; this plan {share:.0f} %."
        ),
        x=Axis("sent by all nodes in a round (bytes)", "log", "B"),
        y=Axis("way from base to mixture (%)"),
        series=series,
        caption="0 % is the base model, 100 % the mixture of the nodes' models; higher is better.",
    )


def compare_policies(plan: Forecast) -> dict[str, Forecast]:
    """Return the plan, and the other policies at the same total where their allocation differs."""
    names = [name for name in (usual_policy(plan.inputs), *POLICIES) if name != plan.policy]
    others = {name: forecast(plan.inputs, name, float(plan.bits.sum())) for name in names}
    return {plan.policy: plan} | {
        name: other for name, other in others.items() if not np.allclose(other.bits, plan.bits, rtol=1e-6)
    }


def site_rows(plan: Forecast) -> list[Row]:
    """Return one row for each site: what it sends, its limits, and the gain of one more megabyte a round."""
    inputs = plan.inputs
    others = compare_policies(plan)
    caps = inputs.caps() / inputs.coordinates
    weight_bits = None if inputs.updates is None else inputs.weight_bits(plan.bits)
    shares = megabyte_shares(plan)
    rows: list[Row] = []
    for i, site in enumerate(inputs.sites):
        rows.append(
            {
                "site": site.name,
                "node": site.name,
                "uplink": None if site.rate is None else show_rate(site.rate),
                "weight": site.allocation_weight if inputs.sparse or inputs.theory else None,
                "clip": site.clip_level if inputs.theory else None,
                "bits": float(plan.bits_per_coordinate[i]),
                "context_bits": float(plan.bits[i]) if weight_bits is None else None,
                "weight_bits": None if weight_bits is None else weight_bits[i],
                "cap": float(caps[i]) if np.isfinite(caps[i]) else None,
                "cap_context_bits": _context_cap(plan, float(caps[i])),
                "held_by": plan.held_by[i] or None,
                "round_bytes": plan.bytes_sent[i],
                "downlink_bytes": inputs.downlink,
                "down_weights": None if inputs.student is None else round(inputs.student),
                "down_prior": None if inputs.student is None else inputs.prior_notes or None,
                "round_seconds": plan.seconds[i],
                "next_megabyte": plan.next_megabyte()[i],
                "next_megabyte_share": shares[i],
                **{name: float(other.bits_per_coordinate[i]) for name, other in others.items() if other is not plan},
            }
        )
    return drop_empty_columns(rows)


def _context_cap(plan: Forecast, cap: float) -> float | None:
    """Return a cap in bits per context; None of updates, whose caps are in bits per weight, or without a cap."""
    return cap * plan.inputs.coordinates if plan.inputs.updates is None and math.isfinite(cap) else None


def shown_rows(rows: list[Row], plan: Forecast) -> list[Row]:
    """Return rows of sites or of policies as a person reads them: nodes, and all bits in bits per context.

    The rows of JSON keep their names and their bits per coordinate too. Where a loss is expected, noise is not shown.
    """
    scale = plan.inputs.coordinates
    scaled = {"cap", "total", *compare_policies(plan)}
    names = {"total": "total_bits", "held_by": "limited_by", "expected_share": "expected"}
    hidden = {"site", "bits", "cap_context_bits", "total_context_bits", "expected_low", "expected_high"}
    if plan.expected is not None:
        hidden |= {"noise", "next_megabyte"}
    return [
        {
            names.get(name, name): value * scale if name in scaled and value is not None else value
            for name, value in row.items()
            if name not in hidden
        }
        for row in rows
    ]


def policy_rows(plan: Forecast) -> list[Row]:
    """Return one row for each policy at the same total: what is sent, and the noise and bracket or the coding loss."""
    return drop_empty_columns([_policy_row(name, each) for name, each in compare_policies(plan).items()])


def advice(plan: Forecast) -> list[str]:
    """Return sentences on what to expect and to send, on sites at their cap, on the next megabyte, and doubts."""
    names = [site.name for site in plan.inputs.sites]
    at_cap = {name: limit for name, limit in zip(names, plan.held_by, strict=True) if limit}
    shown = ", ".join(f"{name} ({limit})" for name, limit in at_cap.items())
    lines = [*sending_advice(plan), f"at their cap: {shown}" if at_cap else "no node is at its cap"]
    expected = plan.expected is not None
    values = megabyte_shares(plan) if expected else plan.next_megabyte()
    gains = {name: gain for name, gain in zip(names, values, strict=True) if gain}
    if expected:
        gains = {name: 100 * gain for name, gain in gains.items()}
    what = "nats off the coding loss" if plan.coding_loss is not None else "off the noise of the mean target"
    what = "% of the way from base to mixture" if expected else what
    free = {name: gain for name, gain in gains.items() if name not in at_cap}
    if free:
        lines.append(_best_gain(free, "within the caps", what))
    if gains and (not free or max(gains.values()) > max(free.values())):
        lines.append(_best_gain(gains, "if its cap were lifted", what))
    doubts = [*missing_runs(plan), *plan.doubts(), *_oversized_messages(plan)]
    return lines + [f"caution: {doubt}" for doubt in doubts]


def _oversized_messages(plan: Forecast) -> list[str]:
    """Return sentences on messages that the network's engine would refuse."""
    sizes = {f"a frame of {site.name}": sent for site, sent in zip(plan.inputs.sites, plan.bytes_sent, strict=True)}
    sizes["a student"] = plan.inputs.downlink or 0
    return [
        f"{what} would have {size:,.0f} bytes, over a network at most {MOST_MESSAGE:,} are carried"
        for what, size in sizes.items()
        if size > MOST_MESSAGE
    ]


def _best_gain(gains: dict[str, float], where: str, what: str) -> str:
    best = max(gains, key=lambda name: gains[name])
    return f"the next megabyte a round buys most at {best}, {where}: {gains[best]:.3g} {what}"


def _policy_row(name: str, plan: Forecast) -> Row:
    inputs = plan.inputs
    seconds = plan.round_seconds
    sent = sum(plan.bytes_sent)
    down = None if inputs.downlink is None else len(plan.bits) * inputs.downlink
    expected = plan.expected
    share = None if expected is None else expected.share
    return {
        "policy": name,
        "total": float(plan.bits_per_coordinate.sum()),
        "total_context_bits": float(plan.bits.sum()) if inputs.updates is None else None,
        "round_bytes": sent,
        "downlink_bytes": down,
        "round_seconds": seconds,
        "rounds": inputs.rounds,
        "all_bytes": inputs.rounds * sent,
        "all_seconds": None if seconds is None else inputs.rounds * seconds,
        "expected_share": None if share is None else share.value,
        "expected_low": None if share is None else share.low,
        "expected_high": None if share is None else share.high,
        "noise": plan.noise,
        "coding_loss": plan.coding_loss,
        **_bracket(plan),
    }


def _bracket(plan: Forecast) -> Row:
    """Return the bounds, None for those that do not hold."""
    upper = plan.upper if plan.upper_holds else None
    lower = plan.lower if plan.lower_holds else None
    return {
        "lower": None if lower is None else lower.bandwidth,
        "upper": None if upper is None else upper.bandwidth,
        "data_term": None if upper is None or plan.inputs.samples == math.inf else upper.data,
        "kl_at_most": None if upper is None else upper.total,
    }


def plan_page(plans: Mapping[str, Forecast], note: str = "") -> str:
    """Return the page of plans by their titles: one plan, or the answers to a target."""
    body = "\n".join(plan_section(name, plan, f"plan-{i}") for i, (name, plan) in enumerate(plans.items()))
    return render_page("Plan of a federation", f"fpld {__version__}. {note}".strip(), body)


def plan_section(name: str, plan: Forecast, key: str) -> str:
    """Return the part of a page that shows a plan."""
    first = policy_rows(plan)[0]
    tiles = {"total of a round": show_size(first["round_bytes"]), "total of all rounds": show_size(first["all_bytes"])}
    if "round_seconds" in first:
        tiles["uplinks of a round"] = f"{first['round_seconds']:.4g} s"
    expected = plan.expected
    if expected is not None:
        tiles["expected held-out loss (90 % range)"] = expected.short
    else:
        tiles |= {label: f"{first[column]:.3g}" for column, label in _COSTS.items() if first.get(column) is not None}
    return template_environment().get_template("plan.html.j2").render(
        name=name[:1].upper() + name[1:],
        id=key,
        tiles=tiles,
        advice=advice(plan),
        charts=plan_charts(plan),
        ways=shown_expected(expected_rows(plan)),
        sites=shown_rows(site_rows(plan), plan),
        policies=shown_rows(policy_rows(plan), plan),
    )  # fmt: skip
