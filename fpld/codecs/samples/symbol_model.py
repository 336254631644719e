"""The probability model of symbols: which adaptive model codes which decision of a symbol, in either direction.

A candidate's symbol takes up to three kinds of decisions, as in context-adaptive binary arithmetic coding: whether it
is nonzero, its sign, and its size. The first goes by the bins of the candidate's two ratios and by the *activity* of
its probe context: whether the context has had more nonzero symbols so far than expected. An *escape* is a nonzero
symbol of a coordinate that is no candidate. The gaps between escapes are counted through all contexts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.rangecoder import COUNT_BITS, PROBABILITY_BITS, code_bit, code_number
from fpld.codecs.samples.steps import MINUS_BINS, PLUS_BINS, STEPS_PER_OCTAVE
from fpld.kernels import borrowing_kernel, inlined

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.types import Array

_BIN_PAIRS = (PLUS_BINS + 1) * (MINUS_BINS + 1)
_ACTIVITY_LEVELS = 3  # fewer nonzero symbols than expected, about as many, more
SIZE_GROUPS = 12  # octaves of pi / tau that have size models of their own
_SIZE_OCTAVES = 26  # sizes are below 2^25
_GAP_OCTAVES = 58  # gaps are below 2^57

# The first model of each kind of decision. Those of `_EXPECTED` code nothing: they hold the probability of a nonzero
# symbol whatever the activity, from which the expected number of symbols is summed. An escape has one model for its
# sign, then those of its size.
_NONZERO = 0
_EXPECTED = _NONZERO + _BIN_PAIRS * _ACTIVITY_LEVELS
_SIGN = _EXPECTED + _BIN_PAIRS
_SIZE = _SIGN + _BIN_PAIRS
_ESCAPE = _SIZE + 2 * SIZE_GROUPS * 2 * _SIZE_OCTAVES
_GAP = _ESCAPE + 1 + 2 * _SIZE_OCTAVES
MODEL_COUNT = _GAP + 2 * _GAP_OCTAVES
_EXPECTED_RATE = 7  # models of `_EXPECTED` adapt at 2^-7

# Initial probabilities of a positive symbol by plus bin, and of a negative one by minus bin, in 2^-16.
_POSITIVE = (21000, 20000, 18000, 16000, 14500, 12500, 10000, 8000, 5500, 4000, 2500, 1650, 1000, 600, 350, 220, 130)
_NEGATIVE = (42000, 39000, 38000, 36000, 32000, 27000, 20000, 8000, 300, 30)
# As how many uses these count, and what was learnt in an earlier round.
_INITIAL_COUNT = 2
_LEARNT_COUNT = 16
_LEARNT_SHIFT = PROBABILITY_BITS - 16 + COUNT_BITS  # from 16 bits of a probability to its place in a model

# The places of a context's activity: nonzero symbols so far, and how many were expected, in 2^-22.
_ACTUAL = 0
_FORESEEN = 1


def new_activity() -> Array:
    """Return memory for the activity of a context, int64 [2]."""
    return np.zeros(2, np.int64)


def initial_models(learnt: Array | None) -> Array:
    """Return the models before the first decision, [MODEL_COUNT], from the probabilities of an earlier round if any."""
    if learnt is not None:
        trusted: Array = learnt.astype(np.int32) << _LEARNT_SHIFT | _LEARNT_COUNT
        return trusted
    probabilities = np.full(MODEL_COUNT, 1 << 15)
    counts = np.zeros(MODEL_COUNT, np.int64)
    positive = np.array(_POSITIVE)[:, None]
    negative = np.array(_NEGATIVE)[None]
    either = (positive + negative - (positive * negative >> 16)).ravel()
    probabilities[_NONZERO:_EXPECTED] = np.repeat(either, _ACTIVITY_LEVELS)
    probabilities[_EXPECTED:_SIGN] = either
    probabilities[_SIGN:_SIZE] = ((negative << 16) // (positive + negative)).ravel()
    probabilities[_SIZE:_ESCAPE] = 1 << 14
    counts[_NONZERO:_SIZE] = _INITIAL_COUNT
    initial: Array = (probabilities << _LEARNT_SHIFT | counts).astype(np.int32)
    return initial


def learnt_probabilities(models: Array) -> npt.NDArray[np.uint16]:
    """Return the probabilities of the models in 2^-16, none of them zero: `Plan.learnt` of the next round."""
    learnt: npt.NDArray[np.uint16] = np.clip(models >> _LEARNT_SHIFT, 1, (1 << 16) - 1).astype(np.uint16)
    return learnt


@inlined
def reset_activity(activity: Any) -> None:
    """Set the activity to that of a context before its first symbol."""
    activity[_ACTUAL] = 0
    activity[_FORESEEN] = 0


@inlined
def _activity_level(activity: Any) -> Any:
    """Return 0, 1 or 2: the context had fewer than 3/4 of the expected symbols so far, up to 6/4 of them, or more."""
    actual = (activity[_ACTUAL] + 1) << (PROBABILITY_BITS + 2)
    foreseen = activity[_FORESEEN] + (1 << PROBABILITY_BITS)
    if actual < 3 * foreseen:
        return 0
    return 1 if actual <= 6 * foreseen else 2


@inlined
def code_symbol(coder: Any, activity: Any, plus: Any, minus: Any, ratio: Any, value: Any) -> Any:
    """Code a candidate's symbol from its bins and log2(tau / pi), and update the context's activity; return it."""
    models = coder.models
    pair = plus * (MINUS_BINS + 1) + minus
    nonzero = code_bit(coder, _NONZERO + _ACTIVITY_LEVELS * pair + _activity_level(activity), 1 if value else 0)
    expected = np.int64(models[_EXPECTED + pair]) >> COUNT_BITS
    activity[_ACTUAL] += nonzero
    activity[_FORESEEN] += expected
    expected += ((nonzero << PROBABILITY_BITS) - expected) >> _EXPECTED_RATE
    models[_EXPECTED + pair] = expected << COUNT_BITS
    if not nonzero:
        return 0
    negative = code_bit(coder, _SIGN + pair, 1 if value < 0 else 0)
    group = min(max((2 * STEPS_PER_OCTAVE - ratio) >> 8, 0), SIZE_GROUPS - 1)
    model = _SIZE + (2 * group + negative) * 2 * _SIZE_OCTAVES
    size = 1 + code_number(coder, model, _SIZE_OCTAVES, abs(value) - 1)
    return -size if negative else size


@borrowing_kernel
def code_escape(coder: Any, value: Any) -> Any:
    """Code the symbol of an escape; return it."""
    negative = code_bit(coder, _ESCAPE, 1 if value < 0 else 0)
    size = 1 + code_number(coder, _ESCAPE + 1, _SIZE_OCTAVES, abs(value) - 1)
    return -size if negative else size


@borrowing_kernel
def code_gap(coder: Any, value: Any) -> Any:
    """Code how many coordinates lie before the next escape, or before the end; return it."""
    return code_number(coder, _GAP, _GAP_OCTAVES, value)
