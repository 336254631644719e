"""Rules that bound what a few bad nodes can do: they look at all nodes of a coordinate at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.errors import InputError
from fpld.rules.base import Traits

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.rules.base import Accumulator
    from fpld.types import Decoded, Reals


class _Stack:
    """Hold all nodes of a block; at the end a function makes one of the values [K, n, V]."""

    def __init__(self, function: Callable[[Reals], Reals]) -> None:
        self._function = function
        self._values: list[Reals] = []

    def add(self, decoded: Decoded) -> None:
        self._values.append(decoded.values.copy())

    def result(self) -> Reals:
        return self._function(np.stack(self._values))


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Average after leaving out the `trim` largest and the `trim` smallest values of each coordinate."""

    trim: int = 1

    def __post_init__(self) -> None:
        _check.integer("trim", self.trim)

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        return Traits(needs_all=True, least_nodes=2 * self.trim + 1, trims=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:  # noqa: ARG002  # the form of all rules
        """Begin with a block."""
        return _Stack(self._trimmed)

    def _trimmed(self, values: Reals) -> Reals:
        nodes = len(values)
        if 2 * self.trim >= nodes:
            raise InputError(f"trim must be less than half of the {nodes} nodes, got {self.trim}")
        result: Reals = np.sort(values, axis=0)[self.trim : nodes - self.trim].mean(axis=0)
        return result


@dataclass(frozen=True, slots=True)
class Median:
    """Take the median of each coordinate."""

    @property
    def traits(self) -> Traits:
        """Return what the rule is and needs."""
        return Traits(needs_all=True)

    def start(self, shape: tuple[int, int]) -> Accumulator:  # noqa: ARG002  # the form of all rules
        """Begin with a block."""
        return _Stack(_median)


def _median(values: Reals) -> Reals:
    result: Reals = np.median(values, axis=0)
    return result


TRIMMED, MEDIAN = Trimmed(), Median()
