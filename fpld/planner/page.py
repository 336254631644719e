"""The page of a plan: one self-contained file, made as that of a run is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld import __version__
from fpld.planner.charts import plan_charts
from fpld.planner.rows import advice, policy_rows, site_rows
from fpld.report.page import environment, page
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.planner import Forecast


_COSTS = {
    "noise": "noise of the mean target",
    "coding_loss": "coding loss (nats per context)",
    "kl_at_most": "KL at most (nats)",
}


def plan_page(plans: Mapping[str, Forecast], note: str = "") -> str:
    """Return the page of a plan, or of the answers to a target."""
    body = "\n".join(plan_section(name, plan, f"plan-{i}") for i, (name, plan) in enumerate(plans.items()))
    return page("Plan of a federation", f"fpld {__version__}. {note}".strip(), body)


def plan_section(name: str, plan: Forecast, key: str) -> str:
    """Return the part of a page that shows a plan."""
    first = policy_rows(plan)[0]
    tiles = {"total of a round": show_size(first["round_bytes"]), "total of all rounds": show_size(first["all_bytes"])}
    if "round_seconds" in first:
        tiles["uplinks of a round"] = f"{first['round_seconds']:.4g} s"
    tiles |= {label: f"{first[column]:.3g}" for column, label in _COSTS.items() if first.get(column) is not None}
    return environment().get_template("plan.html.j2").render(
        name=name[:1].upper() + name[1:],
        id=key,
        tiles=tiles,
        advice=advice(plan),
        charts=plan_charts(plan),
        sites=site_rows(plan),
        policies=policy_rows(plan),
    )  # fmt: skip
