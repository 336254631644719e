"""The contract of a rule: an accumulator that takes a block of contexts node by node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fpld.types import Decoded, Reals


class Accumulator(Protocol):
    """A rule at work on a block of contexts."""

    def add(self, decoded: Decoded) -> None:
        """Take in a node; what it holds may change after the call."""
        ...

    def result(self) -> Reals:
        """Return the combined logits [n, V] of all nodes that were taken in."""
        ...


class Rule(Protocol):
    """Combine the nodes' decoded logits.

    `needs_all` says that an accumulator holds all nodes of a block at once: then blocks are smaller. Other rules need
    memory for one block, however many nodes there are.
    """

    @property
    def needs_all(self) -> bool:
        """Return whether the rule sees all nodes at once."""
        ...

    def start(self, shape: tuple[int, int]) -> Accumulator:
        """Begin with a block of n contexts, `shape` = (n, V)."""
        ...


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
