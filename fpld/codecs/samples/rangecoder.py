"""A binary range coder that learns: one function for both directions, so that they cannot differ.

A decision has a place in `learning`: 22 bits of the probability of a one, and below them 8 that say how often it was
met, since it learns fast at first and slowly in the end. The interval has 48 bits and is widened by whole bytes. A code
ends in the fewest bytes that name its interval, without zeros, and a reader asks for exactly these.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from fpld.compiled import bare, inlined

# A coder's state: the interval's start and width, how far into it a reader's code lies, bytes written or read, whether
# it reads, and whether there was no room.
LOW, RANGE, AHEAD, AT, READS, FULL = range(6)
BITS, MET = 22, 8  # of a probability as it is learnt, of which 16 are used; of how often it was met
_CODED, _WHOLE, _TOP = 16, 1 << 48, 1 << 40
_LEAST = 24  # of 2^16: no decision is taken for sure
_SLOWEST = 250
RATES = np.minimum((1 << 17) // (2 * np.arange(_SLOWEST + 1) + 3), 1 << 15)  # 1 / (n + 3/2) in 2^-16

Array = np.ndarray[Any, np.dtype[Any]]


def writer() -> Array:
    """Return the state of a coder that writes."""
    return np.array([0, _WHOLE, 0, 0, 0, 0], np.int64)


def to_read(payload: bytes | memoryview) -> Array:
    """Return a payload's own memory as the kind of array that a writer fills: kernels are compiled for one kind.

    A reader writes nothing, so memory that is not to be written to needs no copy.
    """
    array = np.frombuffer(payload, np.uint8)
    place = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
    return np.asarray(SimpleNamespace(__array_interface__=place, owner=array))


def reader(data: Array) -> Array:
    """Return the state of a coder that reads."""
    first = int.from_bytes(data[:6].tobytes().ljust(6, b"\0"), "big")
    return np.array([0, _WHOLE, first, 6, 1, 0], np.int64)


@inlined
def _carry(state: Any, data: Any) -> None:
    """Add one to what was written."""
    k = state[AT] - 1
    while k >= 0 and data[k] == 255:
        data[k] = 0
        k -= 1
    if k >= 0:
        data[k] += 1


@inlined
def _put(state: Any, data: Any) -> None:
    """Write the uppermost byte of the interval's start."""
    if state[LOW] >= _WHOLE:
        _carry(state, data)
        state[LOW] -= _WHOLE
    if state[AT] < data.size:
        data[state[AT]] = state[LOW] >> 40
        state[AT] += 1
    else:
        state[FULL] = 1
    state[LOW] = (state[LOW] & (_TOP - 1)) << 8


@inlined
def _decide(state: Any, data: Any, chance: Any, value: Any) -> Any:
    """Write a decision, or read one; `chance` of a one is in 2^-16."""
    share = (state[RANGE] >> _CODED) * chance
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
            _put(state, data)
    return value


@inlined
def bit(state: Any, data: Any, learning: Any, at: Any, value: Any) -> Any:
    """Code a decision with what was learnt at place `at`, and learn from it; return it."""
    record = np.int64(learning[at])
    learnt, met = record >> MET, record & ((1 << MET) - 1)
    value = _decide(state, data, min(max(learnt >> (BITS - _CODED), _LEAST), (1 << _CODED) - _LEAST), value)
    rate = RATES[met]
    if value:
        learnt += ((1 << BITS) - learnt) * rate >> 16
    else:
        learnt -= learnt * rate >> 16
    learning[at] = learnt << MET | min(met + 1, _SLOWEST)
    return value


@bare
def raw(state: Any, data: Any, count: Any, value: Any) -> Any:
    """Code the lowest `count` bits of a number, each as likely as not; return it."""
    found = 0
    for k in range(count - 1, -1, -1):
        found = found << 1 | _decide(state, data, 1 << (_CODED - 1), (value >> k) & 1)
    return found


@bare
def number(state: Any, data: Any, learning: Any, at: Any, octaves: Any, value: Any) -> Any:
    """Code a number from 0 to 2^octaves - 2; return it.

    One more than it has an octave, which is learnt in unary at `at`, and bits below: the first is learnt at
    `at + octaves`, the others are raw.
    """
    octave = 0
    while octave < octaves - 1 and bit(state, data, learning, at + octave, 1 if (value + 1) >> (octave + 1) else 0):
        octave += 1
    found = 1
    if octave > 0:
        half = bit(state, data, learning, at + octaves + octave, ((value + 1) >> (octave - 1)) & 1)
        found = (2 | half) << (octave - 1) | raw(state, data, octave - 1, value + 1)
    return found - 1


@bare
def _last(state: Any) -> Any:
    """Return the number in the interval that has the fewest bytes before zeros, and how many."""
    for count in range(7):
        mask = (1 << (48 - 8 * count)) - 1
        found = (state[LOW] + mask) & ~mask
        if found < state[LOW] + state[RANGE]:
            break
    return found, count


@bare
def finish(state: Any, data: Any) -> Any:
    """Write the end; return the length, -1 if there was no room."""
    found, count = _last(state)
    state[LOW] = found
    if found >= _WHOLE:
        _carry(state, data)
        state[LOW] -= _WHOLE
    for _ in range(count):
        _put(state, data)
    if state[FULL]:
        return -1
    while state[AT] > 0 and data[state[AT] - 1] == 0:
        state[AT] -= 1
    return state[AT]


@bare
def ended(state: Any, data: Any) -> Any:
    """Return whether a reader has read all that was written, and nothing else."""
    found, _ = _last(state)
    if data.size and data[data.size - 1] == 0:
        return False
    return state[AT] >= data.size and state[AHEAD] == found - state[LOW]
