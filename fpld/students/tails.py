"""The last steps of a training: their mean loss, and their mean weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def tail_mean(losses: list[float]) -> float:
    """Return the mean of the last tenth of the losses, which is less noisy than the last alone."""
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


class TailAverage:
    """Average parameters over the last `share` of the steps: arrays of NumPy or PyTorch that training changes in place.

    >>> weight = np.zeros(1)
    >>> tail = TailAverage([weight], steps=4, share=0.5)
    >>> for step in range(4):
    ...     weight += 1
    ...     tail.add(step)
    >>> tail.finish()
    >>> weight.tolist()
    [3.5]
    """

    def __init__(self, weights: Sequence[Any], steps: int, share: float) -> None:
        self._first = steps - max(1, round(share * steps)) if share > 0 else steps
        self._weights = weights if share > 0 else []
        self._means = [0 * weight for weight in self._weights]

    def add(self, step: int) -> None:
        """Take the parameters as they are after a step, if it is one of the last."""
        if step >= self._first:
            for mean, weight in zip(self._means, self._weights, strict=True):
                mean += (weight - mean) / (step - self._first + 1)

    def finish(self) -> None:
        """Replace the parameters by their averages."""
        for mean, weight in zip(self._means, self._weights, strict=True):
            weight[...] = mean
