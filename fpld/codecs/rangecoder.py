"""An adaptive binary range coder for sparse small integers, as kernels: exact, in int64, bounds checked.

The coder is a carry-propagating range coder with a 32-bit range, as in LZMA. Symbols come in classes. Of each class
only the symbols that are not zero are coded, each with its sign, its size and the gap to the next one: what is zero
costs no time. Numbers are an exponent and a mantissa whose two upper bits are adaptive and the rest raw. Each adaptive
bit has two estimates of its probability, one that learns fast and one that learns slowly; they are averaged.

Coordinates lie block by block, in a block class by class: `starts` [blocks, CLASSES + 1] says where. State arrays hold
everything between two calls, so that a decoder goes on where it stopped. docs/wire.md has the format.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fpld.codecs import prior
from fpld.compiled import kernel

CLASSES = prior.CLASSES + 1  # the last is for numbers of whole contexts
EXPONENTS = 24
MOST_TAIL = 255
LARGEST = (1 << EXPONENTS) - 1
MOST_COORDINATES = 1 << 32  # a gap has at most 32 bits

_SCALE = 22  # bits of a probability's estimate
_FAST, _SLOW = 4, 7
# Places in the table of models. By class: gap is not zero, its exponent (a binary tree), sign, exponent of the size in
# unary. For all classes: mantissas by exponent.
_TREE = 1
_SIGN = _TREE + 32
_SIZE = _SIGN + 1
_CLASS = _SIZE + EXPONENTS
_GAP_MANTISSA = CLASSES * _CLASS
_SIZE_MANTISSA = _GAP_MANTISSA + 33 * 3
MODELS = _SIZE_MANTISSA + EXPONENTS * 3

# An encoder's state: low, range, the byte that a carry may still reach, how many wait with it, bytes written.
_LOW, _RANGE, _HELD, _WAITING, _WRITTEN = range(5)
# A decoder's: code, range, bytes read. Then each class has its next place that is not zero, and how many it has in all.
_CODE, _READ = 0, 2
_NEXT = 3

Models = np.ndarray[Any, np.dtype[np.int32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


def new_models(table: np.ndarray[Any, np.dtype[np.int32]] | None = None) -> Models:
    """Make models from a table of probabilities in 2^-16; without one expect small symbols and gaps as they come."""
    models = np.empty((MODELS, 2), np.int32)
    if table is not None:
        models[:] = table.astype(np.int32)[:, None] << (_SCALE - 16)
        return models
    models[:] = 1 << (_SCALE - 1)
    for c in range(CLASSES):
        models[c * _CLASS + _SIZE : (c + 1) * _CLASS] = int(0.7 * (1 << _SCALE))
    return models


def table_of(models: Models) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Give the probabilities that models hold, in 2^-16."""
    return np.clip(models[:, 1] >> (_SCALE - 16), 1, 65535).astype(np.int32)


@kernel
def _shift(state: Ints, out: Any) -> None:
    """Write the byte that can no longer change; hold back those that a carry may still reach."""
    low = state[_LOW]
    if low < 0xFF000000 or low >= 1 << 32:
        carry = low >> 32
        byte = state[_HELD]
        while state[_WAITING] > 0:
            if state[_WRITTEN] < out.size:
                out[state[_WRITTEN]] = (byte + carry) & 0xFF
            state[_WRITTEN] += 1
            byte = 0xFF
            state[_WAITING] -= 1
        state[_HELD] = (low >> 24) & 0xFF
    state[_WAITING] += 1
    state[_LOW] = (low & 0x00FFFFFF) << 8


@kernel
def _learn(models: Models, i: int, bit: int) -> int:
    """Give the probability of 0 in 2^-16, and learn the bit."""
    fast, slow = np.int64(models[i, 0]), np.int64(models[i, 1])
    probability = min(max((fast + slow) >> (_SCALE - 15), 1), 65535)
    if bit:
        models[i, 0] = fast - (fast >> _FAST)
        models[i, 1] = slow - (slow >> _SLOW)
    else:
        models[i, 0] = fast + (((1 << _SCALE) - fast) >> _FAST)
        models[i, 1] = slow + (((1 << _SCALE) - slow) >> _SLOW)
    return probability


