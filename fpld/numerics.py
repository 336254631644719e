"""Numerics that many modules share: softmax and its relatives, centring, cutting contexts into blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.types import Array, Floats, Reals

BLOCK = 1 << 20  # the default size of a block, in coordinates


def softmax(logits: Reals, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the probabilities of each context (the last axis)."""
    shifted = np.exp(np.asarray(logits, dtype) - np.max(logits, axis=-1, keepdims=True))
    shifted /= shifted.sum(axis=-1, keepdims=True)
    return np.asarray(shifted)


def log_sum_exp(logits: Reals) -> Array:
    """Return log(sum(exp(row))) of each context, without overflow, in the precision of the logits."""
    top = logits.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(logits - top).sum(axis=-1)))


def log_softmax(logits: Reals) -> Array:
    """Return the log-probabilities of each context, in the precision of the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def kl(logits: Reals, error: Reals) -> Floats:
    """Return KL(softmax(l) || softmax(l + e)) = log E_p[exp(e_Y)] - p.e of each context, exactly (Appendix B.2).

    Computed around the mean of e under p, so that it keeps its digits when the error is tiny.

    >>> float(kl(np.zeros(4), np.full(4, 7.0)))  # softmax ignores a constant
    0.0
    """
    p = softmax(logits)
    e = np.asarray(error, np.float64)
    x = e - (p * e).sum(axis=-1, keepdims=True)
    top = np.maximum(x.max(axis=-1, keepdims=True), 0.0)
    # log E[e^x] = log1p(E[e^x - 1 - x]) as E[x] = 0; beyond 1, the usual shift by the largest.
    small = np.log1p((p * (np.expm1(np.minimum(x, 1.0)) - np.minimum(x, 1.0))).sum(axis=-1))
    large = top[..., 0] + np.log((p * np.exp(x - top)).sum(axis=-1))
    result: Floats = np.where(top[..., 0] <= 1.0, small, large)
    return result


def centre(logits: Reals) -> Reals:
    """Subtract the mean of each context's logits: softmax ignores it, but a clip does not.

    >>> centre(np.array([[10.0, 12.0]])).tolist()
    [[-1.0, 1.0]]
    """
    centred: Reals = logits - logits.mean(axis=-1, keepdims=True)
    return centred


def split(contexts: int, width: int, size: int = BLOCK) -> list[range]:
    """Cut contexts of `width` coordinates into blocks of at most `size` coordinates, or of one context.

    >>> split(5, width=10, size=20)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    stride = max(size // width, 1)
    return [range(start, min(start + stride, contexts)) for start in range(0, contexts, stride)]
