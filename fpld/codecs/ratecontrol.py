"""Rate control: the finest step whose code fits, in a few trials."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = 0.996  # of the room: fine enough
_SLOPE = 1 / 200  # by which the logarithm of a length falls with a step, about


def finest(length: Callable[[int], int], room: int, steps: range, guess: int | None) -> int | None:
    """Give the least of the step numbers whose code fits into `room` bytes, or one that all but fills it.

    `length` gives the length for a step; lengths fall as steps grow, nearly so. Supposing that they do, the next trial
    is where the logarithm of the length, as far as it is known, meets the room.
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
        if low >= steps.start and high < steps.stop and high - low > 16 and below - above < 3:
            # A little to the side that fits: a trial that does not fit is wasted.
            at = low + 1 + round((high - low) * (below + 0.001) / (below - above))
        elif (low >= steps.start and high < steps.stop) or guess is None:
            at = (low + high) // 2
        else:
            at += round(reach * fill / _SLOPE) + (1 if fill > 0 else -1)
            reach *= 2
    return high if high < steps.stop else None
