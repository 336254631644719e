"""Figure 1: empirical KL between the lower bound (Theorem 2) and the upper bound (Theorem 1), over K and over B."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from fpld.paper.reproduce.base import Claim, Reproduction, Row, Tick, mean_and_error, slope
from fpld.paper.simulate import SAMPLES, VOCAB, Draw, Truth
from fpld.paper.theory import fpld_upper, matching_lower

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

SEEDS = 30
CONTEXTS = 128  # enough that the sampling error is well below the 0.5 % between KL and the upper bound
NODES = (1, 2, 4, 8, 16, 32, 64)
BITS = tuple(float(b) for b in range(1, 11))
SWEEP_BITS = 4.0
SWEEP_NODES = 4
CLIP = 1.0
DOMINATES = 10.0  # a bit divides KL by four while the bandwidth term is at least this many times the data term


def _simulate(seed: int, tick: Tick) -> list[Row]:
    """Simulate both sweeps: the K-sweep at 4 bits, the B-sweep at K = 4."""
    target = Truth.draw(contexts=CONTEXTS, seed=seed)
    points = [("K", nodes, SWEEP_BITS) for nodes in NODES] + [("B", SWEEP_NODES, bits) for bits in BITS]
    samples: dict[tuple[str, int, float], list[float]] = {point: [] for point in points}
    for index in range(SEEDS):
        draw = Draw.make(target, nodes=max(NODES), seed=seed * 1000 + index)
        for sweep, nodes, bits in points:
            samples[sweep, nodes, bits].append(draw.kl(bits, CLIP, nodes=nodes))
        tick()
    return [_row(target, *point, values) for point, values in samples.items()]


def _row(target: Truth, sweep: str, nodes: int, bits: float, samples: list[float]) -> Row:
    value, error = mean_and_error(samples)
    upper = fpld_upper(nodes, bits, CLIP, vocab=VOCAB, samples=SAMPLES)
    lower = matching_lower(bits, CLIP, vocab=VOCAB, c_p=target.c_p, nodes=nodes)
    return {
        "sweep": sweep,
        "K": nodes,
        "bits": bits,
        "kl": value,
        "kl_se": error,
        "lower": lower.bandwidth,
        "upper": upper.total,
        "data_term": upper.data,
        "conditions": upper.small_error.holds and lower.holds,
    }


def _claims(rows: list[Row]) -> list[Claim]:
    """Check the figure: bracketed everywhere, slope -1 in K, a quarter for each bit."""
    by_nodes = [row for row in rows if row["sweep"] == "K"]
    by_bits = [row for row in rows if row["sweep"] == "B"]
    inside = sum(row["lower"] <= row["kl"] <= row["upper"] for row in rows)
    rate = slope([row["K"] for row in by_nodes], [row["kl"] for row in by_nodes])
    ratios = [
        a["kl"] / b["kl"] for a, b in pairwise(by_bits) if b["upper"] - b["data_term"] >= DOMINATES * b["data_term"]
    ]
    last = by_bits[-1]
    floor = last["kl"] / last["data_term"]
    bracket = f"{inside} of {len(rows)}"
    return [
        Claim("KL lies between the bounds at every point", "bracketed", bracket, inside == len(rows)),
        Claim("slope of log KL in log K at 4 bits", "-1", f"{rate:.3f}", abs(rate + 1) <= 0.05),
        Claim(
            "each bit divides KL while the bandwidth term dominates",
            "roughly 4",
            ", ".join(f"{ratio:.2f}" for ratio in ratios),
            bool(ratios) and all(abs(ratio / 4 - 1) <= 0.08 for ratio in ratios),
        ),
        Claim(
            f"at {last['bits']:g} bits KL is the data term 1/(2Kn)", "(not stated)", f"{floor:.3f} of it", floor < 1.1
        ),
    ]


def _draw(rows: list[Row], figure: FigureBase) -> None:
    """Draw both sweeps side by side."""
    for axes, sweep, x, label in zip(
        figure.subplots(1, 2), ("K", "B"), ("K", "bits"), ("nodes K", "bits per coordinate B/V"), strict=True
    ):
        part = [row for row in rows if row["sweep"] == sweep]
        xs = [row[x] for row in part]
        axes.plot(
            xs, [row["upper"] for row in part], "--", color="tab:orange", zorder=3, label="upper bound (Theorem 1)"
        )
        axes.errorbar(
            xs,
            [row["kl"] for row in part],
            [2 * row["kl_se"] for row in part],
            fmt="o-",
            ms=4,
            lw=3,
            alpha=0.6,
            color="tab:blue",
            label="measured KL",
        )
        axes.plot(xs, [row["lower"] for row in part], ":", color="teal", label="lower bound (Theorem 2)")
        axes.plot(xs, [row["data_term"] for row in part], "-", lw=0.8, color="gray", label="data term 1/(2Kn)")
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("KL (nats)")
        axes.grid(alpha=0.3)
        if sweep == "K":
            axes.set_xscale("log", base=2)
            axes.set_title("B/V = 4")
        else:
            axes.set_title("K = 4")
            axes.legend(fontsize=8)


FIG1 = Reproduction("fig1", "Figure 1: KL between its bounds", SEEDS, _simulate, _claims, _draw, (9, 3.8))
