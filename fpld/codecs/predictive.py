"""The predictive codec: bits where KL feels them, and only for what the prior does not know.

To second order KL = 1/2 sum_v p_v (d log p_v)^2, so an error matters by the square root of the token's probability.
Both ends hold a prior: log-probabilities in eighths of a nat. With pi the prior's probability and r = log(p / pi) the
node's residual, the codec quantizes

    y = sqrt(pi) r               where the node gives a token less than the prior,
    y = 2 (sqrt(p) - sqrt(pi))   where it gives more,

uniformly, with one step for all tokens and contexts. The two branches meet with the same slope, and in both an error of
y costs about the same KL: this is reverse water-filling over coordinates, and a wrong prior only costs bits. Rare
tokens fall below the step by themselves and cost next to nothing in the entropy coder, whose models go by the prior's
probability. The step is found by bisection so that the payload fills the budget and never exceeds it.

There is no dither here: at a fraction of a bit it costs more than it brings, and nodes that differ by more than a step
have independent errors without it. What is decoded is the mean of what falls into a cell, and the variance that is
reported is the one that the encoder measured; both travel in the payload's head. docs/wire.md has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fpld import _check
from fpld.errors import BudgetError, FrameError, InputError, MissingExtraError
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    import numpy.typing as npt

    from fpld.types import Plan, Reals

FLUSH = 5  # bytes that end the range coder's code
EIGHTHS = 8  # of a nat: the prior's unit
LEAST_PRIOR = -EIGHTHS * 40
_STEPS, _PER_OCTAVE, _OFFSET = 1600, 64, 1344  # steps 2^((n - offset) / 64): from 2^-21 to 2^4
_GROUPS = 12
CLASSES = 48  # of tokens by the prior, half a nat each: each has its own models
_PER_GROUP = CLASSES // _GROUPS
_GROUP = np.dtype([("zero", "i1"), ("one", "i1"), ("more", "i1"), ("v0", "<f2"), ("v1", "<f2")])
_HEAD = np.dtype([("step", "<u2"), ("groups", _GROUP, _GROUPS)])
_SAMPLE = 1 << 19  # coordinates that the search for the step looks at first
_BLOCK = 1 << 20

_Prior = np.ndarray[Any, np.dtype[np.int16]]


def _coder() -> ModuleType:
    """Import the range coder when it is first used: it brings numba along."""
    try:
        from fpld.codecs import rangecoder
    except ImportError:
        raise MissingExtraError("the predictive codec", "fast") from None
    return rangecoder


def make_prior(logits: Reals) -> _Prior:
    """Turn a model's logits [m, V] into a prior: log-probabilities in eighths of a nat, small integers.

    >>> make_prior(np.log(np.array([[0.5, 0.25, 0.25]]))).tolist()
    [[-6, -11, -11]]
    """
    values = _log_softmax(np.asarray(logits, np.float64))
    return np.clip(np.rint(EIGHTHS * values), LEAST_PRIOR, 0).astype(np.int16)


def flat_prior(contexts: int, vocab: int) -> _Prior:
    """Give the prior that knows nothing: every token equally likely."""
    return np.full((contexts, vocab), round(-EIGHTHS * float(np.log(vocab))), np.int16)


@dataclass(frozen=True, slots=True)
class PredictiveCodec:
    """Code what a node's distribution adds to the prior of the plan; works from a hundredth of a bit up."""

    code: int = 3
    uses_prior: ClassVar[bool] = True

    def least_bits(self, plan: Plan) -> float:
        """Give the least budget: a hundredth of a bit per coordinate."""
        return plan.vocab / 100

    def encode(self, logits: Reals, plan: Plan) -> bytes:
        """Find the finest step whose payload fits the budget, and code with it."""
        logits = _check.logits(logits, plan.shape)
        if plan.bits < self.least_bits(plan):
            raise BudgetError(f"bits must be at least {self.least_bits(plan):g} per probe context, got {plan.bits:g}")
        prior = _prior(plan)
        room = plan.budget_bytes - _HEAD.itemsize
        if room < FLUSH + 1:
            return b""
        y, classes = _transform(logits, prior).ravel(), _classes(prior).ravel()
        found = _search(y, classes, plan.vocab, room)
        if found is None:
            return b""
        step, code = found
        return _head(y, classes, step).tobytes() + code

    def decode(
        self, payload: bytes | memoryview, plan: Plan, rows: range | None = None, dtype: npt.DTypeLike = np.float32
    ) -> Decoded:
        """Decode a block of contexts; the coder is sequential, so the cost is that of all contexts up to the block."""
        rows = range(plan.contexts) if rows is None else _check.rows(rows, plan.contexts)
        before = range(rows.start)
        after = range(rows.stop, plan.contexts)
        parts = list(self.stream(payload, plan, [before, rows, after], dtype))
        return parts[1]

    def stream(
        self,
        payload: bytes | memoryview,
        plan: Plan,
        blocks: Sequence[range],
        dtype: npt.DTypeLike = np.float32,
    ) -> Iterator[Decoded]:
        """Decode consecutive blocks of contexts, one pass for all; the last one checks that nothing is left over."""
        prior = _prior(plan)
        if len(payload) == 0:
            for rows in blocks:
                values = prior[rows.start : rows.stop].astype(dtype) / EIGHTHS
                yield Decoded(values, np.full_like(values, _UNKNOWN))
            return
        head, data = _read_head(payload, plan)
        state, models = _coder().new_decoder(), _coder().new_models()
        for rows in blocks:
            part = prior[rows.start : rows.stop]
            symbols = np.empty(part.size, np.int32)
            classes = _classes(part)
            if not _coder().decode(data, state, classes.ravel(), models, symbols):
                raise FrameError("payload ends before its last symbol")
            if rows.stop == plan.contexts and (int(state[2]) != data.size or int(state[0]) != 0):
                raise FrameError("payload does not end with its last symbol")
            yield _reconstruct(symbols.reshape(part.shape), part, classes, head, dtype)


