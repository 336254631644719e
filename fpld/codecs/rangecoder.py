"""An adaptive binary range coder for small integers, as numba kernels: exact, in integers, bounds checked.

The coder is a carry-propagating range coder with a 32-bit range, as in LZMA. A symbol q is a zero flag, a sign, the
exponent of |q| in unary, and its mantissa (two adaptive bits, the rest raw). Each adaptive bit has two estimates of its
probability, one that learns fast and one that learns slowly; they are averaged. The models are chosen by the symbol's
class, which both ends know.

`State` arrays hold everything between two calls, so that a decoder goes on where it stopped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from fpld.codecs.predictive import CLASSES, FLUSH

EXPONENTS = 20
LARGEST = (1 << EXPONENTS) - 1
_SCALE = 22  # bits of a probability's estimate
_FAST, _SLOW = 4, 7
# Places in the table of models: flags and signs by class, exponents by class and step, mantissas by exponent.
_SIGN = CLASSES
_EXPONENT = 2 * CLASSES
_MANTISSA = _EXPONENT + CLASSES * EXPONENTS
_MODELS = _MANTISSA + EXPONENTS * 3

Models = np.ndarray[Any, np.dtype[np.uint32]]


def new_models() -> Models:
    """Make models that expect zeros, and small values where they are not."""
    models = np.empty((_MODELS, 2), np.uint32)
    models[:] = 1 << (_SCALE - 1)
    models[:CLASSES] = int(0.98 * (1 << _SCALE))
    models[_EXPONENT:_MANTISSA] = int(0.7 * (1 << _SCALE))
    return models


@njit(cache=True, nogil=True, inline="always")
def _probability(models: Models, i: int) -> np.uint64:
    p = (models[i, 0] + models[i, 1]) >> np.uint32(_SCALE + 1 - 16)
    return np.uint64(min(max(p, np.uint32(1)), np.uint32(65535)))


@njit(cache=True, nogil=True, inline="always")
def _learn(models: Models, i: int, bit: int) -> None:
    for j, shift in ((0, _FAST), (1, _SLOW)):
        if bit:
            models[i, j] -= models[i, j] >> np.uint32(shift)
        else:
            models[i, j] += (np.uint32(1 << _SCALE) - models[i, j]) >> np.uint32(shift)


@njit(cache=True, nogil=True, inline="always")
def _shift_low(out: Any, low: Any, cache: Any, pending: int, position: int) -> tuple[Any, Any, int, int]:
    """Write the byte that can no longer change; hold back those that a carry may still reach."""
    if low < np.uint64(0xFF000000) or low >= np.uint64(1 << 32):
        carry = low >> np.uint64(32)
        byte = cache
        while pending > 0:
            if position < out.size:
                out[position] = np.uint8((byte + carry) & np.uint64(0xFF))
            position += 1
            byte = np.uint64(0xFF)
            pending -= 1
        cache = (low >> np.uint64(24)) & np.uint64(0xFF)
    return (low & np.uint64(0x00FFFFFF)) << np.uint64(8), cache, pending + 1, position


@njit(cache=True, nogil=True)
def _bits(size: int, negative: bool, c: int, models_of: Any, bit_of: Any) -> int:
    """Write a symbol as (model, bit) pairs, model -1 for a raw bit; give how many there are."""
    models_of[0], bit_of[0] = c, 1 if size else 0
    if size == 0:
        return 1
    models_of[1], bit_of[1] = _SIGN + c, 1 if negative else 0
    n, exponent = 2, 0
    while size >> (exponent + 1):
        models_of[n], bit_of[n] = _EXPONENT + c * EXPONENTS + exponent, 1
        n += 1
        exponent += 1
    if exponent < EXPONENTS - 1:
        models_of[n], bit_of[n] = _EXPONENT + c * EXPONENTS + exponent, 0
        n += 1
    node = 0
    for b in range(exponent - 1, -1, -1):
        bit = (size >> b) & 1
        models_of[n], bit_of[n] = -1, bit
        if exponent - 1 - b < 2:
            models_of[n] = _MANTISSA + exponent * 3 + node
            node = 1 + bit
        n += 1
    return n


@njit(cache=True, nogil=True)
def encode(y: Any, classes: Any, inverse: float, rounding: float, models: Models, out: Any) -> int:
    """Quantize and code y [n] with models by class; give the length in bytes, more than out's if it does not fit."""
    low, width, cache = np.uint64(0), np.uint64(0xFFFFFFFF), np.uint64(0)
    pending, position = 1, 0
    models_of, bit_of = np.empty(64, np.int64), np.empty(64, np.int64)
    for k in range(y.size):
        size = min(np.int64(abs(y[k]) * inverse + rounding), LARGEST)
        for j in range(_bits(size, y[k] < 0, np.int64(classes[k]), models_of, bit_of)):
            i, bit = models_of[j], bit_of[j]
            if i < 0:
                bound = width >> np.uint64(1)
            else:
                bound = (width >> np.uint64(16)) * _probability(models, i)
                _learn(models, i, bit)
            if bit:
                low += bound
                width -= bound
            else:
                width = bound
            while width < np.uint64(1 << 24):
                width = (width << np.uint64(8)) & np.uint64(0xFFFFFFFF)
                low, cache, pending, position = _shift_low(out, low, cache, pending, position)
        if position > out.size:
            return position + FLUSH  # too long already: the rest does not matter
    for _ in range(FLUSH):
        low, cache, pending, position = _shift_low(out, low, cache, pending, position)
    return position


