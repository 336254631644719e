"""The same configuration with several seeds: means, standard errors, and paired differences to the federation."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import FigureBase

    Row = dict[str, Any]

OURS, BEST = "fpld", "best node alone"
_LEVELS = ("base", BEST, "ensemble")  # drawn as levels: they send nothing, or cannot be sent


def summarize(results: Sequence[Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Return a row for each method that all seeds have: mean loss over the seeds with its standard error, mean bytes.

    `behind` is by how much the method's loss is above the federation's, seed by seed: a mean with its standard error.
    `windows_se` is the standard error with windows of held-out text as units, where all runs know theirs.

    >>> runs = [[{"method": "fpld", "heldout_loss": 3.0, "uplink_bytes": 8, "downlink_bytes": 0},
    ...          {"method": "fedavg", "heldout_loss": loss, "uplink_bytes": 9, "downlink_bytes": 0}]
    ...         for loss in (3.1, 3.3)]
    >>> row = summarize(runs)[1]
    >>> row["method"], round(row["behind"], 6), round(row["behind_se"], 6)
    ('fedavg', 0.2, 0.1)
    """
    tables = [{row["method"]: row for row in _with_best(rows)} for rows in results]
    shared = [name for name in tables[0] if all(name in table for table in tables)]
    return [_row(name, tables) for name in shared if not name.startswith("alone: ")]


def _with_best(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    lone = [row for row in rows if row["method"].startswith("alone: ")]
    return [*rows, *([{**min(lone, key=lambda row: row["heldout_loss"]), "method": BEST}] if lone else [])]


def _row(method: str, tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> Row:
    losses = [table[method]["heldout_loss"] for table in tables]
    behind = [table[method]["heldout_loss"] - table[OURS]["heldout_loss"] for table in tables]
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
    """Return the standard error of a mean of differences that have these."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(errors) else None


def draw(rows: Sequence[Row], figure: FigureBase) -> None:
    """Draw mean loss against uplink: every method as a point, and what sends nothing as a level.

    Bars are standard errors of the difference to the federation, seed by seed: seeds differ in their texts by far more.
    """
    axes = figure.subplots()
    points = [row for row in rows if row["method"] not in _LEVELS and row["uplink_bytes"]]
    families = list(dict.fromkeys(row["method"].partition(",")[0] for row in points))
    for index, family in enumerate(families):
        own = sorted((row for row in points if row["method"].partition(",")[0] == family), key=_bytes)
        axes.errorbar(
            [_bytes(row) / 1e6 for row in own],
            [row["heldout_loss"] for row in own],
            [row["behind_se"] for row in own],
            fmt="o-" if len(own) > 1 else "o",
            label=family,
            color=f"C{index}",
            capsize=3,
        )
    for index, row in enumerate(row for row in rows if row["method"] in _LEVELS):
        axes.axhline(row["heldout_loss"], color="0.5", linestyle=("-", "--", ":")[index], label=row["method"])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("uplink of all nodes and rounds (MB)")
    axes.set_ylabel("held-out loss (nats per token),\nbars: s.e. of the difference to fpld")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)


def _bytes(row: Row) -> int:
    return int(row["uplink_bytes"])
