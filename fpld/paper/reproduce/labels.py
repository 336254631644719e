"""Sampled labels: their noise falls as 1/bits, and the best split of bits over nodes goes by square roots.

Nodes whose predictions p lie at unequal distances from a shared prior pi send labels by coupled draws: y is drawn from
pi by shared randomness and kept with probability min(1, p_y / pi_y); a refused one is replaced by x, drawn from the
positive part of p - pi. The label pi + mean(e_x - e_y) has mean p and variance (2 TV - |p - pi|^2) / draws. What is
sent of a draw is whether it was refused, and x if it was, which takes h(TV) + TV H(x) bits; y is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.budget import allocators
from fpld.numerics import softmax
from fpld.paper.reproduce.base import Claim, Reproduction, Row, Tick, mean_and_error, slope
from fpld.paper.theory import label_gain, label_objective, label_optimum

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from fpld.types import Floats

SEEDS = 100
CONTEXTS = 64
VOCAB = 64
SPREADS = np.array([0.1, 0.2, 0.8, 2.0])  # of the nodes' logits around the prior's
POLICIES = ("square-root", "uniform", "proportional")
TOTALS = (128.0, 256.0, 512.0, 1024.0, 2048.0)  # bits per context, all nodes


@dataclass(frozen=True, eq=False, slots=True)
class _Scene:
    """A prior [m, V], the nodes' predictions [K, m, V], and the variance and the bits of one draw [K]."""

    prior: Floats
    nodes: Floats
    variance: Floats
    cost: Floats

    @property
    def weights(self) -> Floats:
        """Return w_i, the noise at one bit: variance of a draw times its cost."""
        return self.variance * self.cost

    @classmethod
    def draw(cls, seed: int) -> _Scene:
        """Draw logits of the prior, and of each node around it."""
        rng = np.random.default_rng([seed, 1])
        logits = rng.normal(0, 2, (CONTEXTS, VOCAB))
        apart = SPREADS[:, None, None] * rng.normal(0, 1, (SPREADS.size, CONTEXTS, VOCAB))
        prior = softmax(logits)
        nodes = softmax(logits + apart)
        change = nodes - prior
        distance = np.maximum(change, 0).sum(axis=2)  # total variation [K, m]
        variance = 2 * distance - np.square(change).sum(axis=2)
        positive = np.maximum(change, 0) / distance[..., None]
        flag = _entropy(np.stack([distance, 1 - distance], axis=2))
        return cls(prior, nodes, variance.mean(axis=1), (flag + distance * _entropy(positive)).mean(axis=1))

    def noise(self, bits: Floats, rng: np.random.Generator) -> float:
        """Send labels with these bits per node; return the square of the mean label's error, summed over tokens."""
        error = np.zeros_like(self.prior)
        for node, wanted in zip(self.nodes, bits / self.cost, strict=True):
            # Draws are whole: some contexts have one more, so that the bits are spent on average.
            draws = np.floor(wanted + rng.random(CONTEXTS)).astype(np.int64)
            change = node - self.prior
            parts = [np.maximum(sign * change, 0) for sign in (1, -1)]
            refused = rng.binomial(draws, parts[0].sum(axis=1))
            came, went = (rng.multinomial(refused, part / part.sum(axis=1, keepdims=True)) for part in parts)
            error += (came - went) / draws[:, None] - change
        return float(np.square(error / len(bits)).sum(axis=1).mean())


def _policies(weights: Floats, total: float) -> dict[str, Floats]:
    """Return the bits of each node under each policy."""
    best = allocators.square_root(weights, total, VOCAB)
    even = allocators.uniform(weights, total, VOCAB)
    return dict(zip(POLICIES, (best, even, total * weights / weights.sum()), strict=True))


def _simulate(seed: int, tick: Tick) -> list[Row]:
    """Send labels under every policy at every total, many times."""
    scene = _Scene.draw(seed)
    samples: dict[tuple[float, str], list[float]] = {}
    for index in range(SEEDS):
        rng = np.random.default_rng([seed, 2, index])
        for total in TOTALS:
            for policy, bits in _policies(scene.weights, total).items():
                samples.setdefault((total, policy), []).append(scene.noise(bits, rng))
        tick()
    return [_row(scene, total, policy, values) for (total, policy), values in samples.items()]


def _row(scene: _Scene, total: float, policy: str, samples: list[float]) -> Row:
    value, error = mean_and_error(samples)
    weights = scene.weights
    return {
        "total": total,
        "policy": policy,
        "noise": value,
        "noise_se": error,
        "formula": label_objective(_policies(weights, total)[policy], weights).total,
        "optimum": label_optimum(weights, total),
        "gain": label_gain(weights),
    }


def _claims(rows: list[Row]) -> list[Claim]:
    """Check that noise is w/n, that it falls as 1/bits, and the gain of square roots."""
    best, even, much = ([row for row in rows if row["policy"] == policy] for policy in POLICIES)
    off = max(abs(row["noise"] / row["formula"] - 1) for row in rows)
    rate = slope(TOTALS, [row["noise"] for row in best])
    optimum = max(abs(row["formula"] / row["optimum"] - 1) for row in best)
    gain = best[0]["gain"]
    claims = [
        Claim("noise is sum w_i / n_i / K²: furthest off", "(4^-b there)", f"{100 * off:.1f} %", off < 0.08),
        Claim("slope of log noise in log bits", "(4^-b there)", f"{rate:.3f}", abs(rate + 1) < 0.03),
        Claim("closed form (sum √w)² / (K² total), furthest off", "(none)", f"{optimum:.1g}", optimum < 1e-9),
    ]
    for name, expected, above, below in (
        ("uniform over square-root", gain, even, best),
        ("proportional over uniform", 1.0, much, even),
    ):
        ratios = [a["noise"] / b["noise"] for a, b in zip(above, below, strict=True)]
        close = all(abs(ratio / expected - 1) < 0.08 for ratio in ratios)
        measured = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        claims.append(Claim(f"{name}: {expected:.2f}", "(none)", measured, close))
    return claims


def _draw(rows: list[Row], figure: FigureBase) -> None:
    """Draw noise over the total for each policy, measured and by the formula."""
    axes = figure.subplots()
    for policy, style, colour in zip(POLICIES, "osx", ("teal", "tab:blue", "tab:red"), strict=True):
        part = [row for row in rows if row["policy"] == policy]
        totals = [row["total"] for row in part]
        axes.loglog(totals, [row["noise"] for row in part], style, ms=5, color=colour, label=policy)
        axes.loglog(totals, [row["formula"] for row in part], "-", lw=0.8, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TOTALS, [f"{total:g}" for total in TOTALS])
    axes.set_xlabel("total budget, bits per context")
    axes.set_ylabel("noise of the mean label")
    axes.set_title(f"K = {SPREADS.size}, marks measured, lines sum w/n")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _entropy(p: Floats) -> Floats:
    """Return the entropy of each distribution (the last axis) in bits."""
    entropy: Floats = -(p * np.log2(np.maximum(p, 1e-300))).sum(axis=-1)
    return entropy


LABELS = Reproduction(
    "labels", "Sampled labels: noise 1/bits, split by roots", SEEDS, _simulate, _claims, _draw, (5.6, 4.0)
)