_UNKNOWN = 1.0  # the variance that is reported where nothing was sent, in nats^2


def step_size(number: int) -> float:
    """Give the step of a number: 64 to an octave."""
    return float(2.0 ** ((number - _OFFSET) / _PER_OCTAVE))


def _rounding(step: int) -> float:
    """Round down a little where most symbols are zero: a bit saved there is worth more than the distortion."""
    fine = (1152 - step) / (4 * _PER_OCTAVE)  # from steps of 1/8 down to 1/128, gradually: sizes must not jump
    return 0.42 + 0.08 * min(max(fine, 0.0), 1.0)


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _prior(plan: Plan) -> _Prior:
    if plan.prior is None:
        return flat_prior(plan.contexts, plan.vocab)
    if plan.prior.shape != plan.shape or plan.prior.dtype != np.int16:
        raise InputError(f"prior must be int16 of shape {plan.shape}, got {plan.prior.dtype} {plan.prior.shape}")
    if plan.prior.max() > 0 or plan.prior.min() < LEAST_PRIOR:
        raise InputError(f"prior must lie in {LEAST_PRIOR}..0, eighths of a nat")
    return plan.prior


def _classes(prior: _Prior) -> npt.NDArray[np.uint8]:
    """Give the model class of each coordinate: half nats of the prior, capped."""
    return np.minimum(-prior // (EIGHTHS // 2), CLASSES - 1).astype(np.uint8)


def _root(prior: _Prior) -> npt.NDArray[np.float64]:
    """Give sqrt(pi)."""
    return np.exp(prior.astype(np.float64) / (2 * EIGHTHS))


def _transform(logits: Reals, prior: _Prior) -> npt.NDArray[np.float32]:
    """Give y for every coordinate, block by block."""
    y = np.empty(prior.shape, np.float32)
    stride = max(_BLOCK // prior.shape[1], 1)
    for start in range(0, len(prior), stride):
        rows = slice(start, start + stride)
        log_p, root = _log_softmax(np.asarray(logits[rows], np.float64)), _root(prior[rows])
        residual = log_p - prior[rows] / EIGHTHS
        y[rows] = np.where(residual > 0, 2 * (np.exp(log_p / 2) - root), root * residual)
    return y


def _search(
    y: npt.NDArray[np.float32], classes: npt.NDArray[np.uint8], vocab: int, room: int
) -> tuple[int, bytes] | None:
    """Give the number of the finest step whose code fits into `room` bytes, and the code; None if none does."""
    guess, rows, every = None, y.size // vocab, y.size // _SAMPLE
    if every >= 4:  # look at some contexts first: sizes are nearly proportional, so a few full passes are enough
        some_y = np.ascontiguousarray(y.reshape(rows, vocab)[::every]).ravel()
        some_c = np.ascontiguousarray(classes.reshape(rows, vocab)[::every]).ravel()
        share = room * (some_y.size // vocab) // rows
        found = _finest(lambda step: _code(some_y, some_c, step, share), None)
        guess = found[0] if found else _STEPS - 1
    return _finest(lambda step: _code(y, classes, step, room), guess)


def _code(y: npt.NDArray[np.float32], classes: npt.NDArray[np.uint8], step: int, room: int) -> bytes | None:
    """Code with a step; None if it does not fit."""
    out = np.empty(room, np.uint8)
    size = _coder().encode(y, classes, 1 / step_size(step), _rounding(step), _coder().new_models(), out)
    return out[:size].tobytes() if size <= room else None


def _finest(code: Callable[[int], bytes | None], guess: int | None) -> tuple[int, bytes] | None:
    """Give the least step number that has a code, supposing that all above it have one too; start at the guess."""
    low, high, reach = 0, _STEPS - 1, 2
    best, missed, probe = None, False, guess
    while low <= high:
        at = (low + high) // 2 if probe is None else min(max(probe, low), high)
        found = code(at)
        if found is None:
            low, missed = at + 1, True
        else:
            best, high = (at, found), at - 1
        # From a guess go outwards, twice as far each time; once it is enclosed, bisect.
        enclosed = guess is None or (missed and best is not None)
        probe = None if enclosed else at + (reach if found is None else -reach)
        reach *= 2
    return best


def _head(y: npt.NDArray[np.float32], classes: npt.NDArray[np.uint8], step: int) -> np.ndarray[Any, Any]:
    """Measure what lies in the cells: means to decode to, and the variance that is left."""
    size = step_size(step)
    found = np.zeros((_GROUPS, 3, 3))
    _coder().statistics(y, classes, 1 / size, _rounding(step), _PER_GROUP, found)
    zeros = np.zeros((_GROUPS, 3))
    _zero_statistics(y, classes, size, _rounding(step), zeros)
    head = np.zeros((), _HEAD)
    head["step"] = step
    groups = head["groups"]
    count = np.maximum(found[:, :, 0], 1)
    mean = found[:, :, 1] / count
    groups["one"], groups["more"] = (np.clip(np.rint(256 * mean[:, b]), -127, 127) for b in (1, 2))
    weight = np.maximum(zeros[:, 0], 1e-30)
    groups["zero"] = np.clip(np.rint(32 * zeros[:, 1] / weight), -127, 127)
    groups["v0"] = np.clip(zeros[:, 2] / weight - (zeros[:, 1] / weight) ** 2, 0, 6e4)
    both = found[:, 1:, 0].sum(axis=1)
    spread = (found[:, 1:, 2] - found[:, 1:, 0] * mean[:, 1:] ** 2).sum(axis=1)
    groups["v1"] = np.clip(spread / np.maximum(both, 1), 0, 6e4)
    return head


def _zero_statistics(
    y: npt.NDArray[np.float32],
    classes: npt.NDArray[np.uint8],
    size: float,
    rounding: float,
    out: npt.NDArray[np.float64],
) -> None:
    """Add, for the symbols that are zero, sums of pi, pi r and pi r^2 by group: residuals as KL weighs them."""
    for start in range(0, y.size, _BLOCK):
        part, group = y[start : start + _BLOCK].astype(np.float64), classes[start : start + _BLOCK]
        zero = np.abs(part) / size + rounding < 1
        root = np.exp(-(group.astype(np.float64) + 0.5) / 4)  # the class's middle: half nats, half of it for the root
        log_ratio = np.where(part > 0, 2 * np.log1p(np.maximum(part, 0) / (2 * root)), part / root)
        for power in range(3):
            weights = np.where(zero, root**2 * log_ratio**power, 0.0)
            out[:, power] += np.bincount(group // _PER_GROUP, weights=weights, minlength=_GROUPS)


def _read_head(payload: bytes | memoryview, plan: Plan) -> tuple[np.ndarray[Any, Any], npt.NDArray[np.uint8]]:
    if not _HEAD.itemsize < len(payload) <= plan.budget_bytes:
        raise FrameError(f"payload must be 0 or {_HEAD.itemsize + 1} to {plan.budget_bytes} bytes, got {len(payload)}")
    head = np.frombuffer(payload, _HEAD, 1)[0]
    if head["step"] >= _STEPS:
        raise FrameError(f"payload's step number must be below {_STEPS}, got {head['step']}")
    for name in ("v0", "v1"):
        if not (np.isfinite(head["groups"][name]) & (head["groups"][name] >= 0)).all():
            raise FrameError("payload states a variance that is not a finite, non-negative number")
    return head, np.frombuffer(payload, np.uint8, offset=_HEAD.itemsize)


def _reconstruct(
    symbols: npt.NDArray[np.int32],
    prior: _Prior,
    classes: npt.NDArray[np.uint8],
    head: np.ndarray[Any, Any],
    dtype: npt.DTypeLike,
) -> Decoded:
    """Give log-probabilities and their variance from symbols."""
    size, group = step_size(int(head["step"])), classes // _PER_GROUP
    table = head["groups"]
    offset = np.where(np.abs(symbols) == 1, (table["one"] / 256.0)[group], (table["more"] / 256.0)[group])
    y = np.sign(symbols) * (np.abs(symbols) + offset) * size
    root = _root(prior)
    above = np.maximum(y, 0) / 2
    residual = np.where(y > 0, 2 * np.log1p(above / root), y / root)
    zero = symbols == 0
    residual = np.where(zero, (table["zero"] / 32.0)[group], residual)
    variance = np.where(zero, table["v0"][group].astype(np.float64), table["v1"][group] * (size / (root + above)) ** 2)
    return Decoded((prior / EIGHTHS + residual).astype(dtype), np.minimum(variance, 1e30).astype(dtype))
