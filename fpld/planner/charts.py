"""The figures of a plan: who gets how many bits, and what a total would buy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fpld.planner.forecast import forecast
from fpld.planner.rows import policies
from fpld.report.chart import Axis, Chart, Series

if TYPE_CHECKING:
    from fpld.planner import Forecast

_POINTS = 25


def plan_charts(plan: Forecast) -> list[Chart]:
    """Return the allocation, and what a total costs, if that can be forecast."""
    charts = [allocation(plan)]
    if plan.cost is not None:
        charts.append(cost_by_total(plan))
    return charts


def allocation(plan: Forecast) -> Chart:
    """Draw the bits of each site under each policy, and the caps."""
    names = [site.name for site in plan.known.sites]
    series = [Series(name, "bars", names, each.bits_per_coordinate.tolist()) for name, each in policies(plan).items()]
    ends = ", ".join(f"{name} {bits:.3g}" for name, bits in zip(names, series[0].y, strict=True))
    return Chart(
        name="allocation",
        title="Bits for each site",
        alt=f"Bits per coordinate of each site ; {plan.policy}: {ends}.",
        x=Axis("site", "band"),
        y=Axis("bits per coordinate"),
        series=series,
        caption="All policies share out the same total within the same caps.",
    )


def cost_by_total(plan: Forecast) -> Chart:
    """Draw noise or coding loss against the bytes of a round, from the least that is feasible to the caps."""
    known = plan.known
    caps, floors = known.caps(), known.floors()
    chosen = float(plan.bits.sum())
    least, most = max(float(floors.sum()), chosen / 64), float(caps.sum())
    most = most if np.isfinite(most) else 4 * chosen
    totals = np.geomspace(least, max(most, least), _POINTS).clip(least, most) if most > least else np.array([least])
    found = {name: [forecast(known, name, float(total)) for total in totals] for name in policies(plan)}
    series = [
        Series(name, "line", [sum(each.bytes_sent) for each in plans], [each.cost or math.nan for each in plans])
        for name, plans in found.items()
    ]
    series.append(Series("this plan", "dots", [sum(plan.bytes_sent)], [plan.cost or math.nan]))
    what = "Noise of the mean target" if plan.coding_loss is None else "Coding loss"
    return Chart(
        name="cost-by-total",
        title=f"{what} against what is sent in a round",
        alt=(
            f"{what} falls from {series[0].y[0]:.3g} to {series[0].y[-1]:.3g} as the round's bytes grow; this plan has "
            f"{series[-1].y[0]:.3g}."
        ),
        x=Axis("sent by all sites in a round (bytes)", "log", "B"),
        y=Axis("variance" if plan.coding_loss is None else "KL (nats per context)", "log"),
        series=series,
        caption="Policies share out the same total; lower is better.",
    )
