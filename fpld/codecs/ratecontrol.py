"""Rate control: the finest step whose code fits, in a few trials."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = 0.996  # of the room: fine enough


def finest(
    code: Callable[[int], tuple[int, bytes]], room: int, steps: int, guess: int | None
) -> tuple[int, bytes] | None:
    """Give the least step number below `steps` whose code fits into `room` bytes, or one that all but fills it.

    `code` gives the length and the bytes for a step; lengths fall as steps grow, nearly so. Supposing that they do,
    the next trial is where the logarithm of the length, as far as it is known, meets the room.
    """
    low, high = -1, steps  # does not fit; fits
    below, above = math.nan, math.nan  # logarithms of length over room
    best, reach = None, 8
    at = steps // 2 if guess is None else guess
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        length, found = code(at)
        fill = math.log(max(length, 1) / room)
        if length <= room:
            best, high, above = (at, found), at, fill
            if length >= FULL * room:
                break
        else:
            low, below = at, fill
        if low >= 0 and high < steps and high - low > 16 and below - above < 3:
            # A little to the side that fits: a trial that does not fit is wasted.
            at = low + 1 + round((high - low) * (below + 0.001) / (below - above))
        elif (low >= 0 and high < steps) or guess is None:
            at = (low + high) // 2
        else:
            at += reach if low == at else -reach
            reach *= 2
    return best
