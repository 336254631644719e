"""Estimators: what the allocator goes by, estimated from the frames of earlier rounds.

An estimator is an object without state. Its state is a mapping of arrays that the caller holds and a checkpoint keeps:
`start` makes it, `observe` returns the next one after a round, `weights` reads it. What it must be shown of a round,
and how its weights are used, is data: `traits`.

    none           nothing is estimated: the weights are those of the configuration
    second-moment  the paper's estimator (Algorithm 2, Corollary 6): mean squares of the decoded logits
    distortion     the constant in front of 2^(-2 B_i / V), as Theorem 5 asks for; for sampled labels that in front of
                   1 / B_i, for the square-root allocator. The codec reports its noise with every frame
    curves         the loss as a function of bits, log loss_i = level_i - rate_i sqrt(B_i), measured at each node: what
                   it sent is coded again with fewer bits. The total is shared out so that one more bit gains the same
                   at every node
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fpld import validation
from fpld.budget.allocators import equal_slopes
from fpld.codecs.base import MAX_LOGIT, decode, encode
from fpld.codecs.prior import ArrayPrior
from fpld.errors import InputError
from fpld.numerics import kl, softmax
from fpld.types import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fpld.codecs.base import Codec
    from fpld.protocol.combine import Observation
    from fpld.types import Floats, Plan, Reals


EstimatorState = Mapping[str, Array]
"""The arrays of an estimator by name; only the estimator knows what they mean."""

_LEAST_WEIGHT = 1e-30
_LEAST_NOISE = 1e-12
_MAX_LOSS = 1e6  # nats per context: what a loss that is not finite counts for


@dataclass(frozen=True, eq=False, slots=True)
class Moments:
    """Sums of squared decoded logits, and how many there were, for each of K nodes.

    With `forget = 1` this is the paper's warm-up estimator: w_i is the mean of the squared decoded logits over T_0
    rounds, m contexts and V tokens. With `forget < 1` the past fades by that factor each round, for nodes whose logits
    drift: a memory of 1 / (1 - forget) rounds. A node that did not answer keeps its weight.

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
        """Start with nothing observation."""
        validation.integer("nodes", nodes, least=1)
        forget = validation.real("forget", forget, above=0.0)
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
        """Take in one round as sums of squares and their counts, when decoding block by block."""
        total = self.total.copy()
        count = self.count.copy()
        for node, (square, size) in sums.items():
            validation.integer("node", node, most=total.size - 1)
            total[node] = self.forget * total[node] + square
            count[node] = self.forget * count[node] + size
        return replace(self, total=total, count=count)

    @property
    def complete(self) -> bool:
        """Return whether every node has been heard."""
        return bool((self.count > 0).all())

    def weights(self) -> Floats:
        """Return w_i for every node; refuse while a node has not been heard at all."""
        if not self.complete:
            raise InputError(f"node {int((self.count == 0).argmax())} has sent nothing yet: it has no weight")
        weights: Floats = self.total / self.count
        return weights


@dataclass(frozen=True, slots=True)
class EstimatorTraits:
    """What an estimator is shown of a round, and how it is used.

    Parameters
    ----------
    samples
        It is shown all nodes' logits on some contexts.
    squares
        It is shown each node's sum of squared logits over all contexts.
    warmup
        The first rounds are allocated uniformly: it learns from them.
    forget
        Its estimate fades by the factor `[budget] forget` each round.
    allocator
        An allocator shares the total out by its weights. If False, its method `share` does that.
    """

    samples: bool = False
    squares: bool = False
    warmup: bool = True
    forget: bool = False
    allocator: bool = True


