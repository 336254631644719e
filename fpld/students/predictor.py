"""The predictions of a student that no longer changes, on sequences that do not change: a prior, or what to learn from.

Both are asked for again and again. A kind of student that can keep something dear between two questions has a
predictor of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from fpld.students.base import Student


class Predictor:
    """Predict sequences [S, T], some at a time, and keep nothing."""

    def __init__(self, student: Student, sequences: np.ndarray) -> None:
        self.student, self.sequences = student, sequences

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits [B*T, V] of some sequences, by their numbers [B]."""
        return self.student.logits(self.sequences[rows])
