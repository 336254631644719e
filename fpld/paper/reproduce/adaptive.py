"""Corollary 6: what estimating the weights costs, over the number of warm-up samples m * T_0.

Two scenes. In the first the nodes' logits fill their clips, so that second moments and clip weights agree up to a
factor. In the second (that of Figure 2) all nodes have logits of the same size but different clips: the second
moment, which Algorithm 2 estimates, then misses what the quantizer's range does, and `ratio_clip` shows the cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.paper.quantize import paper_quantizer
from fpld.paper.reproduce.base import Claim, Reproduction, Row, Tick, slope
from fpld.paper.simulate import REACH, node_dither
from fpld.paper.theory import adaptive_bound, allocation_optimum, objective

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from fpld.types import Floats

SAMPLES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
SEEDS = 20
VOCAB = 16
WARMUP_BITS = 2.0
DELTA = 0.05
CLIPS = np.array([1.0, 1.0, 4.0, 4.0])
MAX_TRIALS = 50  # independent warm-ups taken from one seed's contexts


def second_moments() -> Floats:
    """Return w_i = E |decoded|^2 / V = (7/36 + 2^-2b / 3) L_i^2 of logits a L_i U[-1, 1] with a ~ U[1/2, 1]."""
    weights: Floats = CLIPS**2 * (7 / 36 + 2.0 ** (-2 * WARMUP_BITS) / 3)
    return weights


def ratio(weights: Floats, estimate: Floats) -> float:
    """Return F(B-hat) / F(B*) for Theorem 5's objective with the true weights."""
    total = WARMUP_BITS * VOCAB * weights.size
    # Without floors at zero, as in Lemma 8: few samples can ask for less than nothing.
    bits = total / weights.size + VOCAB / 2 * (np.log2(estimate) - np.log2(estimate).mean())
    return objective(bits, weights, VOCAB).total / allocation_optimum(weights, total, VOCAB)


def _simulate(seed: int, tick: Tick) -> list[Row]:
    """Estimate the weights from warm-ups of every size, and compare the plug-in allocation to the best one."""
    scale: dict[int, list[float]] = {samples: [] for samples in SAMPLES}
    same: dict[int, list[float]] = {samples: [] for samples in SAMPLES}
    for index in range(SEEDS):
        filled, equal = _block_averages(seed * 1000 + index)
        for samples in SAMPLES:
            for trial in range(min(SAMPLES[-1] // samples, MAX_TRIALS)):
                part = slice(trial * samples, (trial + 1) * samples)
                scale[samples].append(ratio(second_moments(), filled[:, part].mean(axis=1)))
                same[samples].append(ratio(CLIPS**2, equal[:, part].mean(axis=1)))
        tick()
    uniform = ratio(CLIPS**2, np.ones(CLIPS.size))
    return [_row(samples, scale[samples], same[samples], uniform) for samples in SAMPLES]


def _block_averages(seed: int) -> tuple[Floats, Floats]:
    """Return S_i = |decoded|^2 / V of every context of both scenes, [K, contexts]."""
    rng = np.random.default_rng([seed, 2])
    shape = (CLIPS.size, SAMPLES[-1], VOCAB)
    shaped = rng.uniform(-1, 1, shape) * rng.uniform(0.5, 1, (*shape[:2], 1))
    dither = node_dither(shape, round=1, seed=seed)
    quantizer = paper_quantizer(CLIPS.reshape(-1, 1, 1), WARMUP_BITS)
    filled = np.square(quantizer(shaped * quantizer.clip, dither)).mean(axis=2)
    equal = np.square(quantizer(shaped * REACH, dither)).mean(axis=2)
    return filled, equal


def _row(samples: int, ratios: list[float], misled: list[float], uniform: float) -> Row:
    bound = adaptive_bound(second_moments(), CLIPS, WARMUP_BITS, contexts=samples, delta=DELTA)
    return {
        "samples": samples,
        "ratio": float(np.quantile(ratios, 1 - DELTA)),
        "bound": bound.bound,
        "excess": float(np.quantile(ratios, 1 - DELTA)) - 1,
        "excess_mean": float(np.mean(ratios)) - 1,
        "direct_bound": bound.direct,
        "bound_proved": bound.valid,
        "ratio_clip": float(np.mean(misled)),
        "ratio_uniform": uniform,
    }


def _claims(rows: list[Row]) -> list[Claim]:
    """Check the cost of adaptivity: below the bound, and falling with m T_0."""
    below = all(row["ratio"] <= row["bound"] for row in rows)
    samples = [row["samples"] for row in rows]
    rate = slope(samples, [row["excess_mean"] for row in rows])
    promised = slope(samples, [row["bound"] - 1 for row in rows])
    last = rows[-1]
    by_variance = ratio(CLIPS**2, CLIPS**2)
    return [
        Claim("F(B-hat)/F(B*), 95 % quantile, below the bound", "every m T0", "every m T0" if below else "no", below),
        Claim("slope of log(ratio - 1) in log(m T0)", f"{promised:.2f} or less", f"{rate:.2f}", rate <= promised),
        Claim(
            f"excess at m T0 = {last['samples']}",
            f"{last['bound'] - 1:.2g} or less",
            f"{last['excess']:.2g}",
            below,
        ),
        Claim(
            "second moments where clips decide: F/F(B*)",
            "(assumed 1)",
            f"{last['ratio_clip']:.2f} (uniform {last['ratio_uniform']:.2f}, codec's variance {by_variance:.2f})",
            last["ratio_clip"] > 1.05,
        ),
    ]


def _draw(rows: list[Row], figure: FigureBase) -> None:
    """Draw the excess over the sample size, and its bounds."""
    axes = figure.subplots()
    xs = [row["samples"] for row in rows]
    axes.loglog(xs, [row["bound"] - 1 for row in rows], "--", color="tab:orange", label="Corollary 6")
    axes.loglog(
        xs, [row["direct_bound"] - 1 for row in rows], ":", color="tab:red", label="Lemmas 8 and 9, node by node"
    )
    axes.loglog(xs, [row["excess"] for row in rows], "o-", ms=4, color="tab:blue", label="measured, 95 % quantile")
    axes.loglog(xs, [row["ratio_clip"] - 1 for row in rows], "s-", ms=4, color="gray", label="where clips decide")
    axes.set_xlabel("warm-up samples m T0")
    axes.set_ylabel("F(B-hat) / F(B*) - 1")
    axes.set_title("K = 4, clips 1, 1, 4, 4")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


ADAPTIVE = Reproduction(
    "adaptive", "Corollary 6: the cost of estimating weights", SEEDS, _simulate, _claims, _draw, (5.6, 4.0)
)
