"""Theorem 3: sequential refinement, beside the schemes that stall; nodes that agree and nodes that differ."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fpld.paper import refine
from fpld.paper.reproduce.base import Claim, Reproduction, Row, Tick, mean_and_error
from fpld.paper.simulate import VOCAB, Draw, Truth, bandwidth_kl, node_dither
from fpld.paper.theory import refinement_upper

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

SEEDS, NODES, CONTEXTS, BITS, ROUNDS = 10, 4, 64, 2.0, 4
DIFFER, CLIP, WIDE_CLIP = 1.0, 1.0, 6.5  # nodes N(0, 1) apart need a wider clip
SCHEMES: dict[str, refine.Scheme] = {
    "refinement": refine.refine,
    "vanilla": refine.vanilla,
    "fixed-step": refine.fixed_step,
    "broadcast": refine.broadcast,
}


def simulate(seed: int, tick: Tick) -> list[Row]:
    """Run every scheme for four rounds at two bits; `kl` is the bandwidth KL, the data term left out."""
    target = Truth.draw(contexts=CONTEXTS, seed=seed)
    found: dict[tuple[str, int, str], list[float]] = {}
    for index in range(SEEDS):
        for scene, differ, clip in (("kl", 0.0, CLIP), ("kl_differing", DIFFER, WIDE_CLIP)):
            draw = Draw.make(target, nodes=NODES, seed=seed * 1000 + index, differ=differ)
            logits = np.clip(draw.logits, -clip, clip)
            states = {name: refine.Refinement.start(logits.shape, clip) for name in SCHEMES}
            for t in range(1, ROUNDS + 1):
                dither = node_dither(logits.shape, round=t, seed=seed * 1000 + index)
                for name, scheme in SCHEMES.items():
                    states[name] = scheme(states[name], refine.paper_channel(BITS), logits, dither)
                    found.setdefault((name, t, scene), []).append(bandwidth_kl(logits, states[name].reconstruction))
        tick()
    return [
        {
            "scheme": name,
            "round": t,
            "kl": mean_and_error(found[name, t, "kl"])[0],
            "kl_se": mean_and_error(found[name, t, "kl"])[1],
            "kl_differing": mean_and_error(found[name, t, "kl_differing"])[0],
            "bound": refinement_upper(NODES, BITS, CLIP, t if name == "refinement" else 1, vocab=VOCAB).bandwidth,
        }
        for name in SCHEMES
        for t in range(1, ROUNDS + 1)
    ]


def claims(rows: list[Row]) -> list[Claim]:
    """Check the rates: 16 a round for refinement, 1 for the others."""
    found = []
    for column, nodes in (("kl", "nodes agree"), ("kl_differing", "nodes differ by N(0,1)")):
        curve = {name: [row[column] for row in rows if row["scheme"] == name] for name in SCHEMES}
        ratios = [a / b for a, b in pairwise(curve["refinement"])]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        good = all(abs(ratio / 16 - 1) <= 0.1 for ratio in ratios)
        found.append(Claim(f"refinement: KL divided each round, {nodes}", "16", shown, good))
        for name in ("vanilla", "fixed-step"):
            spread = max(curve[name]) / min(curve[name])
            found.append(Claim(f"{name}: largest over smallest KL, {nodes}", "1", f"{spread:.3f}", spread < 1.1))
        gain = curve["broadcast"][0] / curve["broadcast"][-1]
        if column == "kl":
            good, paper = abs(gain / 4096 - 1) <= 0.1, "4096"
        else:
            good, paper = gain < 41, "(nodes agree)"
        what = "residual to the broadcast mean, as the paper has it: gain of 4 rounds"
        found.append(Claim(f"{what}, {nodes}", paper, f"{gain:.4g}", good))
    return found


def draw(rows: list[Row], figure: FigureBase) -> None:
    """Draw KL by round, for nodes that agree and nodes that differ."""
    # Curves lie on each other: the lower one is drawn wider.
    styles = {
        "vanilla": ("s-", 4.0),
        "fixed-step": ("^--", 1.2),
        "refinement": ("o-", 4.0),
        "broadcast": ("x--", 1.2),
    }
    for axes, column, title in zip(
        figure.subplots(1, 2, sharey=True),
        ("kl", "kl_differing"),
        ("nodes agree", "nodes differ by N(0,1)"),
        strict=True,
    ):
        for name, (style, width) in styles.items():
            part = [row for row in rows if row["scheme"] == name]
            axes.plot([row["round"] for row in part], [row[column] for row in part], style, lw=width, ms=5, label=name)
        if column == "kl":
            part = [row for row in rows if row["scheme"] == "refinement"]
            bound = [row["bound"] for row in part]
            axes.plot([row["round"] for row in part], bound, "k:", lw=1.2, label="bound (Theorem 3)")
            axes.legend(fontsize=8)
            axes.set_ylabel("bandwidth KL (nats)")
        axes.set_yscale("log")
        axes.set_xticks(range(1, ROUNDS + 1))
        axes.set_xlabel("round, 2 bits each")
        axes.set_title(title)
        axes.grid(alpha=0.3)


REFINEMENT = Reproduction("refinement", "Theorem 3: sequential refinement", SEEDS, simulate, claims, draw, (9, 3.8))
