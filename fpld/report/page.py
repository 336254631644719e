"""Render pages: one self-contained HTML file for one or more runs.

A page contains its style and its scripts and loads nothing. Templates escape everything that came from outside. The
content security policy allows only the scripts in the page, by their hashes, so markup that escaping missed would not
run.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fpld import __version__
from fpld.errors import MissingExtraError
from fpld.federation.record import describe_absences
from fpld.report import tables
from fpld.report.charts import comparison_charts, run_charts
from fpld.units import show_duration, show_time
from fpld.validation import visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2 import Environment

    from fpld.report.run import RunData

SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "charts.js", "tables.js")


def report_page(runs: Sequence[RunData]) -> str:
    """Return the page of one run, or of several side by side."""
    parts = [comparison_section(runs)] if len(runs) > 1 else []
    parts += [run_section(run, f"run-{i}") for i, run in enumerate(runs)]
    title = "Report of a run" if len(runs) == 1 else f"Report of {len(runs)} runs"
    return render_page(title, f"fpld {__version__}: federated probe-logit distillation", "\n".join(parts))


def run_section(run: RunData, key: str) -> str:
    """Return the part of a page that shows a run, finished or not; `key` is the prefix of its tables' ids."""
    continuations = tables.continuation_rows(run)
    return template_environment().get_template("run.html.j2").render(
        run=run,
        id=key,
        absences=describe_absences(run.trace),
        tiles=tables.summary_tiles(run),
        left_out=tables.left_out(run),
        charts=run_charts(run),
        nodes=tables.drop_empty_columns(tables.node_rows(run)),
        privacy=[row.model_dump() for row in run.privacy],
        continuations=[row for row in continuations if row["round"] == continuations[0]["round"]],
        earlier=[row for row in continuations if row["round"] != continuations[0]["round"]],
        incidents=tables.incident_rows(run),
        results=tables.result_rows([run]),
        rounds=tables.drop_empty_columns(tables.round_rows(run)),
        allocation=tables.drop_empty_columns(tables.shown_allocation_rows(run)),
    )  # fmt: skip


def comparison_section(runs: Sequence[RunData]) -> str:
    """Return the part of a page that compares runs."""
    return template_environment().get_template("comparison.html.j2").render(
        charts=comparison_charts(runs), results=tables.result_rows(runs), differences=tables.difference_rows(runs)
    )  # fmt: skip


def render_page(title: str, subtitle: str, body: str) -> str:
    """Return a whole page around a body that templates have rendered."""
    from markupsafe import Markup

    scripts = [asset(name) for name in (*SCRIPTS, "report.js")]
    template = template_environment().get_template("page.html.j2")
    return template.render(
        title=title,
        subtitle=subtitle,
        body=Markup(body),  # noqa: S704 (rendered by our own templates, which escape)
        style=asset("page.css"),
        scripts=scripts,
        hashes=Markup(" ".join(_hash(script) for script in scripts)),  # noqa: S704 (hashes)
    )


def template_environment() -> Environment:
    """Return the environment of the templates, which escapes everything and shows no invisible characters."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise MissingExtraError("a page", "report") from None
    env = Environment(
        loader=PackageLoader("fpld.report"), autoescape=True, undefined=StrictUndefined, finalize=_visible
    )
    env.filters.update(
        cell=_cell,
        attributes=_attributes,
        heading=tables.heading,
        numeric=_numeric,
        duration=show_duration,
        time=show_time,
    )
    return env


def _visible(value: Any) -> Any:
    """Return text from outside as its reader sees it; what templates have rendered is so already."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def asset(name: str) -> str:
    """Read a style sheet or a script of the package."""
    return files("fpld.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _cell(value: Any, name: str = "") -> str:
    if value is None:
        return "–"
    if name in tables.PERCENT:
        return f"{value:.0%}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _attributes(value: Any) -> Any:
    """Return the attributes of a cell; a number has its class, and the value to sort by and to copy."""
    from markupsafe import Markup

    if value == tables.RISES:
        return Markup(' class="bad"')
    return Markup(' class="number" data-value="{}"').format(value) if _is_number(value) else ""


def _numeric(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(row[name] is None or _is_number(row[name]) for row in rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
