"""Summarize runs of one configuration with several seeds: means, standard errors, paired differences."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from fpld.storage.run_folder import MAIN
from fpld.units import BITS_PER_BYTE, NATS_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import FigureBase

    Row = dict[str, Any]

_BEST_ALONE = "best node alone"
_LEVELS = ("base", _BEST_ALONE, "ensemble")  # methods that send nothing, or that cannot be sent


def summarize_seeds(results: Sequence[Sequence[Mapping[str, Any]]], *, by_byte: bool = False) -> list[Row]:
    """Return a row for each method that all seeds have: its mean loss with the standard error, and mean bytes.

    Losses are in nats per token, or `by_byte` in bits per byte, for models with tokenizers of their own: then a column
    `unit` says so.

    `behind` is the mean over the seeds of how far the method's loss is above the federation's, `behind_se` its standard
    error. `windows_se` is the standard error with windows of held-out text as units, where all runs have it.

    >>> runs = [[{"method": "fpld", "heldout_loss": 3.0, "uplink_bytes": 8, "downlink_bytes": 0},
    ...          {"method": "fedavg", "heldout_loss": loss, "uplink_bytes": 9, "downlink_bytes": 0}]
    ...         for loss in (3.1, 3.3)]
    >>> row = summarize_seeds(runs)[1]
    >>> row["method"], round(row["behind"], 6), round(row["behind_se"], 6)
    ('fedavg', 0.2, 0.1)
    """
    in_unit = [_by_byte(rows) for rows in results] if by_byte else results
    tables = [{row["method"]: row for row in _with_best(rows)} for rows in in_unit]
    shared = [name for name in tables[0] if all(name in table for table in tables)]
    unit = {"unit": BITS_PER_BYTE} if by_byte else {}
    return [_row(name, tables) | unit for name in shared if not name.startswith("alone: ")]


def _by_byte(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a run's table with its losses and their differences in bits per byte: all by one factor."""
    factor = next(row["bits_per_byte"] / row["heldout_loss"] for row in rows if row["heldout_loss"])
    losses = "heldout_loss", "behind", "behind_se"
    return [{**row, **{name: row[name] * factor for name in losses if row.get(name) is not None}} for row in rows]


def _with_best(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    alone = [row for row in rows if row["method"].startswith("alone: ")]
    if not alone:
        return list(rows)
    return [*rows, {**min(alone, key=lambda row: row["heldout_loss"]), "method": _BEST_ALONE}]


def _row(method: str, tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> Row:
    losses = [table[method]["heldout_loss"] for table in tables]
    behind = [table[method]["heldout_loss"] - table[MAIN]["heldout_loss"] for table in tables]
    return {
        "method": method,
        "heldout_loss": mean(losses),
        "heldout_se": _standard_error(losses),
        "behind": mean(behind),
        "behind_se": _standard_error(behind),
        "windows_se": _pooled([table[method].get("behind_se") for table in tables]),
        "uplink_bytes": round(mean(table[method]["uplink_bytes"] for table in tables)),
        "downlink_bytes": round(mean(table[method]["downlink_bytes"] for table in tables)),
    }


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _pooled(errors: Sequence[float | None]) -> float | None:
    """Return the standard error of the mean of independent values with these errors; None if one is missing."""
    present = [error for error in errors if error is not None]
    return math.hypot(*present) / len(present) if present and len(present) == len(errors) else None


def draw_summary(rows: Sequence[Row], figure: FigureBase) -> None:
    """Draw mean loss against uplink: every method as a point, one that sends nothing as a level.

    Bars are standard errors of the paired difference to the federation: between seeds, the texts differ by far more.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = figure.subplots()
    points = [row for row in rows if row["method"] not in _LEVELS and row["uplink_bytes"]]
    families = list(dict.fromkeys(row["method"].partition(",")[0] for row in points))
    for index, family in enumerate(families):
        members = [row for row in points if row["method"].partition(",")[0] == family]
        members.sort(key=lambda row: row["uplink_bytes"])
        axes.errorbar(
            [row["uplink_bytes"] / 1e6 for row in members],
            [row["heldout_loss"] for row in members],
            [row["behind_se"] for row in members],
            fmt="o-" if len(members) > 1 else "o",
            label=family,
            color=f"C{index}",
            capsize=3,
        )
    for index, row in enumerate(row for row in rows if row["method"] in _LEVELS):
        axes.axhline(row["heldout_loss"], color="0.5", linestyle=("-", "--", ":")[index], label=row["method"])
    axes.set_xscale("log")
    # The bytes of many runs lie within one power of ten: ticks at 1, 2 and 5 of each, and no labels between them.
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("uplink of all nodes and rounds (MB)")
    unit = rows[0].get("unit", NATS_PER_TOKEN)
    axes.set_ylabel(f"held-out loss ({unit}),\nbars: s.e. of the difference to fpld")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
