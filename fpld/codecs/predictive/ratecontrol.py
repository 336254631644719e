"""Rate control: the finest step whose code fits, in a few trials."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = 0.996  # of the room: fine enough
_AIM = 0.002  # in logarithms below the room: in the middle of what is fine enough
_SLOPE = 1 / 300  # by which the logarithm of a length falls from step to step, about


def finest(
    length: Callable[[int], int], room: int, steps: range, guess: int | None, slope: float = _SLOPE
) -> int | None:
    """Return the least of the step numbers whose code fits into `room` bytes, or one that all but fills it.

    `length` gives the length for a step; lengths fall as steps grow, nearly so, by `slope` in their logarithm.
    Supposing that they do, the next trial is where the logarithm of the length, as far as it is known, meets the
    room. What is given was the last to be tried of all that fit.
    """
    low, high = steps.start - 1, steps.stop  # does not fit; fits
    below, above = math.nan, math.nan  # logarithms of length over room
    reach = 1.0
    at = (low + high) // 2 if guess is None else guess
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        found = length(at)
        fill = math.log(max(found, 1) / room)
        if found <= room:
            high, above = at, fill
            if found >= FULL * room:
                break
        else:
            low, below = at, fill
        if low >= steps.start and high < steps.stop and below - above < 3:
            at = low + round((high - low) * (below + _AIM) / (below - above))
        elif (low >= steps.start and high < steps.stop) or guess is None:
            at = (low + high) // 2
        else:
            at += round(reach * (fill + _AIM) / slope) + (1 if fill > 0 else -1)
            reach *= 1.5
    return high if high < steps.stop else None


def most(length: Callable[[int], int], room: int, whole: int) -> int | None:
    """Return the largest number up to `whole` whose length fits, to a part in 256 or until the room is all but full."""
    low, high, best = 0, whole, None
    while low <= high:
        at = (low + high) // 2
        found = length(at)
        if found <= room:
            best, low = at, at + 1 + whole // 256
            if found >= FULL * room:
                break
        else:
            high = at - 1 - whole // 256
    return best
