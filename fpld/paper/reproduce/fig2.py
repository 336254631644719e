"""Figure 2: allocation policies over the total budget, for clips 1, 1, 4, 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.budget import allocators
from fpld.paper.reproduce.base import Claim, Reproduction, Row, Tick, mean_and_error
from fpld.paper.simulate import VOCAB, Draw, Truth

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from fpld.types import Floats

SEEDS = 100
CONTEXTS = 16
CLIPS = np.array([1.0, 1.0, 4.0, 4.0])
WEIGHTS = CLIPS**2
TOTALS = tuple(float(total) for total in range(4, 25))
PAPER_OPTIMAL = 1.1e-2
PAPER_UNIFORM = 2.3e-2
PAPER_INVERSE = 8e-2


def _policies(total: float) -> dict[str, Floats]:
    """Return the bits per coordinate of each node under each policy, for a total in bits per coordinate."""
    floors = np.full(CLIPS.size, float(VOCAB))
    budget = total * VOCAB
    return {
        "optimal": allocators.optimal(WEIGHTS, budget, VOCAB) / VOCAB,
        "uniform": allocators.uniform(WEIGHTS, budget, VOCAB) / VOCAB,
        "inverse": allocators.inverse(WEIGHTS, budget, VOCAB) / VOCAB,
        "inverse-floor": allocators.inverse(WEIGHTS, budget, VOCAB, floors=floors) / VOCAB,
    }


def _simulate(seed: int, tick: Tick) -> list[Row]:
    """Simulate every policy at every total on the same draws."""
    target = Truth.draw(contexts=CONTEXTS, seed=seed)
    samples: dict[tuple[float, str], list[float]] = {}
    for index in range(SEEDS):
        draw = Draw.make(target, nodes=CLIPS.size, seed=seed * 1000 + index)
        for total in TOTALS:
            for policy, bits in _policies(total).items():
                samples.setdefault((total, policy), []).append(draw.kl(bits, CLIPS))
        tick()
    return [
        dict(zip(("total", "policy", "kl", "kl_se"), (*point, *mean_and_error(values)), strict=True))
        for point, values in samples.items()
    ]


def _claims(rows: list[Row]) -> list[Claim]:
    """Check the figure: optimal and uniform at a total of 8, dominance, and the flat inverse line."""
    kl = {(row["total"], row["policy"]): row["kl"] for row in rows}
    best = kl[8.0, "optimal"]
    even = kl[8.0, "uniform"]
    better = all(kl[total, "optimal"] < kl[total, "uniform"] for total in TOTALS)
    floor = [kl[total, "inverse-floor"] for total in TOTALS]
    bare = [kl[total, "inverse"] for total in TOTALS]
    flat = max(floor) / min(floor)
    return [
        Claim("optimal at total/V = 8", "1.1e-2", f"{best:.3g}", abs(best / PAPER_OPTIMAL - 1) <= 0.12),
        Claim("uniform at total/V = 8", "2.3e-2", f"{even:.3g}", abs(even / PAPER_UNIFORM - 1) <= 0.12),
        Claim(
            "optimal below uniform from 4 to 24", "every total", "every total" if better else "not everywhere", better
        ),
        Claim(
            "inverse-weighted is flat (with a floor of one bit)",
            "8e-2",
            f"{min(floor):.3g} to {max(floor):.3g}",
            flat <= 1.1 and abs(kl[8.0, "inverse-floor"] / PAPER_INVERSE - 1) <= 0.12,
        ),
        Claim(
            "inverse-weighted without that floor",
            "(not stated)",
            f"{bare[0]:.3g} to {bare[-1]:.3g}",
            bare[-1] < bare[0],
        ),
    ]


def _draw(rows: list[Row], figure: FigureBase) -> None:
    """Draw KL over the total for each policy."""
    axes = figure.subplots()
    styles = {
        "optimal": ("-", "teal"),
        "uniform": ("--", "tab:blue"),
        "inverse": ("-.", "tab:red"),
        "inverse-floor": (":", "tab:orange"),
    }
    for policy, (style, colour) in styles.items():
        part = [row for row in rows if row["policy"] == policy]
        axes.plot([row["total"] for row in part], [row["kl"] for row in part], style, color=colour, label=policy)
    axes.set_yscale("log")
    axes.set_xlabel("total budget, bits per coordinate")
    axes.set_ylabel("KL (nats)")
    axes.set_title("K = 4, clips 1, 1, 4, 4")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


FIG2 = Reproduction("fig2", "Figure 2: allocation under unequal clips", SEEDS, _simulate, _claims, _draw, (5.6, 4.0))
