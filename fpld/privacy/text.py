"""A node's text cut into windows, and the windows into units: what the guarantee is about.

Windows are disjoint and never go over the end of a document, so that a token is in one window and in one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fpld.privacy.chance import Chance

    Array = np.ndarray[Any, np.dtype[Any]]

PADDING = -1
"""What fills up windows at the end of a document; no token has this number."""


@dataclass(frozen=True, eq=False, slots=True)
class PrivateText:
    """Windows [W, T+1] of token ids, those of a unit side by side: unit i has rows starts[i] to starts[i+1]."""

    windows: Array
    starts: Array

    @property
    def units(self) -> int:
        """Return how many units there are."""
        return len(self.starts) - 1

    def draw(self, rate: float, most: int, chance: Chance) -> Iterator[Array]:
        """Yield the windows of the units that take part in a step: each unit with chance `rate`, by itself.

        Of a unit with more than `most` windows some are drawn. The draws are Poisson sampling: no unit's depends on
        another's, and their number varies.
        """
        for unit in np.flatnonzero(chance.uniforms(self.units) < rate):
            first, stop = self.starts[unit], self.starts[unit + 1]
            yield self.windows[first + chance.choose(most, stop - first)]


def cut_text(tokens: Array, lengths: Sequence[int] | Array, groups: Sequence[int] | Array, window: int) -> PrivateText:
    """Cut a text of documents into windows of window + 1 tokens; documents of equal group numbers are one unit.

    >>> text = cut_text(np.arange(9), [4, 3, 2], [0, 1, 0], window=2)
    >>> text.windows.tolist(), text.starts.tolist()
    ([[0, 1, 2], [7, 8, -1], [4, 5, 6]], [0, 2, 3])
    """
    pieces, owners = [], []
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
