"""How far a student is from what it is distilled to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.numerics import log_softmax, split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fpld.rules.target import Target
    from fpld.students.base import Student

_PREDICTED = 1 << 20  # coordinates that a student predicts at a time
_MOST = 1 << 25  # coordinates that are looked at, of sequences spread evenly: of a large vocabulary some will do
_BLOCK = 1 << 15  # coordinates that are worked on at a time: what is computed from them stays in the cache


def divergence(
    student: Student, sequences: NDArray[np.integer[Any]], target: Target, reference: Student | None = None
) -> float:
    """Return how far a student is from its target, a mean over the contexts in nats; less is better.

    For a dense target: KL(target || student), at least 0. For a relative one: the cross entropy of the student to the
    target less that of the reference, sum_v t_v (log q_ref,v - log q_v): 0 for the reference itself, negative for a
    student that has learnt, positive for one that is worse than before. Nothing of size m x V is held, and of a large
    probe set only as many sequences are looked at as have 2^25 coordinates.
    """
    width = max(1, _PREDICTED // target.vocab)
    length = sequences.shape[1]
    chosen = np.arange(len(sequences))[:: -(-target.size // _MOST)]
    sequences, asked = sequences[chosen], (chosen[:, None] * length + np.arange(length)).ravel()
    blocks = student.logit_blocks(sequences, rows=width)
    others = reference.logit_blocks(sequences, rows=width) if target.relative and reference is not None else None
    total, start = 0.0, 0
    for block in blocks:
        other = None if others is None else next(others)
        for part in split(len(block), target.vocab, _BLOCK):
            inside = slice(part.start, part.stop)
            contexts = asked[start + part.start : start + part.stop]
            t, log_p = target.rows(contexts, None if other is None else other[inside])
            total += float((t * (log_p - log_softmax(block[inside]))).sum(dtype=np.float64))
        start += len(block)
    return total / start
