"""A student's logits by ranges of contexts, as a prior asks for them: in order, a few whole sequences at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.pace import Pace

if TYPE_CHECKING:
    from fpld.students import Student

_CHUNK = 1 << 24  # coordinates that are predicted at a time


class Predictions:
    """Return the logits [n, V] of any range of contexts; what was predicted last is kept.

    >>> from fpld.students import NGram, NGramConfig
    >>> student, sequences = NGram(NGramConfig(vocab=8)), np.arange(12).reshape(3, 4) % 8
    >>> bool(np.array_equal(Predictions(student, sequences)(range(3, 6)), student.logits(sequences)[3:6]))
    True
    """

    def __init__(self, student: Student, sequences: np.ndarray[Any, Any]) -> None:
        self._predictor, self._count = student.predictor(sequences), len(sequences)
        self._length = sequences.shape[1]
        self._some = max(_CHUNK // (student.vocab * self._length), 1)  # sequences
        self._chunk, self._logits = -1, np.empty((0, student.vocab), np.float32)
        self._pace = Pace("predicting the probe set", len(sequences), "sequence", tokens=self._length)

    def __call__(self, rows: range) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits of a range of contexts."""
        width = self._some * self._length
        chunks = range(rows.start // width, -(-rows.stop // width))
        parts = []
        for chunk in chunks:
            start = chunk * width
            logits = self._predict(chunk)
            parts.append(logits[max(rows.start - start, 0) : rows.stop - start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _predict(self, chunk: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        if chunk != self._chunk:
            if chunk == 0:  # whoever asks goes from the first to the last, perhaps more than once
                self._pace = self._pace.again()
            some = np.arange(chunk * self._some, min((chunk + 1) * self._some, self._count))
            self._logits = self._predictor.logits(some)
            self._chunk = chunk
            self._pace.add(len(some))
        return self._logits
