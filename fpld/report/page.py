"""Pages: one self-contained file for one or more runs. Everything that came from outside is escaped.

A page contains its style and its scripts and loads nothing: its policy allows the scripts that are in it, by their
hashes, and nothing else. So markup that escaping missed would not run.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fpld import __version__
from fpld.errors import MissingExtraError
from fpld.report import tables
from fpld.report.charts import comparison_charts, run_charts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2 import Environment

    from fpld.report.runs import Run

LIBRARIES = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
SCRIPTS = (*LIBRARIES, "charts.js", "tables.js")


def report_page(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of several side by side."""
    parts = [comparison(runs)] if len(runs) > 1 else []
    parts += [run_section(run, f"run-{i}") for i, run in enumerate(runs)]
    title = "Report of a run" if len(runs) == 1 else f"Report of {len(runs)} runs"
    return page(title, f"fpld {__version__}: federated probe-logit distillation", "\n".join(parts))


def run_section(run: Run, key: str) -> str:
    """Return the part of a page that shows a run, finished or not; `key` begins the ids of its tables."""
    continuations = tables.continuation_rows(run)
    return environment().get_template("run.html.j2").render(
        run=run,
        id=key,
        tiles=tables.tiles(run),
        charts=run_charts(run),
        nodes=tables.filled(tables.node_rows(run)),
        privacy=[row.model_dump() for row in run.privacy],
        continuations=[row for row in continuations if row["round"] == continuations[0]["round"]],
        earlier=[row for row in continuations if row["round"] != continuations[0]["round"]],
        incidents=tables.incident_rows(run),
        results=tables.result_rows([run]),
        rounds=tables.filled(tables.round_rows(run)),
        allocation=tables.filled(tables.allocation_rows(run)),
    )  # fmt: skip


def comparison(runs: Sequence[Run]) -> str:
    """Return the part of a page that shows runs side by side."""
    return environment().get_template("comparison.html.j2").render(
        charts=comparison_charts(runs), results=tables.result_rows(runs), differences=tables.difference_rows(runs)
    )  # fmt: skip


def page(title: str, subtitle: str, body: str) -> str:
    """Return a whole page around sections that templates have rendered."""
    from markupsafe import Markup

    scripts = [asset(name) for name in (*SCRIPTS, "report.js")]
    template = environment().get_template("page.html.j2")
    return template.render(
        title=title,
        subtitle=subtitle,
        body=Markup(body),  # noqa: S704 (rendered by our own templates, which escape)
        style=asset("page.css"),
        scripts=scripts,
        hashes=Markup(" ".join(_hash(script) for script in scripts)),  # noqa: S704 (hashes)
    )


def environment() -> Environment:
    """Return the templates' environment: escapes everything."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise MissingExtraError("a page", "report") from None
    env = Environment(loader=PackageLoader("fpld.report"), autoescape=True, undefined=StrictUndefined)
    env.filters.update(cell=_cell, attributes=_attributes, heading=_heading, numeric=_numeric)
    return env


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
    """Return the attributes of a number's cell: its class, and the value to sort by and to copy."""
    from markupsafe import Markup

    if value == tables.RISES:
        return Markup(' class="bad"')
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return Markup(' class="number" data-value="{}"').format(value) if number else ""


def _heading(name: str) -> str:
    return name.replace("_", " ")


def _numeric(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(
        row[name] is None or (isinstance(row[name], int | float) and not isinstance(row[name], bool)) for row in rows
    )
