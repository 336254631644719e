"""The contract of rules: an accumulator takes a block of contexts node by node.

A rule sees decoded logits only. One that audits (`AuditingRule`) is given an `Audit` of the whole round first: the
nodes' inner products, from which it computes each node's trust.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from fpld.errors import InputError
from fpld.numerics import softmax

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fpld.types import Decoded, Floats, Reals


class Accumulator(Protocol):
    """Combine one block of contexts."""

    def add(self, decoded: Decoded) -> None:
        """Add a node; the caller may change its arrays after the call."""
        ...

    def result(self) -> Reals:
        """Return the combined logits [n, V] of all nodes that were added."""
        ...


@dataclass(frozen=True, slots=True)
class RuleTraits:
    """State what a rule is and needs.

    Parameters
    ----------
    needs_all
        An accumulator holds all nodes of a block at once, so blocks are smaller. Other rules need memory for one block,
        however many nodes there are.
    least_nodes
        So many nodes must answer in a round.
    audits
        The rule is an `AuditingRule`.
    trims
        The rule has a field `trim` that its user may choose.
    weights
        The weight of each node, where it does not depend on the logits.
    """

    needs_all: bool = False
    least_nodes: int = 1
    audits: bool = False
    trims: bool = False
    weights: tuple[float, ...] = ()


class Rule(Protocol):
    """Combine the nodes' decoded logits."""

    @property
    def traits(self) -> RuleTraits:
        """Return the traits of this rule."""
        ...

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Return an accumulator for a block of n contexts, `shape` = (n, V)."""
        ...


class AuditingRule(Rule, Protocol):
    """A rule that is given an audit of a whole round before it combines; trust is kept over rounds."""

    def trust(self, audit: Audit, before: Floats | None = None) -> Floats:
        """Return the nodes' trust [K] after this round, from what it was before."""
        ...

    def with_trust(self, trust: Floats) -> Rule:
        """Return the rule that combines nodes by this trust."""
        ...


class RelativeProducts(NamedTuple):
    """Hold inner products [K, K] as `Audit` does, of labels whose tokens are divided by sqrt(pi + 1/V).

    So little mass on each of many rare tokens counts by what it does to a student. pi is the prior. `each_errors` and
    `whole_errors` [K] are the standard errors of the diagonals.
    """

    each: Floats
    whole: Floats
    each_errors: Floats
    whole_errors: Floats


class Masses(NamedTuple):
    """Hold how far the nodes' labels [K] are from adding up to one: the mean square over contexts, and its error.

    Of probabilities the squares have the mean zero, however much nodes differ.
    """

    squares: Floats
    errors: Floats


class GroupProducts(NamedTuple):
    """Hold inner products [G, K, K] of the nodes' means over groups of contexts, and their diagonals' errors [G, K].

    A group is the contexts that end with the same token. With sampled labels, tokens are divided as in
    `RelativeProducts`.
    """

    means: Floats
    errors: Floats


class Audit(NamedTuple):
    """Hold the nodes' inner products [K, K]: `each` averaged over contexts, `whole` of their means over contexts.

    They are of probabilities, or of their differences to a prior that all share. `gains` [K] are the mean products with
    the tokens that follow in the public text, less the prior: how well a node predicts them. Without such tokens they
    are None. `relative` and `masses` are of sampled labels. Dense ones are probabilities by construction. `groups` are
    None without tokens that follow, or with too few contexts.
    """

    each: Floats
    whole: Floats
    gains: Floats | None = None
    relative: RelativeProducts | None = None
    masses: Masses | None = None
    groups: GroupProducts | None = None


def probabilities(decoded: Decoded) -> Reals:
    """Return a node's probabilities [n, V]: the codec's own unbiased ones, where it has them."""
    if decoded.probabilities is not None:
        return decoded.probabilities
    values = decoded.values
    return softmax(values - np.asarray(decoded.bias, values.dtype), values.dtype)


def sum_products(nodes: Sequence[Reals]) -> tuple[Floats, Floats]:
    """Return sums over a block of contexts: of the nodes' inner products [K, K], and of their probabilities [K, V]."""
    stack = np.stack(nodes).astype(np.float64)
    flat = stack.reshape(len(stack), -1)
    return flat @ flat.T, stack.sum(axis=1)


def with_trim(rule: Rule, *, trim: int | None) -> Rule:
    """Return a rule with the `trim` of the configuration; only the rule 'trimmed' has one.

    >>> from fpld.rules import TRIMMED
    >>> with_trim(TRIMMED, trim=2)
    Trimmed(trim=2)
    """
    if trim is None:
        return rule
    if not rule.traits.trims:
        raise InputError(f"trim must be left out with {type(rule).__name__}: it is for the rule 'trimmed'")
    return cast("Rule", replace(cast("Any", rule), trim=trim))


def combine(rule: Rule, replies: Iterable[Decoded]) -> Reals:
    """Combine all nodes' decoded blocks of the same contexts by a rule.

    >>> from fpld.rules import MEAN
    >>> from fpld.types import Decoded
    >>> zero = np.zeros((1, 1))
    >>> combine(MEAN, [Decoded(np.array([[value]]), zero, zero) for value in (1.0, 3.0)]).tolist()
    [[2.0]]
    """
    accumulator = None
    shape = (0, 0)
    for reply in replies:
        if accumulator is None:
            shape = _shape(reply)
            accumulator = rule.start(shape)
        _check(reply, shape)
        accumulator.add(reply)
    if accumulator is None:
        raise InputError("replies must hold at least one node, got none")
    return accumulator.result()


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
