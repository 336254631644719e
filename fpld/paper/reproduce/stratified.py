"""Stratified dither: where nodes agree, the paper's 1/K becomes up to 1/K^2; where they do not, nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.paper.reproduce.base import Claim, Reproduction, Row, Tick, mean_and_error, slope
from fpld.paper.simulate import Draw, Truth, bandwidth_kl

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from fpld.types import Floats

SEEDS = 6
CONTEXTS = 64
BITS = 4.0
NODES = (1, 2, 4, 8, 16, 32, 64)
# How far nodes lie apart, in steps of the quantizer, and the clip that holds them all.
SCENES = {"agree": (0.0, 1.0), "tenth": (0.1, 1.6), "differ": (1.0, 6.0)}


def _simulate(seed: int, tick: Tick) -> list[Row]:
    """Send the same logits with both kinds of dither; `kl` is the bandwidth KL, the data term left out."""
    target = Truth.draw(contexts=CONTEXTS, seed=seed)
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for index in range(SEEDS):
        for scene, (apart, clip) in SCENES.items():
            step = 2 * clip * 2.0**-BITS
            for nodes in NODES:
                pair = []
                for stratified in (False, True):
                    draw = Draw.make(
                        target,
                        nodes=nodes,
                        seed=seed * 1000 + index,
                        samples=np.inf,
                        differ=apart * step,
                        stratified=stratified,
                    )
                    pair.append(bandwidth_kl(draw.logits, draw.decoded(BITS, clip)))
                samples.setdefault((scene, nodes), []).append((pair[0], pair[1]))
        tick()
    return [_row(scene, nodes, np.array(pairs)) for (scene, nodes), pairs in samples.items()]


def _row(scene: str, nodes: int, pairs: Floats) -> Row:
    independent, stratified = pairs.mean(axis=0)
    return {
        "scene": scene,
        "K": nodes,
        "bits": BITS,
        "kl_independent": float(independent),
        "kl_stratified": float(stratified),
        "ratio": float(independent / stratified),
        "ratio_se": mean_and_error((pairs[:, 0] / pairs[:, 1]).tolist())[1],
    }


def _claims(rows: list[Row]) -> list[Claim]:
    """Check the slopes in K, and that nothing is lost where nodes differ."""
    curve = {scene: [row for row in rows if row["scene"] == scene] for scene in SCENES}
    claims = []
    for kind, paper, expected in (("independent", "-1", -1.0), ("stratified", "(not considered)", -2.0)):
        rate = slope(NODES, [row[f"kl_{kind}"] for row in curve["agree"]])
        claims.append(
            Claim(f"slope of log KL in log K, nodes agree, {kind}", paper, f"{rate:.3f}", abs(rate - expected) < 0.05)
        )
    gain = [row["ratio"] for row in curve["agree"]]
    good = all(abs(ratio / row["K"] - 1) < 0.1 for ratio, row in zip(gain, curve["agree"], strict=True))
    claims.append(
        Claim("gain is K, nodes agree", "(not considered)", ", ".join(f"{ratio:.3g}" for ratio in gain), good)
    )
    for scene, what in (("tenth", "a tenth of a step"), ("differ", "a step")):
        worst = min(row["ratio"] + 3 * row["ratio_se"] for row in curve[scene])
        ratios = ", ".join(f"{row['ratio']:.3g}" for row in curve[scene])
        claims.append(Claim(f"no loss, nodes {what} apart: gain", "(not considered)", ratios, worst >= 1))
    return claims


def _draw(rows: list[Row], figure: FigureBase) -> None:
    """Draw KL over K for both kinds, a panel for each scene."""
    titles = {"agree": "nodes agree", "tenth": "nodes N(0, step/10) apart", "differ": "nodes N(0, step) apart"}
    panels = figure.subplots(1, len(SCENES))
    for axes, (scene, title) in zip(panels, titles.items(), strict=True):
        part = [row for row in rows if row["scene"] == scene]
        for kind, style in (("independent", "s-"), ("stratified", "o-")):
            axes.loglog([row["K"] for row in part], [row[f"kl_{kind}"] for row in part], style, ms=4, label=kind)
        axes.set(title=title, xlabel="nodes K")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("bandwidth KL (nats), 4 bits")
    panels[0].legend(fontsize=8)


STRATIFIED = Reproduction(
    "stratified", "Stratified dither: from 1/K towards 1/K²", SEEDS, _simulate, _claims, _draw, (11, 3.8)
)
