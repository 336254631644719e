"""What a private training does in every step, with numbers: noise, sampling rate, clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fpld.errors import InputError
from fpld.privacy.accounting import Spent, noise_for

if TYPE_CHECKING:
    from fpld.privacy.text import PrivateText


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A unit takes part in a step with chance `rate`; its gradient, over at most `windows` of its windows, is clipped.

    The norm of what a unit adds is at most `clip`, and noise of standard deviation `noise` * `clip` is added to the sum
    in every coordinate.
    """

    noise: float
    rate: float
    clip: float
    windows: int

    def spent(self, steps: int) -> Spent:
        """Return what so many steps spend."""
        return Spent(self.noise, self.rate, steps)


def calibrated(
    text: PrivateText, *, epsilon: float, delta: float, clip: float, batch: int, windows: int, steps: int
) -> Mechanism:
    """Return the mechanism that spends at most `epsilon` in `steps` steps, with `batch` units a step on average."""
    if text.units < batch:
        raise InputError(
            f"privacy.batch must be at most the number of units in a node's text, {text.units}, got {batch}: a step "
            "cannot take more units than there are"
        )
    rate = batch / text.units
    return Mechanism(noise_for(epsilon, delta, rate=rate, steps=steps), rate, clip, windows)