class Estimator(ABC):
    """Estimate the nodes' weights, or their loss curves, from round to round."""

    traits: ClassVar[EstimatorTraits] = EstimatorTraits()

    def start(self, nodes: int, forget: float = 1.0) -> EstimatorState:  # noqa: ARG002  # some let the past fade
        """Return the state before the first round: of each node nothing is known (NaN)."""
        return {"weights": np.full(nodes, np.nan)}

    @abstractmethod
    def observe(self, state: EstimatorState, observation: Observation) -> EstimatorState:
        """Return the state after a round."""

    def weights(self, state: EstimatorState) -> Floats | None:
        """Return a weight for each node [K]; None while there is nothing to go by.

        A node that never answered gets the others' geometric mean: an even share of the total.
        """
        weights = state["weights"]
        silent = np.isnan(weights)
        if not silent.any() or silent.all():
            return None if silent.all() else weights
        return np.where(silent, np.exp(np.log(np.maximum(weights[~silent], _LEAST_WEIGHT)).mean()), weights)

    def share(self, state: EstimatorState, total: float, caps: Floats, floors: Floats) -> Floats:
        """Return the bits of each node; for estimators whose traits leave the allocator out."""
        raise NotImplementedError(f"{type(self).__name__} takes no allocator, so it must define `share`")


class Nothing(Estimator):
    """Estimate nothing: the weights are those of the configuration."""

    traits = EstimatorTraits(warmup=False)

    def start(self, nodes: int, forget: float = 1.0) -> EstimatorState:  # noqa: ARG002
        """Return no state."""
        return {}

    def observe(self, state: EstimatorState, observation: Observation) -> EstimatorState:  # noqa: ARG002
        """Return no state."""
        return state

    def weights(self, state: EstimatorState) -> Floats | None:  # noqa: ARG002
        """Return None: the weights are those of the configuration."""
        return None


class SecondMoment(Estimator):
    """Average squared decoded logits, as the paper does."""

    traits = EstimatorTraits(squares=True, forget=True)

    def start(self, nodes: int, forget: float = 1.0) -> EstimatorState:
        """Return empty sums."""
        return self._state(Moments.start(nodes, forget=forget))

    def observe(self, state: EstimatorState, observation: Observation) -> EstimatorState:
        """Add a round's squares."""
        count = observation.plans[0].contexts * observation.plans[0].vocab
        sums = {
            node: (float(square), count) for node, square in zip(observation.nodes, observation.squares, strict=True)
        }
        return self._state(self._moments(state).add(sums))

    def weights(self, state: EstimatorState) -> Floats | None:
        """Return the mean squares, once every node has been heard."""
        moments = self._moments(state)
        return moments.weights() if moments.complete else None

    def _state(self, moments: Moments) -> EstimatorState:
        return {"total": moments.total, "count": moments.count, "forget": np.array([moments.forget])}

    def _moments(self, state: EstimatorState) -> Moments:
        return Moments(state["total"], state["count"], float(state["forget"][0]))


class Distortion(Estimator):
    """Compute the weights from the noise that the codec reports in the last round."""

    def observe(self, state: EstimatorState, observation: Observation) -> EstimatorState:
        """Replace the weights of the nodes that answered."""
        bits = [plan.bits for plan in observation.plans]
        vocab = observation.plans[0].vocab
        sparse = observation.codec.traits.sparse
        noise = observation.noise
        weights = label_weights(noise, bits) if sparse else distortion_weights(noise, bits, vocab)
        return {**state, "weights": _replaced(state["weights"], observation.nodes, weights)}


def distortion_weights(noise: ArrayLike, bits: ArrayLike, vocab: int) -> Floats:
    """Compute Theorem 5's weights from the mean variance of what each node sent: w_i = noise_i * 2^(2 B_i / V).

    Up to the factor 1/3 these are the L_i^2 of the remark on heterogeneous clips; factors drop out.

    >>> distortion_weights([0.25, 4.0], [256.0, 256.0], vocab=256).tolist()
    [1.0, 16.0]
    """
    noise = validation.vector("noise", noise)
    bits = validation.vector("bits", bits, size=noise.size)
    weights: Floats = noise * np.exp2(2 * bits / vocab)
    return weights


def label_weights(noise: ArrayLike, bits: ArrayLike) -> Floats:
    """Compute the weights of sampled labels, whose noise is w_i / B_i: w_i = noise_i * B_i.

    A node whose labels have no noise counts for next to nothing, and not for nothing: weights are above 0.

    >>> label_weights([0.5, 0.02], [10.0, 50.0]).tolist()
    [5.0, 1.0]
    """
    noise = validation.vector("noise", noise)
    weights: Floats = np.maximum(noise, _LEAST_NOISE) * validation.vector("bits", bits, size=noise.size)
    return weights


