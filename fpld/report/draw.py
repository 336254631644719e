"""Draw figures as PNG and SVG files with matplotlib, which only this module imports."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fpld.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fpld.report.charts import Axis, Chart, Series

CHART_INCHES = (8.0, 4.2)
_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def save_figure(draw: Callable[[Figure], None], path: Path, size: tuple[float, float]) -> list[Path]:
    """Draw on an empty figure of `size` inches and write it as `path`.png and `path`.svg."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("drawing figures", "figures") from None
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    # A fixed salt and no date: the same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "fpld"}):
        figure.savefig(files[0], dpi=150)
        figure.savefig(files[1], metadata={"Date": None})
    return files


def save_charts(charts: Iterable[Chart], folder: Path, prefix: str = "") -> list[Path]:
    """Write each chart as PNG and SVG into a folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for chart in charts:
        files += save_figure(partial(draw_chart, chart), folder / f"{prefix}{chart.name}", CHART_INCHES)
    return files


def draw_chart(chart: Chart, figure: Figure) -> None:
    """Draw a chart on an empty figure, as the page shows it."""
    axes = figure.subplots()
    shown = chart.shown()
    places = _places(shown) if chart.x.scale == "band" else {}
    bars = [series for series in shown if series.kind == "bars"]
    heights: dict[float, float] = {}
    for series, colour in zip(shown, chart.colours, strict=True):
        x = [places.get(value, value) for value in series.x]
        if series.kind == "line":
            axes.plot(x, series.y, "o-", color=colour, label=_plain(series.name), markersize=4, clip_on=False)
        elif series.kind == "dots":
            axes.plot(x, series.y, "o", color=colour, label=_plain(series.name), clip_on=False)
        elif series.kind == "rule":
            axes.axhline(series.y[0], color=colour, linestyle="--", label=_plain(series.name))
        elif series.kind == "band":
            axes.fill_between(x, series.low, series.y, color=colour, alpha=0.25, label=_plain(series.name))
            axes.plot(x, series.y, color=colour)
            axes.plot(x, series.low, color=colour)
            if len(x) == 1:  # A band of one point has no width: draw a thick line.
                axes.vlines(x, series.low, series.y, color=colour, alpha=0.25, linewidth=16)
        elif series.kind == "bars":
            width = 0.8 / len(bars)
            offset = (bars.index(series) - (len(bars) - 1) / 2) * width
            axes.bar([v + offset for v in x], series.y, width, color=colour, label=_plain(series.name))
            if series.limit:
                left = [v + offset - width / 2 for v in x]
                axes.hlines(series.limit, left, [v + width for v in left], color="black", linewidth=1.5)
        else:
            below = [heights.get(v, 0.0) for v in x]
            axes.bar(x, series.y, 0.7, bottom=below, color=colour, label=_plain(series.name))
            heights.update({v: b + y for v, b, y in zip(x, below, series.y, strict=True)})
    _axis(axes, chart.x, "x", [value for series in shown if series.kind != "rule" for value in series.x])
    _axis(axes, chart.y, "y", [value for series in shown for value in series.y])
    if places:
        step = max(len(places) // 20, 1)
        axes.set_xticks(list(places.values())[::step], [_plain(str(name)) for name in list(places)[::step]])
    axes.set_title(_plain(chart.title), loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _places(shown: list[Series]) -> dict[object, int]:
    return {name: i for i, name in enumerate(dict.fromkeys(x for series in shown for x in series.x))}


def _axis(axes: Axes, axis: Axis, which: str, values: Sequence[Any]) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter

    (axes.set_xlabel if which == "x" else axes.set_ylabel)(_plain(axis.label))
    target = axes.xaxis if which == "x" else axes.yaxis
    if axis.scale == "log":
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    if axis.unit == "B":
        positive = [value for value in values if value > 0] or [1.0]
        # In one unit, that of the largest number, unless they span a million or more.
        wide = max(positive) > 1e6 * min(positive)
        size, unit = next((pair for pair in _BYTE_UNITS if max(positive) >= pair[0]), _BYTE_UNITS[-1])
        target.set_major_formatter(
            EngFormatter(unit="B") if wide else FuncFormatter(lambda value, _place: f"{value / size:g} {unit}")
        )


def _plain(text: str) -> str:
    """Return text that matplotlib shows as it is: a dollar sign would begin a formula, a first underscore hide it."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
