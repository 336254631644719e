"""Probabilities, up to a factor for each context: the prior's from its integers, a node's own from its logits.

The exponential is our own: simple operations on float32, in one loop that vectorises, and alike on all machines.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.prior import EIGHTHS
from fpld.codecs.samples.grid import LEVELS
from fpld.codecs.samples.listing import check_range
from fpld.compiled import available, bare

if TYPE_CHECKING:
    from fpld.codecs.prior import Eighths

    Floats32 = np.ndarray[Any, np.dtype[np.float32]]

TABLE = np.exp(np.arange(LEVELS) / -EIGHTHS).astype(np.float32)  # by level

_LEAST = np.float32(-87.0)  # what is below has a probability of nothing
_LOG2E, _ROUND = np.float32(1 / math.log(2)), np.float32(3 << 22)  # a float32 that large has no fraction
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that its product with an integer is exact
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / math.factorial(k)) for k in range(2, 7))
_ONE, _MANTISSA = np.float32(1), np.int32(23)
SUMS = 64  # sums side by side


def room_for(vocab: int) -> Floats32:
    """Return room for the numbers of a context, with zeros up to a whole number of them."""
    return np.zeros(-(-vocab // SUMS) * SUMS, np.float32)


def prior_chances(prior: Eighths) -> Floats32:
    """Return the prior's probabilities: exp of its integers, with sum one in each context."""
    totals = prior_totals(prior)
    chances: Floats32 = TABLE[-prior]
    chances *= _ONE / totals[:, None]
    return chances


def prior_totals(prior: Eighths) -> Floats32:
    """Return the sum of what the integers stand for, in each context; refuse what is no prior."""
    check_range(prior)
    totals = np.empty(len(prior), np.float32)
    _prior_totals(prior, TABLE, room_for(prior.shape[1]), np.empty(SUMS, np.float32), totals)
    return totals


def total_reference(values: Any, lanes: Any) -> Any:
    """Return the sum of values in room for a context. NumPy's version of `total`."""
    lanes[:] = 0
    for part in values.reshape(-1, SUMS):
        lanes += part
    return np.add.accumulate(lanes)[-1]


def exponentials_reference(logits: Any, top: Any, out: Any) -> None:
    """Set `out` to exp(logits - top). NumPy's version of `exponentials`."""
    x = np.maximum((logits - top).astype(np.float32), _LEAST)
    rounded = x * _LOG2E + _ROUND
    n = rounded - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE
    out[: x.size] = (p.view(np.int32) + (rounded.view(np.int32) << _MANTISSA)).view(np.float32)


if available():

    @bare
    def exponentials(logits: Any, top: Any, out: Any) -> None:
        """Set `out` to exp(logits - top)."""
        for v in range(logits.size):
            x = max(np.float32(logits[v] - top), _LEAST)
            rounded = np.float32(x * _LOG2E + _ROUND)
            n = np.float32(rounded - _ROUND)
            r = (x - n * _LN2_HIGH) - n * _LN2_LOW
            p = np.float32(((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE)
            out[v] = np.int32(p.view(np.int32) + np.int32(rounded.view(np.int32) << _MANTISSA)).view(np.float32)

    @bare
    def total(values: Any, lanes: Any) -> Any:
        """Return the sum of values in room for a context: in lanes, whose order is the same on all machines."""
        for j in range(SUMS):
            lanes[j] = 0
        for start in range(0, values.size, SUMS):
            for j in range(SUMS):
                lanes[j] += values[np.uint64(start + j)]
        found = lanes[0]
        for j in range(1, SUMS):
            found += lanes[j]
        return found

    @bare
    def _look_up(prior: Any, table: Any, out: Any) -> None:
        for v in range(prior.size):
            out[v] = table[np.uint64(-prior[v])]  # no sign: vectorises

    @bare
    def _prior_totals(prior: Any, table: Any, room: Any, lanes: Any, totals: Any) -> None:
        for row in range(totals.size):
            _look_up(prior[row], table, room)
            totals[row] = total(room, lanes)

else:
    exponentials, total = exponentials_reference, total_reference

    def _prior_totals(prior: Any, table: Any, room: Any, lanes: Any, totals: Any) -> None:
        for row, own in enumerate(prior):
            room[: own.size] = table[-own]
            totals[row] = total(room, lanes)
