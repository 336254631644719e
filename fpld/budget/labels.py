"""Bits for sampled labels: noise falls as 1/bits, not as 4^-bits, so the best split goes by square roots.

With n_i samples (or bits) node i's label has variance w_i / n_i; a sample costs c_i. The problem

    minimize sum_i w_i / n_i   subject to   sum_i c_i n_i = total,   floor_i <= n_i <= cap_i

is convex, and where no limit holds w_i / n_i^2 = level c_i: the cost c_i n_i is proportional to sqrt(w_i c_i). So it is
solved exactly as the other allocations are (`fpld.budget.allocators`), with slope sqrt(w_i c_i) and no offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.budget.allocators import _fill, _vocab, _weights
from fpld.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Floats


def square_root(
    weights: ArrayLike, total: float, vocab: int, caps: ArrayLike | None = None, floors: ArrayLike | None = None
) -> Floats:
    """Allocate bits in proportion to sqrt(w_i), within caps and floors: the allocator of sampled labels.

    >>> square_root([1, 1, 16, 16], total=100, vocab=256).tolist()
    [10.0, 10.0, 40.0, 40.0]
    >>> square_root([1, 1, 16, 16], total=100, vocab=256, caps=[100, 100, 25, 100]).tolist()
    [12.5, 12.5, 25.0, 50.0]
    """
    _vocab(vocab)
    return samples(weights, total, caps=caps, floors=floors)


def samples(
    weights: ArrayLike,
    total: float,
    costs: ArrayLike | None = None,
    caps: ArrayLike | None = None,
    floors: ArrayLike | None = None,
) -> Floats:
    """Return the n_i >= 0 that minimize sum_i w_i / n_i under sum_i c_i n_i = total; caps and floors are of n_i.

    >>> samples([1, 1], total=12, costs=[1, 4]).tolist()  # costs of 4 and 8
    [4.0, 2.0]
    """
    w = _weights(weights)
    c = np.ones_like(w) if costs is None else _check.vector("costs", costs, size=w.size)
    good = np.isfinite(c) & (c > 0)
    if not good.all():
        worst = int((~good).argmax())
        raise InputError(f"costs[{worst}] must be finite and greater than 0, got {c[worst]:g}")
    low, high = (
        None if limit is None else c * _check.vector(name, limit, size=w.size)
        for name, limit in (("floors", floors), ("caps", caps))
    )
    return _fill(np.sqrt(w * c), np.zeros_like(w), total, high, low) / c
