"""A chart as data: what pages draw interactively and `draw` turns into PNG and SVG. One description, two drawings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["line", "dots", "rule", "band", "bars", "stack"]
Scale = Literal["linear", "log", "band"]
Unit = Literal["", "B", "s"]

COLOURS = (
    "#4269d0", "#c27a00", "#e8563f", "#2f9447", "#a463f2", "#23918a", "#e0558f", "#a87350", "#8b8b00", "#80858f",
)  # fmt: skip
"""The palette of every drawing: a contrast of at least 3:1 to the light and to the dark page."""
_OWN = {"optimal": 0, "square-root": 0, "curves": 0, "uniform": 1, "inverse": 3, "this plan": 2}


def colours(names: Sequence[str]) -> list[str]:
    """Return a colour for each series: policies have their own whatever stands beside them, others go in order.

    >>> colours(["inverse", "uniform"]) == [COLOURS[3], COLOURS[1]]
    True
    """
    if any(name in _OWN for name in names):
        return [COLOURS[_OWN.get(name, 4 + i) % len(COLOURS)] for i, name in enumerate(names)]
    return [COLOURS[i % len(COLOURS)] for i in range(len(names))]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its label with the unit spelled out, its scale, and how its numbers are written."""

    label: str
    scale: Scale = "linear"
    unit: Unit = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Some points of one kind: `band` fills from `low` to `y`, `rule` is a level for all x, `bars` stand in groups.

    `limit` is a mark above or in each bar: what it could have been at most.
    """

    name: str
    kind: Kind
    x: list[Any]
    y: list[float]
    low: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: its name (of files), title, axes and series; `alt` describes it in words for screen readers."""

    name: str
    title: str
    alt: str
    x: Axis
    y: Axis
    series: list[Series]
    caption: str = ""

    def data(self) -> dict[str, Any]:
        """Return the chart as JSON for a page, with the palette; what a logarithmic axis cannot show is left out."""
        drawn = [asdict(self._shown(series)) for series in self.series]
        return {**asdict(self), "series": drawn, "colours": colours([series.name for series in self.series])}

    def shown(self) -> list[Series]:
        """Return the series without what the axes cannot show."""
        return [self._shown(series) for series in self.series]

    def _shown(self, series: Series) -> Series:
        keep = [
            i
            for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
            if _fits(y, self.y.scale) and (series.kind == "rule" or self.x.scale == "band" or _fits(x, self.x.scale))
        ]
        low, limit = ([values[i] for i in keep] if values else [] for values in (series.low, series.limit))
        limit = limit if all(map(math.isfinite, limit)) else []
        return Series(series.name, series.kind, [series.x[i] for i in keep], [series.y[i] for i in keep], low, limit)


def _fits(value: float, scale: Scale) -> bool:
    return math.isfinite(value) and (scale != "log" or value > 0)