def _replaced(values: Floats, nodes: Sequence[int], new: ArrayLike) -> Floats:
    """Return a copy of one value for each node, with those of `nodes` replaced."""
    values = values.copy()
    values[list(nodes)] = new
    return values


NONE = Nothing()
SECOND_MOMENT = SecondMoment()
DISTORTION = Distortion()


class Curves(Distortion):
    """Measure each node's loss curve in every round; the weights of `distortion` are kept beside it for the report."""

    traits = EstimatorTraits(samples=True, allocator=False)

    def start(self, nodes: int, forget: float = 1.0) -> EstimatorState:
        """Return the state before the first round."""
        unknown = np.full(nodes, np.nan)
        return {**super().start(nodes, forget), "levels": unknown, "rates": unknown}

    def observe(self, state: EstimatorState, observation: Observation) -> EstimatorState:
        """Replace the curves of the nodes that answered."""
        levels, rates = np.array([_curve(observation, k) for k in range(len(observation.nodes))]).T
        return {
            **super().observe(state, observation),
            "levels": _replaced(state["levels"], observation.nodes, levels),
            "rates": _replaced(state["rates"], observation.nodes, rates),
        }

    def share(self, state: EstimatorState, total: float, caps: Floats, floors: Floats) -> Floats:
        """Return bits of equal slopes; a node that never answered is given the others' mean curve."""
        levels, rates = (np.where(np.isnan(v), np.nanmean(v), v) for v in (state["levels"], state["rates"]))
        return equal_slopes(levels, rates, total, caps, floors)


def loss_curve(codec: Codec, plan: Plan, values: Reals, noise: float) -> tuple[float, float]:
    """Return level and rate of log loss = level - rate sqrt(bits) for a node, from what it sent in a round.

    Its decoded logits on some contexts, `values`, are coded again with half and a quarter of the bits. What that loses,
    on top of the `noise` in them (both as KL, in nats per context), is what the node would have lost with fewer bits.
    """
    points = [(plan.bits, noise)]
    values = np.clip(values, -MAX_LOGIT / 2, MAX_LOGIT / 2)
    for share in (0.5, 0.25):
        fewer = replace(plan, bits=share * plan.bits)
        if fewer.bits >= codec.least_bits(fewer):
            decoded = decode(codec, encode(codec, values, fewer), fewer).values
            with np.errstate(divide="ignore", invalid="ignore"):  # only logits that no honest node sends overflow here
                points.append((fewer.bits, noise + float(kl(values, decoded - values).mean())))
    return fit_curve(*np.array(points).T)


def fit_curve(bits: Floats, losses: Floats) -> tuple[float, float]:
    """Fit level and rate of log loss = level - rate sqrt(bits) by least squares; the rate is always above 0.

    >>> level, rate = fit_curve(np.array([100.0, 25.0]), np.array([0.01, 0.1]))
    >>> round(float(np.exp(level - rate * 10)), 6), round(float(np.exp(level - rate * 5)), 6)
    (0.01, 0.1)
    """
    roots = np.sqrt(bits)
    logs = np.log(np.clip(np.where(np.isfinite(losses), losses, _MAX_LOSS), 1e-30, _MAX_LOSS))
    rate = -float(np.polyfit(roots, logs, 1)[0]) if len(bits) > 1 else 0.0
    rate = max(rate, 1e-6 / float(roots[0]))
    return float(logs.mean() + rate * roots.mean()), rate


def _curve(observation: Observation, k: int) -> tuple[float, float]:
    """Measure the curve of the k-th node that answered, on the contexts that were sampled."""
    plan = observation.plans[k]
    values = np.concatenate([sample.values[k] for sample in observation.samples])
    noise = sum(float((softmax(sample.values[k]) * sample.variance[k]).sum()) / 2 for sample in observation.samples)
    priors = [sample.prior for sample in observation.samples if sample.prior is not None]
    prior = ArrayPrior(np.concatenate(priors)) if priors else None
    return loss_curve(observation.codec, replace(plan, contexts=len(values), prior=prior), values, noise / len(values))


CURVES = Curves()
