"""Poisson sampling for DP-SGD: a text cut into units, and the random numbers that choose and hide them.

The guarantee is about a unit: a window of tokens, or a document with those of its group. Windows are disjoint and never
cross the end of a document, so a token is in one window and in one unit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fpld.types import Array, Floats

PADDING = -1
"""The id that fills up a window at the end of a document; no token has it."""


@dataclass(frozen=True, eq=False, slots=True)
class PrivateText:
    """Windows [W, T+1] of token ids, those of a unit side by side: unit i has rows starts[i] to starts[i+1]."""

    windows: Array
    starts: Array

    @property
    def units(self) -> int:
        """Return how many units there are."""
        return len(self.starts) - 1

    def draw(self, rate: float, most: int, random: RandomSource) -> Iterator[Array]:
        """Yield the windows of the units that take part in a step: each with probability `rate`, independently.

        Of a unit with more than `most` windows, `most` are drawn. Under Poisson sampling the number of units varies.
        """
        for unit in np.flatnonzero(random.uniforms(self.units) < rate):
            first = self.starts[unit]
            stop = self.starts[unit + 1]
            yield self.windows[first + random.choose(most, stop - first)]


def cut_text(tokens: Array, lengths: Sequence[int] | Array, groups: Sequence[int] | Array, window: int) -> PrivateText:
    """Cut a text of documents into windows of window + 1 tokens; documents of equal group numbers are one unit.

    >>> text = cut_text(np.arange(9), [4, 3, 2], [0, 1, 0], window=2)
    >>> text.windows.tolist(), text.starts.tolist()
    ([[0, 1, 2], [7, 8, -1], [4, 5, 6]], [0, 2, 3])
    """
    pieces = []
    owners = []
    ends = np.cumsum(lengths)
    for group, length, end in zip(groups, lengths, ends, strict=True):
        document = tokens[end - length : end]
        whole = _pieces(document, window + 1)
        pieces.append(whole)
        owners += [int(group)] * len(whole)
    windows = np.concatenate(pieces) if pieces else np.empty((0, window + 1), np.int32)
    order = np.argsort(owners, kind="stable")
    counts = np.unique(np.asarray(owners, np.int64), return_counts=True)[1]
    return PrivateText(windows[order], np.concatenate(([0], np.cumsum(counts))).astype(np.int64))


def by_window(text: PrivateText) -> PrivateText:
    """Return the same windows, each a unit of its own."""
    return PrivateText(text.windows, np.arange(len(text.windows) + 1))


def _pieces(document: Array, width: int) -> Array:
    """Cut a document into pieces of `width` tokens; the last is filled up, and left out if it predicts nothing."""
    count = -(-len(document) // width)
    if len(document) % width == 1:
        count -= 1
    filled = np.full(count * width, PADDING, np.int32)
    kept = min(len(document), filled.size)
    filled[:kept] = document[:kept]
    return filled.reshape(count, width)


class RandomSource:
    """Uniform and normal numbers from a source of random bytes.

    Whoever knows the draws can subtract the noise, so a real site uses `secret`. A simulation on one machine uses
    `seeded`, so that it can be repeated; its seed must then be kept as secret as the text.
    """

    def __init__(self, source: Callable[[int], bytes]) -> None:
        self._source = source

    @classmethod
    def secret(cls) -> Self:
        """Return draws from the system's cryptographic generator, which cannot be repeated."""
        return cls(os.urandom)

    @classmethod
    def seeded(cls, seed: int) -> Self:
        """Return draws that follow from a seed.

        >>> bool(np.array_equal(RandomSource.seeded(7).normals(5), RandomSource.seeded(7).normals(5)))
        True
        """
        return cls(np.random.default_rng(seed).bytes)

    def uniforms(self, count: int) -> Floats:
        """Draw numbers from 0 to below 1, multiples of 2^-53."""
        bits = np.frombuffer(self._source(8 * count), "<u8") >> np.uint64(11)
        return np.asarray(bits * 2.0**-53, np.float64)

    def normals(self, count: int) -> Floats:
        """Draw standard normal numbers, two of each pair of uniform ones (Box and Muller, 1958)."""
        half = -(-count // 2)
        radius = np.sqrt(-2.0 * np.log1p(-self.uniforms(half)))
        angle = 2.0 * np.pi * self.uniforms(half)
        return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]

    def choose(self, most: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Draw `most` different numbers below `count`, or all of them if there are no more."""
        return np.arange(count) if count <= most else np.sort(np.argsort(self.uniforms(count))[:most])
