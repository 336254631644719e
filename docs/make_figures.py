"""Make the figures that the docs show, from the same simulations as `fpld reproduce`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.paper.reproduce import REPRODUCTIONS
from fpld.paper.reproduce import fig1 as bounds
from fpld.paper.reproduce import fig2 as policies
from fpld.report.figures import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "figures"


def paper(rows1: list[bounds.Row], rows2: list[policies.Row], figure: Figure) -> None:
    """Draw Figure 1 (both sweeps) and Figure 2 in one row."""
    left, right = figure.subfigures(1, 2, width_ratios=[2, 1])
    bounds.draw(rows1, left)
    policies.draw(rows2, right)


def main() -> None:
    """Write the README's picture and one picture for each reproduction."""
    FOLDER.mkdir(exist_ok=True)
    rows = {name: item.simulate(0, lambda: None) for name, item in REPRODUCTIONS.items()}
    save_figure(partial(paper, rows["fig1"], rows["fig2"]), FOLDER / "paper", (13, 3.8))
    for name in ("refinement", "adaptive", "stratified", "labels"):
        save_figure(partial(REPRODUCTIONS[name].draw, rows[name]), FOLDER / name, REPRODUCTIONS[name].size)


if __name__ == "__main__":
    main()
