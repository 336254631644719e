"""Estimators: weights for the allocator from what the aggregator receives, round after round.

An estimator is an object without state of its own. What it knows is a mapping of arrays that the caller holds and a
checkpoint keeps: `start` makes it, `observe` returns the next one, `weights` reads it. What it wants to be shown,
and how its weights are used, is data: `wants`.

    none           nothing is estimated: weights are those of the configuration
    second-moment  the paper's estimator (Algorithm 2): mean squares of the decoded logits
    distortion     the constant in front of 2^(-2 B_i / V), as Theorem 5 asks for, and for sampled labels that in front
                   of 1 / B_i, for the square-root allocator: the codec reports its noise with every frame
    curves         loss against bits as measured at each node (`fpld.budget.curves`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fpld import _check
from fpld.budget.moments import Moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fpld.codecs import Codec
    from fpld.protocol.replies import Sample
    from fpld.types import Floats, Plan

_TINY = 1e-30

State = Mapping[str, np.ndarray[Any, np.dtype[Any]]]
"""What an estimator knows, by name; only it knows what the arrays mean."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What an estimator is shown of a round, and how it is used."""

    samples: bool = False  # all nodes' logits on some contexts
    squares: bool = False  # each node's sum of squared logits over all contexts
    warmup: bool = True  # the first rounds are uniform, since they are what it learns from
    forget: bool = False  # lets the past fade by [budget] forget
    allocator: bool = True  # an allocator shares the total out by its weights; False: it does so itself, by `share`


class Seen(NamedTuple):
    """A round as an estimator sees it; entry k of each sequence is that of `nodes[k]`, which answered."""

    nodes: Sequence[int]
    plans: Sequence[Plan]
    codec: Codec
    noise: Floats  # mean variance of a decoded logit
    squares: Floats  # sum of squared decoded logits, if wanted
    samples: Sequence[Sample] = ()  # in the order of their contexts, if wanted


class Estimator(ABC):
    """A way to learn what each node's bits are worth."""

    wants: ClassVar[Wants] = Wants()

    def start(self, nodes: int, forget: float = 1.0) -> State:  # noqa: ARG002  # some let the past fade
        """Return the state before the first round: of each node nothing is known (NaN)."""
        return {"weights": np.full(nodes, np.nan)}

    @abstractmethod
    def observe(self, state: State, seen: Seen) -> State:
        """Return the state after a round."""

    def weights(self, state: State) -> Floats | None:
        """Return a weight for each node [K]; None while there is nothing to go by.

        A node that was never heard gets the others' geometric mean: an even share of the total.
        """
        weights = state["weights"]
        silent = np.isnan(weights)
        if not silent.any() or silent.all():
            return None if silent.all() else weights
        return np.where(silent, np.exp(np.log(np.maximum(weights[~silent], _TINY)).mean()), weights)

    def share(self, state: State, total: float, caps: Floats, floors: Floats) -> Floats:
        """Return the bits of each node; for estimators that want no allocator."""
        raise NotImplementedError(f"{type(self).__name__} wants no allocator, so it must share the total out itself")


class Nothing(Estimator):
    """Estimate nothing."""

    wants = Wants(warmup=False)

    def start(self, nodes: int, forget: float = 1.0) -> State:  # noqa: ARG002  # nothing fades
        """Return no state."""
        return {}

    def observe(self, state: State, seen: Seen) -> State:  # noqa: ARG002  # it does not look
        """Return no state."""
        return state

    def weights(self, state: State) -> Floats | None:  # noqa: ARG002  # nothing is known
        """Return None: the weights are those of the configuration."""
        return None


class SecondMoment(Estimator):
    """Average squared decoded logits, as the paper does."""

    wants = Wants(squares=True, forget=True)

    def start(self, nodes: int, forget: float = 1.0) -> State:
        """Return empty sums."""
        return self._state(Moments.start(nodes, forget=forget))

    def observe(self, state: State, seen: Seen) -> State:
        """Add a round's squares."""
        count = seen.plans[0].contexts * seen.plans[0].vocab
        sums = {node: (float(square), count) for node, square in zip(seen.nodes, seen.squares, strict=True)}
        return self._state(self._moments(state).add(sums))

    def weights(self, state: State) -> Floats | None:
        """Return the mean squares, once every node has been heard."""
        moments = self._moments(state)
        return moments.weights() if moments.complete else None

    def _state(self, moments: Moments) -> State:
        return {"total": moments.total, "count": moments.count, "forget": np.array([moments.forget])}

    def _moments(self, state: State) -> Moments:
        return Moments(state["total"], state["count"], float(state["forget"][0]))


class Distortion(Estimator):
    """Read the allocator's weights off the codec's own report; the last round's count."""

    def observe(self, state: State, seen: Seen) -> State:
        """Replace the weights of the nodes that answered."""
        bits, vocab = [plan.bits for plan in seen.plans], seen.plans[0].vocab
        sparse = seen.codec.traits.sparse
        found = label_weights(seen.noise, bits) if sparse else distortion_weights(seen.noise, bits, vocab)
        return {**state, "weights": replaced(state["weights"], seen.nodes, found)}


def distortion_weights(noise: ArrayLike, bits: ArrayLike, vocab: int) -> Floats:
    """Compute Theorem 5's weights from the mean variance of what each node sent: w_i = noise_i * 2^(2 B_i / V).

    Up to the factor 1/3 these are the L_i^2 of the remark on heterogeneous clips; factors drop out.

    >>> distortion_weights([0.25, 4.0], [256.0, 256.0], vocab=256).tolist()
    [1.0, 16.0]
    """
    noise = _check.vector("noise", noise)
    bits = _check.vector("bits", bits, size=noise.size)
    weights: Floats = noise * np.exp2(2 * bits / vocab)
    return weights


def label_weights(noise: ArrayLike, bits: ArrayLike) -> Floats:
    """Compute the weights of sampled labels, whose noise is w_i / B_i: w_i = noise_i * B_i.

    A node whose labels have no noise counts for next to nothing, and not for nothing: weights are above 0.

    >>> label_weights([0.5, 0.02], [10.0, 50.0]).tolist()
    [5.0, 1.0]
    """
    noise = _check.vector("noise", noise)
    weights: Floats = np.maximum(noise, 1e-12) * _check.vector("bits", bits, size=noise.size)
    return weights


def replaced(values: Floats, nodes: Sequence[int], found: ArrayLike) -> Floats:
    """Return a copy of one value for each node, with those of `nodes` replaced."""
    values = values.copy()
    values[list(nodes)] = found
    return values


NONE, SECOND_MOMENT, DISTORTION = Nothing(), SecondMoment(), Distortion()
