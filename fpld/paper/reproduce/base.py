"""The record of a reproduction: a simulation that yields rows, claims of the paper checked on them, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

Row = dict[str, Any]
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper, its number, the measured number, and whether they agree."""

    statement: str
    paper: str
    measured: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A simulation, the claims checked on it, and its figure.

    `simulate(seed, tick)` returns rows and calls `tick` after each of `steps` steps. `claims(rows)` checks them.
    `draw(rows, figure)` draws them on a figure of `size` inches.
    """

    name: str
    title: str
    steps: int
    simulate: Callable[[int, Tick], list[Row]]
    claims: Callable[[list[Row]], list[Claim]]
    draw: Callable[[list[Row], FigureBase], None]
    size: tuple[float, float]


def mean_and_error(samples: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    values = np.asarray(samples)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope in log-log coordinates."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
