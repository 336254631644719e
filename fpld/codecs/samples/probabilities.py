"""Probabilities up to a factor for each context: the prior's from its integers, a node's from its logits.

The exponential and the order of summation are defined here, in float32 operations, so that results do not depend on the
machine. They differ from the textbook in two points, for the sake of loops that vectorise. exp(x) = 2^n exp(r) takes a
polynomial of degree 6 for exp(r), and adds n to the exponent's bits. A sum has 64 lanes side by side, which are added
up at the end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.prior import EIGHTHS_PER_NAT, LEAST_PRIOR
from fpld.codecs.samples.steps import LEVEL_COUNT
from fpld.errors import InputError
from fpld.kernels import borrowing_kernel, numba_available

if TYPE_CHECKING:
    from fpld.codecs.prior import Eighths
    from fpld.types import Floats32, Plan

LEVEL_PROBABILITY = np.exp(np.arange(LEVEL_COUNT) / -EIGHTHS_PER_NAT).astype(np.float32)  # exp(-level / 8)
SUM_LANES = 64

_MIN_EXPONENT = np.float32(-87.0)  # below it, exp(x) is no normal float32: it is taken for exp(-87)
_LOG2_E = np.float32(1 / math.log(2))
_ROUNDING = np.float32(3 << 22)  # a float32 of this size has no fraction: adding it rounds
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that its product with an integer is exact
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / math.factorial(k)) for k in range(2, 7))
_ONE = np.float32(1)
_MANTISSA_BITS = np.int32(23)


def check_range(prior: Eighths) -> None:
    """Raise `InputError` if an integer of a prior is out of range."""
    if prior.size and (prior.max() > 0 or prior.min() < LEAST_PRIOR):
        raise InputError(f"prior must lie in {LEAST_PRIOR}..0, eighths of a nat, got {prior.min()}..{prior.max()}")


def prior_block(plan: Plan, rows: range) -> Eighths:
    """Return some contexts of the plan's prior, contiguous; their integers are not checked (`check_range`)."""
    if plan.prior is None:
        raise InputError("samples needs a prior: give the plan one, or choose another codec")
    block = np.ascontiguousarray(plan.prior.block(rows))
    if block.dtype != np.int16 or block.shape != (len(rows), plan.vocab):
        raise InputError(
            f"prior must be int16 of shape {(len(rows), plan.vocab)} for {rows}, got {block.dtype} {block.shape}"
        )
    return block


def prior_probabilities(prior: Eighths) -> Floats32:
    """Return the prior's probabilities [n, V]: exp of its integers, normalised in each context."""
    totals = prior_totals(prior)
    probabilities: Floats32 = LEVEL_PROBABILITY[-prior]
    probabilities *= _ONE / totals[:, None]
    return probabilities


def prior_totals(prior: Eighths) -> Floats32:
    """Return the sum of exp of the prior's integers in each context, [n]; raise `InputError` for one out of range."""
    check_range(prior)
    totals = np.empty(len(prior), np.float32)
    buffer = context_buffer(prior.shape[1])
    _prior_totals(prior, LEVEL_PROBABILITY, buffer, np.empty(SUM_LANES, np.float32), totals)
    return totals


def context_buffer(vocab: int) -> Floats32:
    """Return a buffer for one number for each token, padded with zeros to a whole number of lanes."""
    return np.zeros(-(-vocab // SUM_LANES) * SUM_LANES, np.float32)


def lane_sum_reference(values: Any, lanes: Any) -> Any:
    """Sum a context's buffer: the NumPy version of `lane_sum`."""
    lanes[:] = 0
    for part in values.reshape(-1, SUM_LANES):
        lanes += part
    return np.add.accumulate(lanes)[-1]


def exponentials_reference(logits: Any, top: Any, out: Any) -> None:
    """Set `out` to exp(logits - top): the NumPy version of `exponentials`."""
    x = np.maximum((logits - top).astype(np.float32), _MIN_EXPONENT)
    rounded = x * _LOG2_E + _ROUNDING
    n = rounded - _ROUNDING
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE
    out[: x.size] = (p.view(np.int32) + (rounded.view(np.int32) << _MANTISSA_BITS)).view(np.float32)


if numba_available():

    @borrowing_kernel
    def exponentials(logits: Any, top: Any, out: Any) -> None:
        """Set `out` to exp(logits - top)."""
        for v in range(logits.size):
            x = max(np.float32(logits[v] - top), _MIN_EXPONENT)
            rounded = np.float32(x * _LOG2_E + _ROUNDING)
            n = np.float32(rounded - _ROUNDING)
            r = (x - n * _LN2_HIGH) - n * _LN2_LOW
            p = np.float32(((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE)
            out[v] = np.int32(p.view(np.int32) + np.int32(rounded.view(np.int32) << _MANTISSA_BITS)).view(np.float32)

    @borrowing_kernel
    def lane_sum(values: Any, lanes: Any) -> Any:
        """Sum a context's buffer, in lanes whose order is the same on all machines."""
        for j in range(SUM_LANES):
            lanes[j] = 0
        for start in range(0, values.size, SUM_LANES):
            for j in range(SUM_LANES):
                lanes[j] += values[np.uint64(start + j)]
        result = lanes[0]
        for j in range(1, SUM_LANES):
            result += lanes[j]
        return result

    @borrowing_kernel
    def _look_up(prior: Any, table: Any, out: Any) -> None:
        for v in range(prior.size):
            out[v] = table[np.uint64(-prior[v])]  # an index without a sign vectorises

    @borrowing_kernel
    def _prior_totals(prior: Any, table: Any, buffer: Any, lanes: Any, totals: Any) -> None:
        for row in range(totals.size):
            _look_up(prior[row], table, buffer)
            totals[row] = lane_sum(buffer, lanes)

else:
    exponentials = exponentials_reference
    lane_sum = lane_sum_reference

    def _prior_totals(prior: Any, table: Any, buffer: Any, lanes: Any, totals: Any) -> None:
        for row, integers in enumerate(prior):
            buffer[: integers.size] = table[-integers]
            totals[row] = lane_sum(buffer, lanes)