@kernel
def _put(state: Ints, out: Any, models: Models, i: int, bit: int) -> None:
    bound = (state[_RANGE] >> 16) * _learn(models, i, bit)
    if bit:
        state[_LOW] += bound
        state[_RANGE] -= bound
    else:
        state[_RANGE] = bound
    while state[_RANGE] < 1 << 24:
        state[_RANGE] <<= 8
        _shift(state, out)


@kernel
def _put_mantissa(state: Ints, out: Any, models: Models, base: int, number: int, exponent: int) -> None:
    """Write the bits of a number below its highest: two adaptive ones, the rest raw, eight at a time."""
    node = 0
    for b in range(exponent - 1, max(exponent - 3, -1), -1):
        bit = (number >> b) & 1
        _put(state, out, models, base + exponent * 3 + node, bit)
        node = 1 + bit
    left = exponent - 2
    while left > 0:
        n = min(left, 8)
        left -= n
        state[_RANGE] >>= n
        state[_LOW] += ((number >> left) & ((1 << n) - 1)) * state[_RANGE]
        while state[_RANGE] < 1 << 24:
            state[_RANGE] <<= 8
            _shift(state, out)


@kernel
def _exponent(number: int) -> int:
    exponent = 0
    while number >> (exponent + 1):
        exponent += 1
    return exponent


@kernel
def _put_gap(state: Ints, out: Any, models: Models, c: int, gap: int) -> None:
    base = c * _CLASS
    if gap == 0:
        _put(state, out, models, base, 0)
        return
    _put(state, out, models, base, 1)
    exponent = _exponent(gap + 1)
    node = 1
    for b in range(4, -1, -1):
        bit = ((exponent - 1) >> b) & 1
        _put(state, out, models, base + _TREE + node, bit)
        node = 2 * node + bit
    _put_mantissa(state, out, models, _GAP_MANTISSA, gap + 1, exponent)


@kernel
def _put_symbol(state: Ints, out: Any, models: Models, c: int, symbol: int) -> None:
    base = c * _CLASS
    _put(state, out, models, base + _SIGN, 1 if symbol < 0 else 0)
    size = abs(symbol)
    exponent = _exponent(size)
    for e in range(exponent):
        _put(state, out, models, base + _SIZE + e, 1)
    if exponent < EXPONENTS - 1:
        _put(state, out, models, base + _SIZE + exponent, 0)
    _put_mantissa(state, out, models, _SIZE_MANTISSA, size, exponent)


@kernel
def quantize(value: float, inverse: float, shift: float, rounding: float) -> int:
    """Give the symbol of a value: in steps, shifted by the dither, rounded away from zero at `1 - rounding`."""
    scaled = value * inverse + shift
    size = min(np.int64(abs(scaled) + rounding), LARGEST)
    return -size if scaled < 0 else size


@kernel
def _seek(
    y: Any, dither: Any, starts: Any, c: int, block: int, i: int, inverse: float, rounding: float, place: Ints
) -> int:
    """Go to the next symbol of a class that is not zero, from coordinate i of a block on; give the gap."""
    gap = 0
    while block < starts.shape[0]:
        stop = starts[block, c + 1]
        first = i
        if dither.size:
            while i < stop and quantize(y[i], inverse, dither[i], rounding) == 0:
                i += 1
        else:
            while i < stop and abs(y[i]) * inverse + rounding < 1.0:
                i += 1
        gap += i - first
        if i < stop:
            break
        block += 1
        if block < starts.shape[0]:
            i = starts[block, c]
    place[0], place[1] = block, i
    return gap


