"""Weights for the allocator from what the aggregator receives (Algorithm 2 and Corollary 6), and over time.

`Moments` is a state that adds up: feed it every node's decoded logits, read the weights. With `forget = 1` it is
the paper's warm-up estimator w_i = mean of the squared decoded logits over T_0 rounds, m contexts and V tokens.
With `forget < 1` the past fades by that factor each round: the streaming variant for nodes whose logits drift,
with a memory of 1 / (1 - forget) rounds. A node that did not answer keeps its weight.

The second moment is a stand-in. What Theorem 5 asks for is the constant in front of 2^(-2 B_i / V), and
the codec reports it with every frame: `distortion_weights` reads it off, without any estimation error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.codecs import decode, encode
from fpld.errors import InputError
from fpld.numerics import kl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

    from fpld.codecs import Codec
    from fpld.types import Decoded, Floats, Plan, Reals


@dataclass(frozen=True, eq=False, slots=True)
class Moments:
    """Sums of squared decoded logits, and how many there were, for each of K nodes.

    >>> warmup = Moments.start(nodes=2).update({0: np.full((5, 3), 2.0), 1: np.full((5, 3), 1.0)})
    >>> warmup.weights().tolist()
    [4.0, 1.0]
    >>> drifting = Moments.start(nodes=1, forget=0.5).update({0: np.ones((1, 4))}).update({0: np.full((1, 4), 3.0)})
    >>> round(float(drifting.weights()[0]), 3)  # (1 * 0.5 + 9) / (0.5 + 1)
    6.333
    """

    total: Floats
    count: Floats
    forget: float = 1.0

    @classmethod
    def start(cls, nodes: int, *, forget: float = 1.0) -> Moments:
        """Start with nothing seen."""
        _check.integer("nodes", nodes, least=1)
        forget = _check.real("forget", forget, above=0.0)
        if forget > 1:
            raise InputError(f"forget must be at most 1 (1: nothing is forgotten), got {forget:g}")
        return cls(np.zeros(nodes), np.zeros(nodes), forget)

    def update(self, decoded: Mapping[int, ArrayLike]) -> Moments:
        """Take in one round: for each node that answered, its decoded logits (any block shape)."""
        sums = {
            node: (float(np.square(values, dtype=np.float64).sum()), np.size(values))
            for node, values in decoded.items()
        }
        return self.add(sums)

    def add(self, sums: Mapping[int, tuple[float, int]]) -> Moments:
        """Take in one round as sums of squares and their counts, for who decodes block by block."""
        total, count = self.total.copy(), self.count.copy()
        for node, (square, size) in sums.items():
            _check.integer("node", node, most=total.size - 1)
            total[node] = self.forget * total[node] + square
            count[node] = self.forget * count[node] + size
        return replace(self, total=total, count=count)

    def weights(self) -> Floats:
        """Return w_i for every node; refuse while a node has not been heard at all."""
        if (self.count == 0).any():
            raise InputError(f"node {int((self.count == 0).argmax())} has sent nothing yet: it has no weight")
        weights: Floats = self.total / self.count
        return weights


def distortion_weights(decoded: list[Decoded], bits: ArrayLike, vocab: int) -> Floats:
    """Read Theorem 5's weights off the codec's own report: w_i = mean variance_i * 2^(2 B_i / V).

    Up to the factor 1/3 these are the L_i^2 of the remark on heterogeneous clips; factors drop out.

    >>> from fpld.types import Decoded
    >>> none = np.zeros(1)
    >>> replies = [Decoded(none, np.full(1, variance), none) for variance in (0.25, 4.0)]
    >>> distortion_weights(replies, [256.0, 256.0], vocab=256).tolist()
    [1.0, 16.0]
    """
    rates = _check.vector("bits", bits, size=len(decoded))
    noise = np.array([float(np.mean(reply.variance, dtype=np.float64)) for reply in decoded])
    weights: Floats = noise * np.exp2(2 * rates / vocab)
    return weights


@dataclass(slots=True)
class Agreement:
    """Find out whether nodes agree about what the prior does not know: then stratified dither pays.

    They do if what they sent differs by far less than it says, and by about as much as the codec's own error.
    """

    said: float = 0.0
    apart: float = 0.0
    noise: float = 0.0

    def add(self, residuals: Reals, variance: Reals, weights: Reals) -> None:
        """Take a block: residuals to the prior and their variance [K, rows, V], combined probabilities [rows, V]."""
        if len(residuals) > 1:
            self.said += float(np.einsum("kij,ij->", np.square(residuals), weights) / len(residuals))
            self.apart += float((residuals.var(axis=0, ddof=1) * weights).sum())
            self.noise += float(np.einsum("kij,ij->", variance, weights) / len(residuals))

    @property
    def reached(self) -> bool:
        """Return whether the nodes agree."""
        return self.apart < min(0.1 * self.said, 2 * self.noise)


def loss_curve(codec: Codec, plan: Plan, values: Reals, noise: float) -> Floats:
    """Return level and rate of log loss = level - rate sqrt(bits) for a node, from what it sent in a round.

    Its decoded logits on some contexts, `values`, are coded again with half and a quarter of the bits. What that loses,
    on top of the `noise` in them (both as KL, in nats per context), is what the node would have lost with fewer bits.
    """
    points = [(plan.bits, noise)]
    for share in (0.5, 0.25):
        fewer = replace(plan, bits=share * plan.bits)
        if fewer.bits >= codec.least_bits(fewer):
            decoded = decode(codec, encode(codec, values, fewer), fewer).values
            points.append((fewer.bits, noise + float(kl(values, decoded - values).mean())))
    bits, losses = np.array(points).T
    roots, logs = np.sqrt(bits), np.log(np.maximum(losses, 1e-30))
    rate = -np.polyfit(roots, logs, 1)[0] if len(points) > 1 else 0.0
    rate = max(float(rate), 1e-6 / float(roots[0]))
    return np.array([logs.mean() + rate * roots.mean(), rate])
