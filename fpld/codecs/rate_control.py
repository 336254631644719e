"""Rate control: the finest step whose code fits, in a few trials.

The length of a code falls as the step grows, by roughly the same factor from step to step. So the search is the secant
method on the logarithm of the length, kept within a bracket of a step that does not fit and one that does. It ends when
the bracket is closed, or when a code all but fills the room: each trial costs a whole code.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_FILL = 0.996  # the share of the room from which on a code is long enough
_TARGET = 0.002  # how far below the room the next trial aims, in logarithms: half-way to `MIN_FILL`
_SLOPE = 1 / 300  # by which the logarithm of a length falls from step to step, roughly


def finest_fitting_step(
    length: Callable[[int], int], room: int, steps: range, guess: int | None, slope: float = _SLOPE
) -> int | None:
    """Return the least step number whose code fits into `room` bytes, or one whose code all but fills it.

    Parameters
    ----------
    length:
        The length in bytes of the code with a step. The step that is returned was the last one tried of those that fit.
    steps, guess:
        The step numbers in question, and where to begin; without a guess, by bisection.
    slope:
        By how much the logarithm of the length falls from step to step, roughly.

    Returns
    -------
    The step number, or None if no step fits.
    """
    # Step `low` does not fit and step `high` does; `low_fill` and `high_fill` are log(length / room) of both.
    low = steps.start - 1
    high = steps.stop
    low_fill = math.nan
    high_fill = math.nan
    reach = 1.0
    at = (low + high) // 2 if guess is None else guess
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        size = length(at)
        fill = math.log(max(size, 1) / room)
        if size <= room:
            high = at
            high_fill = fill
            if size >= MIN_FILL * room:
                break
        else:
            low = at
            low_fill = fill
        bracketed = low >= steps.start and high < steps.stop
        if bracketed and low_fill - high_fill < 3:
            at = low + round((high - low) * (low_fill + _TARGET) / (low_fill - high_fill))
        elif bracketed or guess is None:
            at = (low + high) // 2
        else:
            # Only one side is known: extrapolate by the slope, further each time.
            at += round(reach * (fill + _TARGET) / slope) + (1 if fill > 0 else -1)
            reach *= 1.5
    return high if high < steps.stop else None


def largest_fitting(length: Callable[[int], int], room: int, whole: int) -> int | None:
    """Return the largest number up to `whole` whose length fits, or None; to 1/256 of `whole`, or to `MIN_FILL`."""
    low = 0
    high = whole
    best = None
    while low <= high:
        at = (low + high) // 2
        size = length(at)
        if size <= room:
            best = at
            low = at + 1 + whole // 256
            if size >= MIN_FILL * room:
                break
        else:
            high = at - 1 - whole // 256
    return best