@kernel
def encode(
    y: Any, dither: Any, starts: Any, tails: Any, rows: Any, inverse: float, rounding: float, models: Models, out: Any
) -> int:
    """Quantize and code y; give the length in bytes, more than out's if it does not fit. `trim` makes the code of it.

    `dither` has y's size, or none. `tails` has a number for each context, negative if it is not to be coded, or
    is empty; `rows` [blocks + 1] says which contexts a block holds.
    """
    state = np.zeros(5, np.int64)
    state[_RANGE], state[_WAITING] = 0xFFFFFFFF, 1
    blocks, last = starts.shape[0], CLASSES - 1
    left, place = np.zeros(last, np.int64), np.zeros((last, 2), np.int64)
    before = 0
    for c in range(last):
        for b in range(blocks):
            left[c] += starts[b, c + 1] - starts[b, c]
        place[c, 0] = blocks
        if left[c]:
            gap = _seek(y, dither, starts, c, 0, starts[0, c], inverse, rounding, place[c])
            _put_gap(state, out, models, c, gap)
            left[c] -= gap
    for b in range(blocks):
        for c in range(last):
            while place[c, 0] == b:
                i = place[c, 1]
                shift = dither[i] if dither.size else 0.0
                _put_symbol(state, out, models, c, quantize(y[i], inverse, shift, rounding))
                left[c] -= 1
                gap = _seek(y, dither, starts, c, b, i + 1, inverse, rounding, place[c])
                if left[c]:
                    _put_gap(state, out, models, c, gap)
                    left[c] -= gap
                if state[_WRITTEN] > out.size:
                    return state[_WRITTEN]  # too long already: the rest does not matter
        if tails.size:
            for row in range(rows[b], rows[b + 1]):
                if tails[row] >= 0:
                    before = _put_tail(state, out, models, tails[row], before)
    # End with the roundest number that stands for this code: its last bytes are zeros, which need not be sent.
    for k in range(32, -1, -1):
        end = (state[_LOW] + (1 << k) - 1) >> k << k
        if end < state[_LOW] + state[_RANGE]:
            state[_LOW] = end
            break
    for _ in range(5):
        _shift(state, out)
    return state[_WRITTEN]


@kernel
def _put_tail(state: Ints, out: Any, models: Models, tail: int, before: int) -> int:
    """Code a number of a context by its difference from the one before."""
    if tail == before:
        _put(state, out, models, (CLASSES - 1) * _CLASS, 0)
    else:
        _put(state, out, models, (CLASSES - 1) * _CLASS, 1)
        _put_symbol(state, out, models, CLASSES - 1, tail - before)
    return tail


@kernel
def _fill(data: Any, state: Ints) -> None:
    """Read bytes until the range is wide again; past the end come zeros."""
    while state[_RANGE] < 1 << 24:
        state[_RANGE] <<= 8
        byte = np.int64(data[state[_READ]]) if state[_READ] < data.size else 0
        state[_CODE] = ((state[_CODE] << 8) & 0xFFFFFFFF) | byte
        state[_READ] += 1


@kernel
def _get(data: Any, state: Ints, models: Models, i: int) -> int:
    fast, slow = np.int64(models[i, 0]), np.int64(models[i, 1])
    bound = (state[_RANGE] >> 16) * min(max((fast + slow) >> (_SCALE - 15), 1), 65535)
    bit = 0
    if state[_CODE] < bound:
        state[_RANGE] = bound
    else:
        state[_CODE] -= bound
        state[_RANGE] -= bound
        bit = 1
    _learn(models, i, bit)
    _fill(data, state)
    return bit


