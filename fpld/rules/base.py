"""The contract of a rule: an accumulator that takes a block of contexts node by node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from fpld.errors import InputError
from fpld.numerics import softmax

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fpld.types import Decoded, Floats, Reals


class Accumulator(Protocol):
    """A rule at work on a block of contexts."""

    def add(self, decoded: Decoded) -> None:
        """Take in a node; what it holds may change after the call."""
        ...

    def result(self) -> Reals:
        """Return the combined logits [n, V] of all nodes that were taken in."""
        ...


@dataclass(frozen=True, slots=True)
class Traits:
    """State what a rule is and needs.

    `needs_all`: an accumulator holds all nodes of a block at once: then blocks are smaller. Other rules need memory for
    one block, however many nodes there are. `least_nodes`: so many nodes must answer in a round. `audits`: it is a
    `Judge`. `trims`: it has a count `trim` that its user may choose. `weights`: how much each node counts, where that
    is known beforehand.
    """

    needs_all: bool = False
    least_nodes: int = 1
    audits: bool = False
    trims: bool = False
    weights: tuple[float, ...] = ()


class Rule(Protocol):
    """Combine the nodes' decoded logits."""

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        ...

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Begin with a block of n contexts, `shape` = (n, V)."""
        ...


class Judge(Rule, Protocol):
    """A rule that is given an audit of a whole round before it combines, and remembers its verdicts over rounds."""

    def judge(self, audit: Audit, before: Floats | None = None) -> Floats:
        """Return the nodes' trust [K], given what it was before."""
        ...

    def weighing(self, trust: Floats) -> Rule:
        """Return the rule that combines nodes which are trusted so far."""
        ...


class Audit(NamedTuple):
    """Hold the nodes' inner products [K, K]: the mean over contexts, and those of their means over contexts.

    They are of probabilities, or of what these add to a prior that all share. `gains` [K] are the products with what
    followed the contexts in the public text, less the prior: they say how much a node's labels are worth there. They
    are None where that is not known.
    """

    each: Floats
    whole: Floats
    gains: Floats | None = None


def probabilities(decoded: Decoded) -> Reals:
    """Return a node's probabilities [n, V]: the codec's own unbiased ones, where it has them."""
    if decoded.chances is not None:
        return decoded.chances
    values = decoded.values
    return softmax(values - np.asarray(decoded.bias, values.dtype), values.dtype)


def configured(rule: Rule, *, trim: int | None) -> Rule:
    """Return a rule with the count that its user chose, where it has one.

    >>> from fpld.rules import TRIMMED
    >>> configured(TRIMMED, trim=2)
    Trimmed(trim=2)
    """
    if trim is None:
        return rule
    if not rule.traits.trims:
        raise InputError(f"trim must be left out with {type(rule).__name__}: it is for the rule 'trimmed'")
    return cast("Rule", replace(cast("Any", rule), trim=trim))


def combine(rule: Rule, replies: Iterable[Decoded]) -> Reals:
    """Return what a rule makes of all nodes' decoded blocks of the same contexts.

    >>> from fpld.rules import MEAN
    >>> from fpld.types import Decoded
    >>> none = np.zeros((1, 1))
    >>> combine(MEAN, [Decoded(np.array([[value]]), none, none) for value in (1.0, 3.0)]).tolist()
    [[2.0]]
    """
    work, shape = None, (0, 0)
    for reply in replies:
        if work is None:
            shape = _shape(reply)
            work = rule.start(shape)
        _check(reply, shape)
        work.add(reply)
    if work is None:
        raise InputError("replies must hold at least one node, got none")
    return work.result()


def _shape(reply: Decoded) -> tuple[int, int]:
    if reply.values.ndim != 2:
        raise InputError(f"values must have the shape (contexts, vocab), got {reply.values.shape}")
    contexts, vocab = reply.values.shape
    return contexts, vocab


def _check(reply: Decoded, shape: tuple[int, int]) -> None:
    if reply.values.shape != shape:
        raise InputError(f"values must have the first node's shape {shape}, got {reply.values.shape}")
    for name, field in (("variance", reply.variance), ("bias", reply.bias)):
        try:
            broadcasts = np.broadcast_shapes(shape, np.shape(field)) == shape
        except ValueError:
            broadcasts = False
        if not broadcasts:
            raise InputError(f"{name} must broadcast to the values' shape {shape}, got {np.shape(field)}")
