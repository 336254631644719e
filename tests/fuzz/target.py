"""What a fuzzer is, and how one is run."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Target:
    """A fuzzer: `make` gets a folder to work in, and returns what does one example and says how many things it tried.

    An example ends with nothing or with a typed error that the fuzzer expects; anything else that is raised is a find.
    """

    name: str
    counts: str
    weight: float  # of the time that all have together
    make: Callable[[Path], Callable[[np.random.Generator], int]]


class FoundError(Exception):
    """An example that did what none may."""


def run(target: Target, folder: Path, *, seed: int, examples: int | None = None, seconds: float | None = None) -> int:
    """Run examples 0, 1, 2 ... of a seed, so many or for so long; return how many things were tried."""
    once = target.make(folder)
    tried = 0
    number = 0
    end = None if seconds is None else time.monotonic() + seconds
    try:
        while (examples is None or number < examples) and (end is None or time.monotonic() < end):
            try:
                tried += once(np.random.default_rng([seed, number]))
            except Exception as error:
                example = f"{target.name}, seed {seed}, example {number}"
                raise FoundError(f"{example}: {type(error).__name__}: {error}") from error
            number += 1
    finally:
        tracemalloc.stop()
    return tried


@contextmanager
def limited_memory(most: int) -> Iterator[None]:
    """Raise `AssertionError` if more than so many bytes are allocated at a time, touched or not.

    That holds for what ends with an exception too. Tracing goes on until `run` ends: to begin it anew for each example
    takes memory that is never free again.
    """
    tracemalloc.start()  # goes on if it was begun before
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        if peak > most:
            raise AssertionError(f"{peak} bytes were allocated, at most {most} may be")


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Return bytes with a few changes: flipped, set, cut out, doubled, added or shuffled."""
    changed = bytearray(data)
    for place, what, value, length in rng.integers(0, 2**31, (int(rng.integers(1, 5)), 4)).tolist():
        place = place % (len(changed) + 1)
        what = what % 7
        length = length % 8 + 1
        if what == 0 and changed:
            changed[place % len(changed)] ^= 1 << value % 8
        elif what == 1 and changed:
            changed[place % len(changed)] = (0, 1, 127, 128, 255, value >> 8 & 255)[value % 6]
        elif what == 2:
            del changed[place : place + length]
        elif what == 3:
            changed[place:place] = changed[place : place + 4 * length]
        elif what == 4:
            changed[place:place] = rng.bytes(length)
        elif what == 5:
            changed[place : place + 4] = (0, 2**31, 2**32 - 1)[value % 3].to_bytes(4, "little")
        else:
            del changed[place:]
    return bytes(changed)


ODD = ["", "x", "../x", "\x00", "é\u202e", "9" * 5000, "[" * 3000, "1e999", "-1", "nan", "true", "{}", "' OR 1", "<b>"]
"""Texts that some parser has stumbled over."""


def odd(rng: np.random.Generator) -> object:
    """Return a value that does not belong there."""
    values: list[object] = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**70,
        1.5,
        -0.0,
        1e308,
        [],
        {},
        [[]],
        {"a": 1},
        *ODD,
    ]
    return values[int(rng.integers(len(values)))]


def disturbed(value: object, rng: np.random.Generator) -> object:
    """Return JSON with one value replaced, dropped, added or renamed, somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = list(value)[int(rng.integers(len(value)))]
        what = rng.random()
        if what < 0.6:
            return {**value, name: disturbed(value[name], rng)}
        if what < 0.75:
            return {key: each for key, each in value.items() if key != name}
        return {**value, str(odd(rng)): odd(rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = int(rng.integers(len(value)))
        return [*value[:place], disturbed(value[place], rng), *value[place + 1 :]]
    return odd(rng)