# Decoder's state: code, range, position.
def new_decoder() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Make the state of a decoder that has read nothing."""
    return np.zeros(3, np.uint64)


@njit(cache=True, nogil=True, inline="always")
def _get(data: Any, code: Any, width: Any, position: int, bound: Any) -> tuple[int, Any, Any, int]:
    """Read one bit; past the end come zeros, and the position tells."""
    if code < bound:
        width, bit = bound, 0
    else:
        code, width, bit = code - bound, width - bound, 1
    while width < np.uint64(1 << 24):
        width = (width << np.uint64(8)) & np.uint64(0xFFFFFFFF)
        code = (code << np.uint64(8)) & np.uint64(0xFFFFFFFF)
        if position < data.size:
            code |= np.uint64(data[position])
        position += 1
    return bit, code, width, position


@njit(cache=True, nogil=True, inline="always")
def _get_model(data: Any, code: Any, width: Any, position: int, models: Models, i: int) -> tuple[int, Any, Any, int]:
    bound = (width >> np.uint64(16)) * _probability(models, i)
    bit, code, width, position = _get(data, code, width, position, bound)
    _learn(models, i, bit)
    return bit, code, width, position


@njit(cache=True, nogil=True)
def decode(data: Any, state: Any, classes: Any, models: Models, out: Any) -> bool:
    """Decode the next classes.size symbols into out; say whether the data sufficed so far."""
    code, width, position = state[0], state[1], np.int64(state[2])
    if width == 0:
        width = np.uint64(0xFFFFFFFF)
        for _ in range(FLUSH):
            code = (code << np.uint64(8)) & np.uint64(0xFFFFFFFF)
            if position < data.size:
                code |= np.uint64(data[position])
            position += 1
    for k in range(out.size):
        c = np.int64(classes[k])
        bit, code, width, position = _get_model(data, code, width, position, models, c)
        if not bit:
            out[k] = 0
            continue
        negative, code, width, position = _get_model(data, code, width, position, models, _SIGN + c)
        exponent = 0
        while exponent < EXPONENTS - 1:
            i = _EXPONENT + c * EXPONENTS + exponent
            bit, code, width, position = _get_model(data, code, width, position, models, i)
            if not bit:
                break
            exponent += 1
        size, node = 1, 0
        for b in range(exponent):
            if b < 2:
                i = _MANTISSA + exponent * 3 + node
                bit, code, width, position = _get_model(data, code, width, position, models, i)
                node = 1 + bit
            else:
                bit, code, width, position = _get(data, code, width, position, width >> np.uint64(1))
            size = 2 * size + bit
        out[k] = -size if negative else size
        if position > data.size:
            return False
    state[0], state[1], state[2] = code, width, np.uint64(position)
    return position <= data.size


@njit(cache=True, nogil=True)
def statistics(y: Any, classes: Any, inverse: float, rounding: float, per_group: int, out: Any) -> None:
    """Add to out [G, 3, 3] for zeros, ones and larger symbols: count (or weight), sum and sum of squares.

    For symbols that are not zero: of |y| / step - |q|. For zeros: of y / step, which the caller weighs.
    """
    for k in range(y.size):
        scaled = abs(y[k]) * inverse
        size = min(int(scaled + rounding), LARGEST)
        g = int(classes[k]) // per_group
        if size == 0:
            value = y[k] * inverse
            b = 0
        else:
            value = scaled - size
            b = 1 if size == 1 else 2
        out[g, b, 0] += 1.0
        out[g, b, 1] += value
        out[g, b, 2] += value * value
