"""Rules: how the nodes' decoded logits become one. Each has the form `(values[K, ...], variance[K, ...]) -> mean`.

`mean` is the paper's. `precision` weighs by inverse variance and is the best linear unbiased rule when nodes
agree but their budgets differ. `mixture` averages probabilities, which suits nodes that differ. `trimmed` and
`median` bound what a few bad nodes can do; they need the logits centred alike at every node, since a constant that
one node adds moves the others' order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from fpld import _check
from fpld.errors import InputError

if TYPE_CHECKING:
    from fpld.types import Reals


class Rule(Protocol):
    """Combine values [K, ...] of K nodes into one array [...]."""

    def __call__(self, values: Reals, variance: Reals) -> Reals:
        """Give the combined values; `variance` broadcasts against `values`."""
        ...


def mean(values: Reals, variance: Reals) -> Reals:
    """Average coordinate by coordinate: line 9 of Algorithm 1.

    >>> mean(np.array([[1.0], [3.0]]), np.zeros((2, 1))).tolist()
    [2.0]
    """
    _nodes(values, variance)
    result: Reals = values.mean(axis=0)
    return result


def precision(values: Reals, variance: Reals, *, spread: float = 0.0) -> Reals:
    """Average with weights 1 / (variance + spread), where `spread` is how far the nodes themselves differ.

    Nodes without any variance, where there are some, share the result among themselves.

    >>> precision(np.array([[0.0], [3.0]]), np.array([[1.0], [2.0]])).tolist()
    [1.0]
    """
    _nodes(values, variance)
    noise = np.broadcast_to(variance, values.shape) + values.dtype.type(_check.real("spread", spread, least=0.0))
    exact = noise == 0
    weights = np.where(exact.any(axis=0), exact, 1 / np.where(exact, 1, noise)).astype(values.dtype)
    result: Reals = (weights * values).sum(axis=0) / weights.sum(axis=0)
    return result


def trimmed(values: Reals, variance: Reals, *, trim: int = 1) -> Reals:
    """Average after leaving out the `trim` largest and the `trim` smallest values of each coordinate.

    >>> trimmed(np.array([[0.0], [1.0], [2.0], [99.0]]), np.zeros((4, 1))).tolist()
    [1.5]
    """
    nodes = _nodes(values, variance)
    _check.integer("trim", trim)
    if 2 * trim >= nodes:
        raise InputError(f"trim must be less than half of the {nodes} nodes, got {trim}")
    result: Reals = np.sort(values, axis=0)[trim : nodes - trim].mean(axis=0)
    return result


def median(values: Reals, variance: Reals) -> Reals:
    """Take the median of each coordinate.

    >>> median(np.array([[0.0], [1.0], [99.0]]), np.zeros((3, 1))).tolist()
    [1.0]
    """
    _nodes(values, variance)
    result: Reals = np.median(values, axis=0)
    return result


def mixture(values: Reals, variance: Reals) -> Reals:
    """Average probabilities instead of logits, and give their logarithm.

    A uniform error of step s multiplies a decoded probability by E[exp(error)] = sinh(s/2) / (s/2) on average;
    s = sqrt(12 variance) is known, so the factor is taken out and each node's weights are unbiased before they are
    normalized.

    >>> np.exp(mixture(np.log([[0.9, 0.1], [0.5, 0.5]]), np.zeros((2, 1)))).round(6).tolist()
    [0.7, 0.3]
    """
    _nodes(values, variance)
    half_step = np.sqrt(3 * np.asarray(variance, values.dtype))
    # log(sinh(h) / h) without overflow, and without 0/0 where there is no error.
    safe = np.maximum(half_step, values.dtype.type(1e-3))
    factor = np.where(half_step < 1e-3, half_step**2 / 6, safe + np.log(-np.expm1(-2 * safe) / (2 * safe)))
    logits = values - factor
    logits = logits - logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    top = logits.max(axis=0)
    result: Reals = (top + np.log(np.exp(logits - top).mean(axis=0))).astype(values.dtype)
    return result


def _nodes(values: Reals, variance: Reals) -> int:
    if values.ndim < 1 or len(values) == 0:
        raise InputError(f"values must hold at least one node along the first axis, got shape {values.shape}")
    try:
        broadcasts = np.broadcast_shapes(values.shape, np.shape(variance)) == values.shape
    except ValueError:
        broadcasts = False
    if not broadcasts:
        raise InputError(f"variance must broadcast to the values' shape {values.shape}, got {np.shape(variance)}")
    return len(values)
