"""The subtractively dithered uniform quantizer in reals: Assumptions 5 and 5' of the paper.

With dither u uniform on (-1/2, 1/2) that both ends know, the encoder sends the cell of x/step + u and the
decoder subtracts u again. The error is then exactly uniform on (-step/2, step/2), has mean zero, and does not
depend on x.

Two steps, never to be confused:

- `paper_quantizer`: step 2L * 2^-b for any real b >= 0. Dither can push a value over the edge of [-L, L], so
  the index takes 2^b + 1 values while b bits are charged. The simulator uses it, to reproduce the figures.
- `wire_quantizer`: N symbols on the wire for all of [-L - step/2, L + step/2], so the step is 2L / (N - 1). At
  one bit that is 4 times the paper's variance, at four bits 1.14 times. The uniform codec has
  this step, in kernels of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Floats, Ints, Reals


@dataclass(frozen=True, eq=False, slots=True)
class Quantizer:
    """Quantize with a clip, a step and an index offset; each broadcasts, so each coordinate may have its own.

    `clip` is the half-range L, `step` the cell width, `offset` the index of the value zero. `levels` is how many
    symbols there are (None: whatever the channel of the paper takes). A zero step means a zero range: every
    value is zero and decodes to zero. One level means that nothing is sent: the value decodes to zero.
    """

    clip: Floats
    step: Floats
    offset: Floats
    levels: Ints | None = None

    @property
    def variance(self) -> Floats:
        """Return the variance of the error, step^2 / 12; for a value that is not sent, its largest square."""
        variance = self.step * self.step / 12.0
        if self.levels is None:
            return variance
        return np.where(self.levels == 1, self.clip * self.clip, variance)

    def encode(self, values: Reals, dither: Floats) -> Ints:
        """Return the index of the cell that holds each clipped and dithered value."""
        clipped = np.clip(values, -self.clip, self.clip)
        cells = clipped / np.where(self.step > 0, self.step, 1.0)
        index = np.floor(cells + (self.offset + 0.5) + dither).astype(np.int64)
        # Rounding in the line above can carry a value at the very edge over it.
        return index if self.levels is None else np.clip(index, 0, self.levels - 1)

    def decode(self, index: Ints, dither: Floats) -> Floats:
        """Decode indices to values: exact but for one rounding, so every machine computes the same."""
        cells = (index - self.offset) - dither
        return cells * (self.step if self.levels is None else np.where(self.levels == 1, 0.0, self.step))

    def __call__(self, values: Reals, dither: Floats) -> Floats:
        """Pass values through the channel: encode, then decode."""
        return self.decode(self.encode(values, dither), dither)


def paper_quantizer(clip: ArrayLike, bits: ArrayLike) -> Quantizer:
    """Build the paper's channel on [-L, L] at b bits: step 2L * 2^-b, variance (L^2 / 3) * 2^-2b.

    >>> float(paper_quantizer(1.0, 2.0).step), float(paper_quantizer(1.0, 2.0).variance * 48)
    (0.5, 1.0)
    """
    half, rate = np.asarray(clip, np.float64), np.asarray(bits, np.float64)
    _refuse("clip", "finite and greater than 0", half, np.isfinite(half) & (half > 0))
    _refuse("bits", "finite and at least 0", rate, np.isfinite(rate) & (rate >= 0))
    return Quantizer(half, 2.0 * half * np.exp2(-rate), np.zeros(()))


def wire_quantizer(clip: ArrayLike, levels: ArrayLike) -> Quantizer:
    """Build the quantizer with N symbols on [-L, L]: step 2L / (N - 1); with one level nothing is sent.

    >>> wire = wire_quantizer(1.0, [2, 3, 5])
    >>> wire.step.tolist()
    [2.0, 1.0, 0.5]
    """
    half, count = np.asarray(clip, np.float64), np.asarray(levels, np.int64)
    _refuse("clip", "finite and at least 0", half, np.isfinite(half) & (half >= 0))
    _refuse("levels", "at least 1", count.astype(np.float64), count >= 1)
    step = 2.0 * half / np.maximum(count - 1, 1)
    return Quantizer(half, step, (count - 1) / 2.0, count)


def paper_bits(quantizer: Quantizer, clip: ArrayLike) -> Floats:
    """Return the bits at which the paper's channel on [-L, L] has this quantizer's mean variance; at least 0.

    >>> round(float(paper_bits(paper_quantizer(4.0, 2.5), 4.0)), 9), float(paper_bits(wire_quantizer(1.0, 2), 1.0))
    (2.5, 0.0)
    """
    most = np.asarray(clip, np.float64) ** 2 / 3
    bits: Floats = np.maximum(np.log2(most / quantizer.variance.mean()) / 2, 0.0)
    return bits


def _refuse(name: str, must: str, values: Floats, good: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
    if not good.all():
        raise InputError(f"{name} must be {must}, got {values[~good].flat[0]:g}")
