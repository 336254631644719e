"""Losses on held-out text, token by token: their means, those of a mixture, and differences with an error.

A model's nats are one array for each text: the negative logarithm of the probability of every token but the first. What
a mean hides is there still: models are compared window by window, on the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Nats = Sequence[npt.NDArray[np.floating[Any]]]
    Windows = Sequence[Sequence[float]]


class Difference(NamedTuple):
    """A mean difference in nats per token, and its standard error."""

    mean: float
    error: float | None


def losses(nats: Nats) -> list[float]:
    """Return the loss in nats per token on each text.

    >>> losses([np.array([1.0, 2.0]), np.array([4.0])])
    [1.5, 4.0]
    """
    return [float(np.mean(text, dtype=np.float64)) for text in nats]


def mixture(models: Sequence[Nats]) -> list[npt.NDArray[np.float64]]:
    """Return the nats of the mean of several models' probabilities.

    >>> np.exp(-mixture([[np.log([2.0])], [np.log([4.0])]])[0]).tolist()
    [0.375]
    """
    return [
        -np.log(np.mean([np.exp(-nats.astype(np.float64)) for nats in text], axis=0))
        for text in zip(*models, strict=True)
    ]


def windows(nats: Nats, length: int) -> list[list[float]]:
    """Return the loss of each whole window of each text."""
    cut = [text[: len(text) // length * length] for text in nats]
    return [text.reshape(-1, length).mean(axis=1, dtype=np.float64).round(6).tolist() for text in cut]


def difference(theirs: Windows, ours: Windows) -> Difference:
    """Return by how much the loss of one model is above another's: the mean over texts of the mean over windows.

    Windows are the units of the error: each text is a sample of windows, and texts are those that there are.

    >>> difference([[2.0, 4.0], [5.0, 5.0]], [[1.0, 1.0], [3.0, 3.0]])
    Difference(mean=2.0, error=0.5)
    """
    pairs = [np.subtract(one, other) for one, other in zip(theirs, ours, strict=True)]
    mean = float(np.mean([np.mean(text) for text in pairs]))
    if any(len(text) < 2 for text in pairs):
        return Difference(mean, None)
    variance = sum(float(np.var(text, ddof=1)) / len(text) for text in pairs)
    return Difference(mean, variance**0.5 / len(pairs))
