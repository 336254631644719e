"""Loss against bits, measured: log loss_i = level_i - rate_i sqrt(B_i), the form found for the predictive codec.

What a node sent is coded again with fewer bits, and what that loses tells how its loss falls with its bits. The total
is then shared out by equal slopes, so that the last bit buys the same at every node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fpld.budget.allocators import equal_slopes
from fpld.budget.estimators import Distortion, Wants, replaced
from fpld.codecs import ArrayPrior, decode, encode
from fpld.codecs.base import LARGEST
from fpld.numerics import kl, softmax

if TYPE_CHECKING:
    from fpld.budget.estimators import Seen, State
    from fpld.codecs import Codec
    from fpld.types import Floats, Plan, Reals


_WORST = 1e6  # nats per context: what a loss that is no number counts for


class Curves(Distortion):
    """Measure each node's loss curve in every round; beside it the weights that `distortion` has, for people."""

    wants = Wants(samples=True, allocator=False)

    def start(self, nodes: int, forget: float = 1.0) -> State:
        """Return the state before the first round."""
        unknown = np.full(nodes, np.nan)
        return {**super().start(nodes, forget), "levels": unknown, "rates": unknown}

    def observe(self, state: State, seen: Seen) -> State:
        """Replace the curves of the nodes that answered."""
        levels, rates = np.array([_curve(seen, k) for k in range(len(seen.nodes))]).T
        return {
            **super().observe(state, seen),
            "levels": replaced(state["levels"], seen.nodes, levels),
            "rates": replaced(state["rates"], seen.nodes, rates),
        }

    def share(self, state: State, total: float, caps: Floats, floors: Floats) -> Floats:
        """Return bits of equal slopes; a node that was never heard is taken to be like the others' mean."""
        levels, rates = (np.where(np.isnan(v), np.nanmean(v), v) for v in (state["levels"], state["rates"]))
        return equal_slopes(levels, rates, total, caps, floors)


def loss_curve(codec: Codec, plan: Plan, values: Reals, noise: float) -> tuple[float, float]:
    """Return level and rate of log loss = level - rate sqrt(bits) for a node, from what it sent in a round.

    Its decoded logits on some contexts, `values`, are coded again with half and a quarter of the bits. What that loses,
    on top of the `noise` in them (both as KL, in nats per context), is what the node would have lost with fewer bits.
    """
    points, values = [(plan.bits, noise)], np.clip(values, -LARGEST / 2, LARGEST / 2)
    for share in (0.5, 0.25):
        fewer = replace(plan, bits=share * plan.bits)
        if fewer.bits >= codec.least_bits(fewer):
            decoded = decode(codec, encode(codec, values, fewer), fewer).values
            with np.errstate(divide="ignore", invalid="ignore"):  # of logits that only a liar sends
                points.append((fewer.bits, noise + float(kl(values, decoded - values).mean())))
    return fit_curve(*np.array(points).T)


def fit_curve(bits: Floats, losses: Floats) -> tuple[float, float]:
    """Fit level and rate of log loss = level - rate sqrt(bits) by least squares; the rate is always above 0.

    >>> level, rate = fit_curve(np.array([100.0, 25.0]), np.array([0.01, 0.1]))
    >>> round(float(np.exp(level - rate * 10)), 6), round(float(np.exp(level - rate * 5)), 6)
    (0.01, 0.1)
    """
    roots, logs = np.sqrt(bits), np.log(np.clip(np.where(np.isfinite(losses), losses, _WORST), 1e-30, _WORST))
    rate = -float(np.polyfit(roots, logs, 1)[0]) if len(bits) > 1 else 0.0
    rate = max(rate, 1e-6 / float(roots[0]))
    return float(logs.mean() + rate * roots.mean()), rate


def _curve(seen: Seen, k: int) -> tuple[float, float]:
    """Measure the curve of the k-th node that answered, on the contexts that were sampled."""
    plan, values = seen.plans[k], np.concatenate([sample.values[k] for sample in seen.samples])
    felt = sum(float((softmax(sample.values[k]) * sample.variance[k]).sum()) / 2 for sample in seen.samples)
    priors = [sample.prior for sample in seen.samples if sample.prior is not None]
    prior = ArrayPrior(np.concatenate(priors)) if priors else None
    return loss_curve(seen.codec, replace(plan, contexts=len(values), prior=prior), values, felt / len(values))


CURVES = Curves()