@kernel
def _get_mantissa(data: Any, state: Ints, models: Models, base: int, exponent: int) -> int:
    number, node = 1, 0
    for _ in range(min(exponent, 2)):
        bit = _get(data, state, models, base + exponent * 3 + node)
        number = 2 * number + bit
        node = 1 + bit
    left = exponent - 2
    while left > 0:
        n = min(left, 8)
        left -= n
        state[_RANGE] >>= n
        # Bytes that no encoder wrote can point past the last value.
        value = min(state[_CODE] // state[_RANGE], (1 << n) - 1)
        state[_CODE] -= value * state[_RANGE]
        number = (number << n) | value
        _fill(data, state)
    return number


@kernel
def _get_gap(data: Any, state: Ints, models: Models, c: int) -> int:
    base = c * _CLASS
    if not _get(data, state, models, base):
        return 0
    node = 1
    for _ in range(5):
        node = 2 * node + _get(data, state, models, base + _TREE + node)
    return _get_mantissa(data, state, models, _GAP_MANTISSA, node - 31) - 1


@kernel
def _get_symbol(data: Any, state: Ints, models: Models, c: int) -> int:
    base = c * _CLASS
    negative = _get(data, state, models, base + _SIGN)
    exponent = 0
    while exponent < EXPONENTS - 1 and _get(data, state, models, base + _SIZE + exponent):
        exponent += 1
    size = _get_mantissa(data, state, models, _SIZE_MANTISSA, exponent)
    return -size if negative else size


def new_decoder(totals: Ints) -> Ints:
    """Make the state of a decoder that has read nothing, for so many coordinates in each class."""
    state = np.zeros(_NEXT + 3 * CLASSES + 1, np.int64)
    state[_NEXT + 2 * CLASSES : _NEXT + 2 * CLASSES + len(totals)] = totals
    return state


@kernel
def decode(data: Any, state: Ints, starts: Any, models: Models, places: Any, symbols: Any) -> int:
    """Decode the next block: where its symbols that are not zero lie, and what they are; give how many, -1 if unsound.

    `starts` [CLASSES + 1] is the block's; `places` count in its class order.
    """
    last = CLASSES - 1
    following, seen, total = _NEXT, _NEXT + CLASSES, _NEXT + 2 * CLASSES
    if state[_RANGE] == 0:
        state[_RANGE] = 0xFFFFFFFF
        for _ in range(4):
            byte = np.int64(data[state[_READ]]) if state[_READ] < data.size else 0
            state[_CODE] = ((state[_CODE] << 8) & 0xFFFFFFFF) | byte
            state[_READ] += 1
        for c in range(last):
            if state[total + c]:
                state[following + c] = _get_gap(data, state, models, c)
                if state[following + c] > state[total + c]:
                    return -1
    count = 0
    for c in range(last):
        end = state[seen + c] + starts[c + 1] - starts[c]
        while state[following + c] < end:
            places[count] = starts[c] + state[following + c] - state[seen + c]
            symbols[count] = _get_symbol(data, state, models, c)
            count += 1
            state[following + c] += 1
            if state[following + c] < state[total + c]:
                state[following + c] += _get_gap(data, state, models, c)
            if state[following + c] > state[total + c]:
                return -1
        state[seen + c] = end
    return count


@kernel
def decode_tails(data: Any, state: Ints, models: Models, wanted: Any, tails: Any) -> bool:
    """Decode a number for each wanted context, the others stay; say whether the data were sound."""
    before = state.size - 1
    for row in range(wanted.size):
        if wanted[row]:
            if _get(data, state, models, (CLASSES - 1) * _CLASS):
                state[before] += _get_symbol(data, state, models, CLASSES - 1)
            tails[row] = state[before]
            if not 0 <= state[before] <= MOST_TAIL:
                return False
    return True


def trim(out: np.ndarray[Any, np.dtype[np.uint8]], size: int) -> bytes:
    """Cut what an encoder wrote to its code: the first byte is always zero, and zeros at the end go without saying."""
    return out[1:size].tobytes().rstrip(b"\0")


def ended(data: np.ndarray[Any, np.dtype[np.uint8]], state: Ints) -> bool:
    """Say whether a decoder has read all of a code that ends as an encoder would end it."""
    return int(state[_READ]) >= data.size and (data.size == 0 or data[-1] != 0)


@kernel
def arrange(classes: Any, order: Any, starts: Any) -> None:
    """Sort coordinates by class, keeping their order within each: where to find them, and where each class starts."""
    for i in range(classes.size):
        starts[classes[i] + 1] += 1
    for c in range(CLASSES):
        starts[c + 1] += starts[c]
    place = starts.copy()
    for i in range(classes.size):
        c = classes[i]
        order[place[c]] = i
        place[c] += 1
