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
    """Windows [W, T+1] of token ids, those of a unit side by side: unit i has rows starts[i] to starts[i+1].

    The windows of a text that is not in memory are not either.
    """

    windows: Array | TextWindows
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
    width = window + 1
    sizes = np.asarray(lengths, np.int64)
    # A last window of one token predicts nothing, and is left out.
    counts = -(-sizes // width) - (sizes % width == 1)
    owners = np.repeat(np.asarray(groups, np.int64), counts)
    ends = np.cumsum(counts)
    inside = (np.arange(len(owners)) - np.repeat(ends - counts, counts)) * width  # first token in the document
    starts = np.repeat(np.cumsum(sizes) - sizes, counts) + inside
    filled = np.minimum(np.repeat(sizes, counts) - inside, width)
    order = np.argsort(owners, kind="stable")
    windows = TextWindows(tokens, starts[order], filled[order], width)
    units = np.unique(owners, return_counts=True)[1]
    in_memory = isinstance(tokens, np.ndarray)
    every = slice(None)
    return PrivateText(
        windows[every] if in_memory else windows, np.concatenate(([0], np.cumsum(units))).astype(np.int64)
    )


@dataclass(frozen=True, eq=False, slots=True)
class TextWindows:
    """Windows of a text, read when they are drawn: their first tokens, how many tokens each has, and the width."""

    tokens: Array
    starts: Array
    filled: Array
    width: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: Any) -> Array:
        """Return some windows [n, T+1]; the last of a document is filled up."""
        columns = np.arange(self.width)
        inside = columns < self.filled[rows][..., None]
        places = np.where(inside, self.starts[rows][..., None] + columns, 0)
        if not len(self.tokens):
            return np.full(places.shape, PADDING, np.int32)
        return np.where(inside, self.tokens[places], PADDING).astype(np.int32)


def by_window(text: PrivateText) -> PrivateText:
    """Return the same windows, each a unit of its own."""
    return PrivateText(text.windows, np.arange(len(text.windows) + 1))


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
