"""An adaptive binary range coder: one function for both directions, so that they cannot differ.

A range coder narrows an interval by each decision, in proportion to the decision's probability, and sends the leading
bytes of the interval as they become certain. This one differs from the textbook (Martin, *Range encoding*, 1979) in
four points:

- Writing and reading are the same function. A reader ignores the value that it is passed and returns the one it reads.
- The interval has 48 bits, and is widened by whole bytes while it is below 2^40. A carry goes back into the bytes that
  were written, which are all at hand, so no byte is held back.
- Each decision has an adaptive *model*: a probability of a one in 22 bits, and below it an 8-bit count of how often the
  model was used. The rate of adaptation is 1 / (count + 3/2) at first, and constant after 250 uses.
- A code ends with 16 fixed bits, the *end marker*: one that was cut or changed hardly ever has them. Then it takes the
  fewest bytes that lie in its interval, without trailing zeros. A reader accepts exactly these, so that each sequence
  of decisions has one code.

Numbers are binarised as an Elias gamma code whose unary part, and whose first bit after it, are adaptive.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.kernels import borrowing_kernel, inlined

if TYPE_CHECKING:
    from fpld.types import Array

# The places of a coder's state: start and width of the interval, how far into it a reader's code lies, bytes written or
# read so far, whether the coder reads, and whether a writer ran out of room.
LOW, RANGE, AHEAD, AT, READS, FULL = range(6)

# The layout of a model: a probability in 2^-22, whose upper 16 bits are used for coding, above a count of uses.
PROBABILITY_BITS = 22
COUNT_BITS = 8
_CODED_BITS = 16
_MIN_PROBABILITY = 24  # in 2^-16: no decision is ever certain
MAX_COUNT = 250
RATES = np.minimum((1 << 17) // (2 * np.arange(MAX_COUNT + 1) + 3), 1 << 15)  # 1 / (count + 3/2), in 2^-16

_CODE_BYTES = 6
_WHOLE = 1 << (8 * _CODE_BYTES)
_TOP = _WHOLE >> 8
_TOP_SHIFT = 8 * (_CODE_BYTES - 1)

_END_MARKER = 0xF1D5
_END_MARKER_BITS = 16


class Coder(NamedTuple):
    """Hold what the kernels of one direction share: the state, the bytes of the code and the models.

    `state` is int64 [6], with the places that are listed above; `data` is uint8; `models` is int32.
    """

    state: Array
    data: Array
    models: Array


def writer(capacity: int, models: Array) -> Coder:
    """Return a coder that writes up to `capacity` bytes."""
    state = np.zeros(6, np.int64)
    state[RANGE] = _WHOLE
    return Coder(state, np.empty(capacity, np.uint8), models)


def reader(code: Array, models: Array) -> Coder:
    """Return a coder that reads a code, from `as_code`."""
    state = np.zeros(6, np.int64)
    state[RANGE] = _WHOLE
    state[AHEAD] = int.from_bytes(code[:_CODE_BYTES].tobytes().ljust(_CODE_BYTES, b"\0"), "big")
    state[AT] = _CODE_BYTES
    state[READS] = 1
    return Coder(state, code, models)


def as_code(payload: bytes | memoryview) -> Array:
    """Return a payload's memory as an array, without a copy, that has the type of a writer's buffer.

    The interface of the array is forged: it says that the memory may be written to. numba compiles a kernel once for
    writable and once for read-only arrays, and one that also writes does not compile for the latter. A reader never
    writes, so a single compiled kernel serves both directions and payloads need not be copied.
    """
    array = np.frombuffer(payload, np.uint8)
    address, _ = array.__array_interface__["data"]
    forged = {**array.__array_interface__, "data": (address, False)}
    # The owner keeps the payload's memory alive for as long as the result.
    return np.asarray(SimpleNamespace(__array_interface__=forged, owner=array))


@inlined
def _carry(coder: Any) -> None:
    """Add one to the last byte that was written, and to those before it as long as they overflow."""
    data = coder.data
    k = coder.state[AT] - 1
    while k >= 0 and data[k] == 255:
        data[k] = 0
        k -= 1
    if k >= 0:
        data[k] += 1


@inlined
def _put_byte(coder: Any) -> None:
    """Write the uppermost byte of the interval's start."""
    state = coder.state
    if state[LOW] >= _WHOLE:
        _carry(coder)
        state[LOW] -= _WHOLE
    if state[AT] < coder.data.size:
        coder.data[state[AT]] = state[LOW] >> _TOP_SHIFT
        state[AT] += 1
    else:
        state[FULL] = 1
    state[LOW] = (state[LOW] & (_TOP - 1)) << 8


