"""How good a student is: its loss on held-out text, and its divergence from a target.

The nats of a model are one array for each text: the negative log-probability of every token but the first. Models are
compared window by window on the same tokens, which gives a difference and its standard error.

A model with a tokenizer of its own reads the same bytes as other tokens. Its nats are spread over the bytes of the text
and added up again by the tokens of the federation's student: so all losses of a run are in nats per token of the
student, whatever model they are of, and bits per byte follow from them by one factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.numerics import log_softmax, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from fpld.data.label_space import TokenStrings
    from fpld.students.base import Student
    from fpld.target import Target
    from fpld.types import Arrays, Floats, Tokens

    Nats = Sequence[npt.NDArray[np.floating[Any]]]
    Windows = Sequence[Sequence[float]]

_POSITIONS = ".positions"
_ANSWERS = ".answers"
_PREDICTED_VALUES = 1 << 20  # coordinates that a student predicts at a time
_MAX_VALUES = 1 << 25  # coordinates of a probe set that are evaluated
_SAME_PLACE = 1e-6  # of a token: positions are quotients of whole numbers of bytes
_BLOCK_VALUES = 1 << 15  # coordinates of a block: its intermediate results stay in the cache


class HeldoutText(NamedTuple):
    """A text as a model's tokens [n]; `positions` [n] are where these end in the tokens of the student, if it differs.

    A position of 2.5 is in the middle of the student's third token. Of conversations, `answers` [n] says which tokens
    are learnt, and so count.
    """

    tokens: Tokens
    positions: Floats | None = None
    answers: npt.NDArray[np.uint8] | None = None

    @property
    def counted(self) -> Tokens:
        """Return the tokens that the loss is about: all, or those of answers."""
        return self.tokens if self.answers is None else self.tokens[self.answers.astype(bool)]

    def nats(self, student: Student, length: int) -> npt.NDArray[np.floating[Any]]:
        """Return a model's cross entropy by the tokens of the federation's student, but the first.

        Windows of `length` of the student's tokens see only themselves, or as many bytes in tokens of the model's own.
        """
        if self.answers is not None:
            every = student.token_nats(self.tokens, length)
            counted: npt.NDArray[np.floating[Any]] = every[self.answers[1:].astype(bool)]
            return counted
        if self.positions is None:
            return student.token_nats(self.tokens, length)
        count = round(float(self.positions[-1]))
        width = max(round(length * len(self.tokens) / count), 1)
        longest = student.longest
        nats = student.token_nats(self.tokens, width if longest is None else min(width, longest))
        total = np.concatenate([[0.0], np.cumsum(nats, dtype=np.float64)])
        return np.diff(np.interp(np.arange(1, count + 1), self.positions, total))

    def arrays(self, name: str) -> Arrays:
        """Return the arrays of a file in which the text has this name."""
        beside = {name + _POSITIONS: self.positions, name + _ANSWERS: self.answers}
        return {name: self.tokens} | {key: array for key, array in beside.items() if array is not None}

    @classmethod
    def of(cls, arrays: Arrays, name: str) -> HeldoutText:
        """Return the text of this name from the arrays of a file."""
        return cls(arrays[name], arrays.get(name + _POSITIONS), arrays.get(name + _ANSWERS))

    @classmethod
    def respelled(cls, tokens: Tokens, shared: TokenStrings, own: TokenStrings) -> HeldoutText:
        """Return a text in tokens of the student as the tokens of a model's own."""
        mine = own.tokenizer.encode(shared.tokenizer.decode(tokens))
        theirs = shared.ends(tokens)
        # A character that is cut at the end of the text has other bytes: the two ends are the same place.
        ends = own.ends(mine) * (theirs[-1] / own.ends(mine)[-1])
        positions = np.interp(ends, np.concatenate([[0], theirs]), np.arange(len(tokens) + 1))
        return cls(mine, positions)


def heldout_arrays(texts: Sequence[HeldoutText]) -> Arrays:
    """Return the arrays of a file with texts "0", "1", ..."""
    return {name: array for index, text in enumerate(texts) for name, array in text.arrays(str(index)).items()}


def read_heldout(arrays: Arrays) -> list[HeldoutText]:
    """Return the texts "0", "1", ... from the arrays of a file."""
    count = sum(not name.endswith((_POSITIONS, _ANSWERS)) for name in arrays)
    return [HeldoutText.of(arrays, str(index)) for index in range(count)]


def heldout_losses(student: Student, heldout: Sequence[np.ndarray[Any, Any]], length: int) -> list[float]:
    """Return the loss in nats per token on the held-out text of each node."""
    return mean_losses([student.token_nats(tokens, length) for tokens in heldout])


class LossDifference(NamedTuple):
    """A mean difference in nats per token, and its standard error."""

    mean: float
    error: float | None


def mean_losses(nats: Nats) -> list[float]:
    """Return the loss in nats per token on each text.

    >>> mean_losses([np.array([1.0, 2.0]), np.array([4.0])])
    [1.5, 4.0]
    """
    return [float(np.mean(text, dtype=np.float64)) for text in nats]


