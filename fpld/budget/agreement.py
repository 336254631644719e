"""Whether nodes agree about what the prior does not know: then stratified dither pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fpld.types import Reals


@dataclass(slots=True)
class Agreement:
    """Sums over sampled contexts, each weighted by the combined probabilities.

    Nodes agree if what they sent differs by far less than it says, and by about as much as the codec's own error.
    """

    said: float = 0.0
    apart: float = 0.0
    noise: float = 0.0

    def add(self, residuals: Reals, variance: Reals, weights: Reals) -> None:
        """Take a block: residuals to the prior and their variance [K, rows, V], combined probabilities [rows, V]."""
        if len(residuals) > 1:
            self.said += float(np.einsum("kij,ij->", np.square(residuals), weights) / len(residuals))
            self.apart += float((residuals.var(axis=0, ddof=1) * weights).sum())
            self.noise += float(np.einsum("kij,ij->", variance, weights) / len(residuals))

    @property
    def reached(self) -> bool:
        """Return whether the nodes agree."""
        return self.apart < min(0.1 * self.said, 2 * self.noise)
