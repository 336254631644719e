"""Theorem 3: sequential refinement, beside the schemes that stall; nodes that agree and nodes that differ."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fpld.paper import quantize
from fpld.paper.reproduce.base import Claim, Reproduction, Row, Tick, mean_and_error
from fpld.paper.simulate import VOCAB, Draw, Truth, bandwidth_kl, node_dither
from fpld.paper.theory import refinement_upper

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

SEEDS = 10
NODES = 4
CONTEXTS = 64
BITS = 2.0
ROUNDS = 4
CLIP = 1.0
# Nodes that differ by N(0, 1) need a wider clip.
DIFFER = 1.0
WIDE_CLIP = 6.5
SCHEMES: dict[str, quantize.Scheme] = {
    "refinement": quantize.refine,
    "vanilla": quantize.vanilla,
    "fixed-step": quantize.fixed_step,
    "broadcast": quantize.broadcast,
}


def _simulate(seed: int, tick: Tick) -> list[Row]:
    """Run every scheme for four rounds at two bits; `kl` is the bandwidth KL, the data term left out."""
    target = Truth.draw(contexts=CONTEXTS, seed=seed)
    samples: dict[tuple[str, int, str], list[float]] = {}
    for index in range(SEEDS):
        for scene, differ, clip in (("kl", 0.0, CLIP), ("kl_differing", DIFFER, WIDE_CLIP)):
            draw = Draw.make(target, nodes=NODES, seed=seed * 1000 + index, differ=differ)
            logits = np.clip(draw.logits, -clip, clip)
            states = {name: quantize.Refinement.start(logits.shape, clip) for name in SCHEMES}
            for t in range(1, ROUNDS + 1):
                dither = node_dither(logits.shape, round=t, seed=seed * 1000 + index)
                for name, scheme in SCHEMES.items():
                    states[name] = scheme(states[name], quantize.paper_channel(BITS), logits, dither)
                    samples.setdefault((name, t, scene), []).append(bandwidth_kl(logits, states[name].reconstruction))
        tick()
    return [
        {
            "scheme": name,
            "round": t,
            "kl": mean_and_error(samples[name, t, "kl"])[0],
            "kl_se": mean_and_error(samples[name, t, "kl"])[1],
            "kl_differing": mean_and_error(samples[name, t, "kl_differing"])[0],
            "bound": refinement_upper(NODES, BITS, CLIP, t if name == "refinement" else 1, vocab=VOCAB).bandwidth,
        }
        for name in SCHEMES
        for t in range(1, ROUNDS + 1)
    ]


def _claims(rows: list[Row]) -> list[Claim]:
    """Check the rates: 16 a round for refinement, 1 for the others."""
    claims = []
    for column, nodes in (("kl", "nodes agree"), ("kl_differing", "nodes differ by N(0,1)")):
        curve = {name: [row[column] for row in rows if row["scheme"] == name] for name in SCHEMES}
        ratios = [a / b for a, b in pairwise(curve["refinement"])]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        good = all(abs(ratio / 16 - 1) <= 0.1 for ratio in ratios)
        claims.append(Claim(f"refinement: KL divided each round, {nodes}", "16", shown, good))
        for name in ("vanilla", "fixed-step"):
            spread = max(curve[name]) / min(curve[name])
            claims.append(Claim(f"{name}: largest over smallest KL, {nodes}", "1", f"{spread:.3f}", spread < 1.1))
        gain = curve["broadcast"][0] / curve["broadcast"][-1]
        if column == "kl":
            good = abs(gain / 4096 - 1) <= 0.1
            paper = "4096"
        else:
            good = gain < 41
            paper = "(nodes agree)"
        what = "residual to the broadcast mean, as the paper has it: gain of 4 rounds"
        claims.append(Claim(f"{what}, {nodes}", paper, f"{gain:.4g}", good))
    return claims


def _draw(rows: list[Row], figure: FigureBase) -> None:
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


REFINEMENT = Reproduction("refinement", "Theorem 3: sequential refinement", SEEDS, _simulate, _claims, _draw, (9, 3.8))