def mixture_nats(
    models: Sequence[Nats], shared: Sequence[npt.NDArray[np.integer[Any]]] | None = None
) -> list[npt.NDArray[np.float64]]:
    """Return the nats of the mean of several models' probabilities.

    Parameters
    ----------
    models
        Of each model the nats of the tokens of each text.
    shared
        Where models have tokens of their own: of each text the token counts after which all models have a boundary
        (`shared_boundaries`). The nats of a model are then summed between two boundaries, and the mixture is of the
        probabilities of these chunks. Its nats are spread evenly over the tokens of a chunk.

    >>> np.exp(-mixture_nats([[np.log([2.0])], [np.log([4.0])]])[0]).round(12).tolist()
    [0.375]
    >>> chunks = mixture_nats([[np.log([2.0, 2.0])], [np.log([4.0, 8.0])]], [np.array([1, 3])])
    >>> np.exp(-chunks[0].sum()).round(12).tolist() == (1 / 4 + 1 / 32) / 2
    True
    """
    texts = list(zip(*models, strict=True))
    if shared is None:
        return [-np.log(np.mean([np.exp(-nats.astype(np.float64)) for nats in text], axis=0)) for text in texts]
    return [_mixture_of_chunks(text, ends) for text, ends in zip(texts, shared, strict=True)]


def _mixture_of_chunks(models: Nats, ends: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
    """Mix several models' probabilities of the chunks between boundaries of a text."""
    count = len(models[0])
    # Nobody predicts the first token: entry i is the nats of token i + 1, which ends at the boundary i + 2.
    stops = np.unique(np.append(ends[(ends > 1) & (ends <= count)] - 1, count))
    starts = np.concatenate([[0], stops[:-1]])
    sums = np.array([np.add.reduceat(nats.astype(np.float64), starts) for nats in models])
    # A long chunk may have a probability below the least float.
    mixed = np.log(len(models)) - np.logaddexp.reduce(-sums, axis=0)
    width = stops - starts
    return np.repeat(mixed / width, width)


def shared_boundaries(readings: Sequence[Sequence[HeldoutText]]) -> list[npt.NDArray[np.int64]]:
    """Return, for each text, after how many of the student's tokens all readers of it have a boundary.

    Each reading is the same texts in the tokens of one tokenizer; at least one is that of the student.
    """
    return [_boundaries(texts) for texts in zip(*readings, strict=True)]


def _boundaries(readings: Sequence[HeldoutText]) -> npt.NDArray[np.int64]:
    shared: npt.NDArray[np.int64] | None = None
    for text in readings:
        if text.positions is None:
            ends = np.arange(1, len(text.tokens) + 1)
        else:
            whole = np.rint(text.positions)
            ends = whole[np.abs(text.positions - whole) < _SAME_PLACE].astype(np.int64)
        shared = ends if shared is None else np.intersect1d(shared, ends)
    return np.empty(0, np.int64) if shared is None else shared


def window_losses(nats: Nats, length: int) -> list[list[float]]:
    """Return the loss of each whole window of each text."""
    cut = [text[: len(text) // length * length] for text in nats]
    return [text.reshape(-1, length).mean(axis=1, dtype=np.float64).round(6).tolist() for text in cut]


def loss_difference(theirs: Windows, ours: Windows) -> LossDifference:
    """Return the difference of two models' losses: the mean over texts of the mean over windows.

    The standard error treats each text as a sample of windows, and the texts as fixed.

    >>> loss_difference([[2.0, 4.0], [5.0, 5.0]], [[1.0, 1.0], [3.0, 3.0]])
    LossDifference(mean=2.0, error=0.5)
    """
    pairs = [np.subtract(one, other) for one, other in zip(theirs, ours, strict=True)]
    mean = float(np.mean([np.mean(text) for text in pairs]))
    if any(len(text) < 2 for text in pairs):
        return LossDifference(mean, None)
    variance = sum(float(np.var(text, ddof=1)) / len(text) for text in pairs)
    return LossDifference(mean, variance**0.5 / len(pairs))


def divergence(
    student: Student, sequences: npt.NDArray[np.integer[Any]], target: Target, reference: Student | None = None
) -> float:
    """Return how far a student is from its target, a mean over the contexts in nats; less is better.

    For a dense target: KL(target || student), at least 0. For a relative one: the cross entropy of the student to the
    target less that of the reference, sum_v t_v (log q_ref,v - log q_v): 0 for the reference itself, negative for a
    student that has learnt, positive for one that is worse than before. Nothing of size m x V is held. Of a large
    probe set some sequences are evaluated, spread evenly, with 2^25 coordinates in all.
    """
    width = max(1, _PREDICTED_VALUES // target.vocab)
    length = sequences.shape[1]
    chosen = np.arange(len(sequences))[:: -(-target.size // _MAX_VALUES)]
    sequences = sequences[chosen]
    contexts = (chosen[:, None] * length + np.arange(length)).ravel()
    blocks = student.logit_blocks(sequences, rows=width)
    others = reference.logit_blocks(sequences, rows=width) if target.relative and reference is not None else None
    total = 0.0
    start = 0
    for block in blocks:
        other = None if others is None else next(others)
        for part in split(len(block), target.vocab, _BLOCK_VALUES):
            inside = slice(part.start, part.stop)
            some = contexts[start + part.start : start + part.stop]
            t, log_p = target.rows(some, None if other is None else other[inside])
            total += float((t * (log_p - log_softmax(block[inside]))).sum(dtype=np.float64))
        start += len(block)
    return total / start
