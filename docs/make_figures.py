"""Make the figures that the docs show: simulations as `fpld reproduce` makes them, and kept results (`--kept`)."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import leakage
from docs.kept_results import read
from fpld.paper.reproduce import REPRODUCTIONS, Row
from fpld.report import seeds
from fpld.report.draw import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "figures"


def paper(rows1: list[Row], rows2: list[Row], figure: Figure) -> None:
    """Draw Figure 1 (both sweeps) and Figure 2 in one row."""
    left, right = figure.subfigures(1, 2, width_ratios=[2, 1])
    REPRODUCTIONS["fig1"].draw(rows1, left)
    REPRODUCTIONS["fig2"].draw(rows2, right)


def equal_bytes(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Draw the kept means of students at equal bytes, with their standard errors."""
    axes = figure.subplots()
    for name in dict.fromkeys(row["codec"] for row in rows):
        own = [row for row in rows if row["codec"] == name]
        sizes, losses, errors = ([row[key] for row in own] for key in ("megabytes", "heldout_loss", "heldout_se"))
        axes.errorbar(sizes, losses, errors, fmt="o-", capsize=3, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("uplink of all nodes (MB)")
    axes.set_ylabel("held-out loss of the student (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_kept() -> None:
    """Draw what is kept in docs/results/."""
    save_figure(partial(seeds.draw_summary, read("rivals")["rows"]), FOLDER / "rivals", (8.0, 4.2))
    save_figure(partial(seeds.draw_summary, read("policies")["rows"]), FOLDER / "policies", (8.0, 4.2))
    save_figure(partial(seeds.draw_summary, read("huggingface")["rows"]), FOLDER / "huggingface", (8.0, 4.2))
    save_figure(partial(equal_bytes, read("equal-bytes")["rows"]), FOLDER / "equal-bytes", (7.0, 4.2))
    save_figure(partial(leakage.draw, read("leakage")["rows"]), FOLDER / "leakage", (11.0, 3.8))


def draw_simulations() -> None:
    """Draw the paper's figures in one picture, and one for each other reproduction."""
    rows = {name: item.simulate(0, lambda: None) for name, item in REPRODUCTIONS.items()}
    save_figure(partial(paper, rows["fig1"], rows["fig2"]), FOLDER / "paper", (13, 3.8))
    for name in ("refinement", "adaptive", "stratified", "labels"):
        save_figure(partial(REPRODUCTIONS[name].draw, rows[name]), FOLDER / name, REPRODUCTIONS[name].size)


def main() -> None:
    """Draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", action="store_true", help="only those of kept results")
    FOLDER.mkdir(exist_ok=True)
    only_kept = parser.parse_args().kept
    draw_kept()
    if not only_kept:
        draw_simulations()


if __name__ == "__main__":
    main()
