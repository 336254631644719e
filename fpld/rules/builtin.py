"""Rules: how the nodes' decoded logits become one. Each has the form `(values[K, ...], variance[K, ...]) -> mean`.

`mean` is the paper's. `precision` weighs by inverse variance and is the best linear unbiased rule when nodes
agree but their budgets differ. `mixture` averages probabilities, which suits nodes that differ. `trimmed` and
`median` bound what a few bad nodes can do; they need the logits centred alike at every node, since a constant that
one node adds moves the others' order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from fpld import _check, compiled
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.types import Reals

T = TypeVar("T")
_FEW = 64


class Rule(Protocol):
    """Combine values [K, ...] of K nodes into one array [...]."""

    def __call__(self, values: Reals, variance: Reals) -> Reals:
        """Return the combined values; `variance` broadcasts against `values`."""
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
    """Average probabilities instead of logits, and return their logarithm.

    A uniform error of step s multiplies a decoded probability by E[exp(error)] = sinh(s/2) / (s/2) on average;
    s = sqrt(12 variance) is known, so the factor is taken out and each node's weights are unbiased before they are
    normalized.

    >>> np.exp(mixture(np.log([[0.9, 0.1], [0.5, 0.5]]), np.zeros((2, 1)))).round(6).tolist()
    [0.7, 0.3]
    """
    _nodes(values, variance)
    logits = _unbiased(values, variance)
    top = logits.max(axis=0)
    result: Reals = (top + np.log(np.exp(logits - top).mean(axis=0))).astype(values.dtype)
    return result


def _unbiased(values: Reals, variance: Reals) -> Reals:
    """Return log-probabilities, with the error's mean factor taken out."""
    logits: Reals = values - _log_factor(values, variance)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def _log_factor(values: Reals, variance: Reals) -> Reals:
    """Return log(sinh(h) / h) for half a step h, without overflow, and without 0/0 where there is no error."""
    if np.ndim(variance) == 2 and np.shape(variance)[1] > _FEW:
        # Often there are a few kinds of columns only, one for each number of levels: logarithms of those are enough.
        _, first, kind = np.unique(variance[0], return_index=True, return_inverse=True)
        if len(first) <= _FEW and (variance == variance[:, first][:, kind]).all():
            expanded: Reals = _log_factor(values, variance[:, first])[:, kind]
            return expanded
    half_step = np.sqrt(3 * np.asarray(variance, values.dtype))
    safe = np.maximum(half_step, values.dtype.type(1e-3))
    factor: Reals = np.where(half_step < 1e-3, half_step**2 / 6, safe + np.log(-np.expm1(-2 * safe) / (2 * safe)))
    return factor


class Running(Protocol):
    """A rule at work on a block of contexts, one node after the other: memory does not grow with the nodes."""

    def add(self, values: Reals, variance: Reals) -> None:
        """Take in a node."""
        ...

    def result(self) -> Reals:
        """Return what the rule gives for all nodes together."""
        ...


class _Mean:
    def __init__(self) -> None:
        self._total: Reals | None = None
        self._nodes = 0

    def add(self, values: Reals, variance: Reals) -> None:  # noqa: ARG002  # the form of all rules
        self._total = values.copy() if self._total is None else np.add(self._total, values, out=self._total)
        self._nodes += 1

    def result(self) -> Reals:
        return _some(self._total) / np.float32(self._nodes)


class _Precision:
    """Nodes without any variance are summed apart: where there are some, they alone count."""

    def __init__(self) -> None:
        self._sums: list[Reals] | None = None

    def add(self, values: Reals, variance: Reals) -> None:
        exact = np.broadcast_to(variance == 0, values.shape)
        weight = np.where(exact, 0, 1 / np.where(variance == 0, 1, variance)).astype(values.dtype)
        parts: list[Reals] = [weight * values, weight, exact * values, exact.astype(values.dtype)]
        self._sums = parts if self._sums is None else [a + b for a, b in zip(self._sums, parts, strict=True)]

    def result(self) -> Reals:
        total, weight, exact, count = _some(self._sums)
        result: Reals = np.where(count > 0, exact / np.maximum(count, 1), total / np.where(count > 0, 1, weight))
        return result


class _Mixture:
    """Sum probabilities; where they are too small for float32 at every node, the largest logarithm stands for them.

    `reference` leaves the kernels out: the same to float32's precision, slowly.
    """

    _CHUNK = 1 << 16  # coordinates at a time: all that a node's pass touches stays in the cache
    _SMALL = 1e-30

    def __init__(self, *, reference: bool = False) -> None:
        self._reference = reference
        self._top: Reals | None = None
        self._sum: Reals | None = None
        self._nodes = 0

    def add(self, values: Reals, variance: Reals) -> None:
        if self._top is None or self._sum is None:
            self._top, self._sum = np.full(values.shape, -np.inf, values.dtype), np.zeros(values.shape, values.dtype)
        self._nodes += 1
        spread = np.broadcast_to(np.asarray(variance, values.dtype), (len(values), *np.shape(variance)[1:]))
        if (
            not self._reference
            and values.ndim == spread.ndim == 2
            and values.dtype == np.float32
            and compiled.available()
        ):
            from fpld.rules import mixing  # brings numba along

            arrays = np.ascontiguousarray(values), np.ascontiguousarray(spread)
            mixing.add(*arrays, float(np.log(self._SMALL)), self._sum, self._top)  # type: ignore[no-untyped-call]
            return
        factor = _log_factor(values, spread)
        stride = max(self._CHUNK // values.shape[-1], 1)
        for start in range(0, len(values), stride):
            rows = slice(start, start + stride)
            logits = values[rows] - factor[rows]
            logits -= logits.max(axis=-1, keepdims=True)
            part = np.exp(logits)
            whole = part.sum(axis=-1, keepdims=True)
            logits -= np.log(whole)
            np.maximum(self._top[rows], logits, out=self._top[rows])
            part /= whole
            self._sum[rows] += part

    def result(self) -> Reals:
        total, top = _some(self._sum), _some(self._top)
        logarithm = np.log(np.maximum(total, self._SMALL))
        result: Reals = np.where(total > self._SMALL, logarithm, top) - np.float32(np.log(self._nodes))
        return result


class _Stack:
    """Any other rule sees all nodes of the block together."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._values: list[Reals] = []
        self._variances: list[Reals] = []

    def add(self, values: Reals, variance: Reals) -> None:
        self._values.append(values.copy())
        self._variances.append(np.broadcast_to(variance, values.shape))

    def result(self) -> Reals:
        return self._rule(np.stack(self._values), np.stack(self._variances))


_RUNNING: dict[Rule, Callable[[], Running]] = {mean: _Mean, precision: _Precision, mixture: _Mixture}


def running(rule: Rule) -> Running:
    """Begin to apply a rule node by node; one that is not made for it gets all nodes at the end.

    >>> work = running(mean)
    >>> for value in (1.0, 3.0):
    ...     work.add(np.array([value]), np.zeros(1))
    >>> work.result().tolist()
    [2.0]
    """
    return _RUNNING.get(rule, lambda: _Stack(rule))()


def stacks(rule: Rule) -> bool:
    """Return whether a rule needs all nodes of a block at once."""
    return rule not in _RUNNING


def _some(value: T | None) -> T:
    if value is None:
        raise InputError("values must hold at least one node, got none")
    return value


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