@inlined
def code_decision(coder: Any, probability: Any, value: Any) -> Any:
    """Write or read a decision whose `probability` of a one is in 2^-16; return it."""
    state = coder.state
    data = coder.data
    share = (state[RANGE] >> _CODED_BITS) * probability
    if state[READS]:
        value = 1 if state[AHEAD] < share else 0
    if value:
        state[RANGE] = share
    else:
        state[RANGE] -= share
        state[LOW] += share
        state[AHEAD] -= share
    while state[RANGE] < _TOP:
        state[RANGE] <<= 8
        if state[READS]:
            at = state[AT]
            state[AHEAD] = state[AHEAD] << 8 | (np.int64(data[at]) if at < data.size else 0)
            state[AT] = at + 1
            state[LOW] = (state[LOW] & (_TOP - 1)) << 8
        else:
            _put_byte(coder)
    return value


@inlined
def code_bit(coder: Any, model: Any, value: Any) -> Any:
    """Code a decision with an adaptive model, and adapt it; return the decision."""
    models = coder.models
    packed = np.int64(models[model])
    learnt = packed >> COUNT_BITS
    count = packed & ((1 << COUNT_BITS) - 1)
    used = learnt >> (PROBABILITY_BITS - _CODED_BITS)
    value = code_decision(coder, min(max(used, _MIN_PROBABILITY), (1 << _CODED_BITS) - _MIN_PROBABILITY), value)
    rate = RATES[count]
    if value:
        learnt += ((1 << PROBABILITY_BITS) - learnt) * rate >> 16
    else:
        learnt -= learnt * rate >> 16
    models[model] = learnt << COUNT_BITS | min(count + 1, MAX_COUNT)
    return value


@borrowing_kernel
def code_raw_bits(coder: Any, count: Any, value: Any) -> Any:
    """Code the lowest `count` bits of a number with equal probabilities; return them."""
    bits = 0
    for k in range(count - 1, -1, -1):
        bits = bits << 1 | code_decision(coder, 1 << (_CODED_BITS - 1), (value >> k) & 1)
    return bits


@borrowing_kernel
def code_number(coder: Any, model: Any, octaves: Any, value: Any) -> Any:
    """Code a number from 0 to 2^octaves - 2; return it.

    The octave of value + 1 is coded in unary, with the models from `model` on. The first bit below it has a model of
    the octave, from `model + octaves` on; the other bits are raw.
    """
    octave = 0
    while octave < octaves - 1 and code_bit(coder, model + octave, 1 if (value + 1) >> (octave + 1) else 0):
        octave += 1
    successor = 1
    if octave > 0:
        second = code_bit(coder, model + octaves + octave, ((value + 1) >> (octave - 1)) & 1)
        successor = (2 | second) << (octave - 1) | code_raw_bits(coder, octave - 1, value + 1)
    return successor - 1


@borrowing_kernel
def _shortest_code(state: Any) -> Any:
    """Return the number in the interval that has the fewest bytes before zeros, and how many bytes these are."""
    for count in range(_CODE_BYTES + 1):
        mask = (1 << (8 * (_CODE_BYTES - count))) - 1
        code = (state[LOW] + mask) & ~mask
        if code < state[LOW] + state[RANGE]:
            break
    return code, count


@borrowing_kernel
def finish(coder: Any) -> Any:
    """Write the end marker and the end of the code; return the length in bytes, -1 if there was no room."""
    state = coder.state
    code_raw_bits(coder, _END_MARKER_BITS, _END_MARKER)
    code, count = _shortest_code(state)
    state[LOW] = code
    if code >= _WHOLE:
        _carry(coder)
        state[LOW] -= _WHOLE
    for _ in range(count):
        _put_byte(coder)
    if state[FULL]:
        return -1
    while state[AT] > 0 and coder.data[state[AT] - 1] == 0:
        state[AT] -= 1
    return state[AT]


@borrowing_kernel
def at_end(coder: Any) -> Any:
    """Read the end marker; return whether it is there, and the code ends after it as a writer ends it."""
    state = coder.state
    data = coder.data
    if code_raw_bits(coder, _END_MARKER_BITS, _END_MARKER) != _END_MARKER:
        return False
    code, _ = _shortest_code(state)
    if data.size and data[data.size - 1] == 0:
        return False
    return state[AT] >= data.size and state[AHEAD] == code - state[LOW]
