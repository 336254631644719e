"""The figures of a plan: who gets how many bits, and what a total would buy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.planner.forecast import forecast
from fpld.planner.rows import policies
from fpld.report.chart import Axis, Chart, Series

if TYPE_CHECKING:
    from fpld.planner import Forecast

_POINTS = 25


def plan_charts(plan: Forecast) -> list[Chart]:
    """Return the allocation, and the loss against the total if clip levels are known."""
    charts = [allocation(plan)]
    if plan.upper is not None:
        charts.append(loss_by_total(plan))
    return charts


def allocation(plan: Forecast) -> Chart:
    """Draw the bits of each site under each policy, and the caps."""
    names = [site.name for site in plan.known.sites]
    series = [Series(name, "bars", names, each.bits_per_coordinate.tolist()) for name, each in policies(plan).items()]
    ends = ", ".join(f"{name} {bits:.3g}" for name, bits in zip(names, series[0].y, strict=True))
    return Chart(
        name="allocation",
        title="Bits for each site",
        alt=f"Bits per coordinate of each site under three policies; {plan.policy}: {ends}.",
        x=Axis("site", "band"),
        y=Axis("bits per coordinate"),
        series=series,
        caption="All policies share out the same total within the same caps.",
    )


def loss_by_total(plan: Forecast) -> Chart:
    """Draw the bounds of the loss against the bytes of a round, from the least that is feasible to the caps."""
    known = plan.known
    caps, floors = known.caps(), known.floors()
    chosen = float(plan.bits.sum())
    least, most = max(float(floors.sum()), chosen / 64), float(caps.sum())
    most = most if np.isfinite(most) else 4 * chosen
    totals = np.geomspace(least, max(most, least), _POINTS).clip(least, most) if most > least else np.array([least])
    found = {name: [forecast(known, name, float(total)) for total in totals] for name in policies(plan)}
    series = []
    for name, plans in found.items():
        x = [sum(each.bytes_sent) for each in plans]
        if name == plan.policy:
            lower = [each.lower.bandwidth for each in plans if each.lower]
            series.append(Series(f"{name}: bracket", "band", x, _promises(plans), lower))
        series.append(Series(name, "line", x, _promises(plans)))
    series.append(Series("this plan", "dots", [sum(plan.bytes_sent)], _promises([plan])))
    return Chart(
        name="loss-by-total",
        title="Loss against what is sent in a round",
        alt=(
            f"The upper bound of the loss falls from {series[1].y[0]:.3g} to {series[1].y[-1]:.3g} nats as the round's "
            f"bytes grow; this plan has {series[-1].y[0]:.3g}."
        ),
        x=Axis("sent by all sites in a round (bytes)", "log", "B"),
        y=Axis("KL at most (nats)", "log"),
        series=series,
        caption="The band goes down to the lower bound of the bandwidth loss. Where (SE) fails no bound is a promise.",
    )


def _promises(plans: list[Forecast]) -> list[float]:
    return [each.upper.total for each in plans if each.upper is not None]
