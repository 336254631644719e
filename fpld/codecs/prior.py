"""The prior: a prediction of the logits that both ends hold exactly, as log-probabilities in eighths of a nat.

Whatever a decoder needs of it goes by these integers, so a table with a place for each of them says it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError

if TYPE_CHECKING:
    from fpld.types import Plan, Reals

EIGHTHS = 8  # of a nat
LEAST_PRIOR = -EIGHTHS * 40
LOG_PRIOR = -np.arange(-LEAST_PRIOR + 1) / EIGHTHS  # what each integer -i stands for
CLASSES = 48  # of tokens, half a nat of the prior each: the coder learns each by itself
CLASS_OF = np.minimum(np.arange(-LEAST_PRIOR + 1) // (EIGHTHS // 2), CLASSES - 1).astype(np.uint8)

Prior = np.ndarray[Any, np.dtype[np.int16]]


def make_prior(logits: Reals) -> Prior:
    """Turn a model's logits [m, V] into a prior.

    >>> make_prior(np.log(np.array([[0.5, 0.25, 0.25]]))).tolist()
    [[-6, -11, -11]]
    """
    values = np.asarray(logits, np.float64)
    values = values - values.max(axis=-1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    prior: Prior = np.clip(np.rint(EIGHTHS * values), LEAST_PRIOR, 0).astype(np.int16)
    return prior


def checked(plan: Plan) -> Prior | None:
    """Return the plan's prior, if it has one, and only a sound one."""
    prior = plan.prior
    if prior is None:
        return None
    if prior.shape != plan.shape or prior.dtype != np.int16:
        raise InputError(f"prior must be int16 of shape {plan.shape}, got {prior.dtype} {prior.shape}")
    if prior.max() > 0 or prior.min() < LEAST_PRIOR:
        raise InputError(f"prior must lie in {LEAST_PRIOR}..0, eighths of a nat")
    return prior
