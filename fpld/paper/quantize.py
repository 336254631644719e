"""The paper's channel in reals: the subtractively dithered uniform quantizer, and sequential refinement over it.

Assumptions 5 and 5': with dither u uniform on (-1/2, 1/2) that both ends know, the encoder sends the cell of x/step + u
and the decoder subtracts u again. The error is then exactly uniform on (-step/2, step/2), has mean zero, and does not
depend on x.

There are two step sizes:

- `paper_quantizer` has step 2L * 2^-b for any real b >= 0. Dither can push a value over the edge of [-L, L], so the
  index takes 2^b + 1 values while b bits are charged. The simulator uses it, to reproduce the figures.
- `wire_quantizer` has N symbols for all of [-L - step/2, L + step/2], so the step is 2L / (N - 1). At one bit that is 4
  times the paper's variance, at four bits 1.14 times. The uniform codec has this step, in compiled kernels.

Sequential refinement (Theorem 3) uses the channel round after round. In round t a node codes the residual to its own
reconstruction, which both ends hold. After each round |logits - reconstruction| <= step / 2, so the next round codes a
range that is 2^-b times the last one. There is no overload, and the error shrinks by 2^-b each round, also when the
nodes' logits differ.

Every scheme is a pure step `(state, quantizer maker, logits, dither) -> state`, where the state is the node's
reconstruction and half-range. What the aggregator broadcasts is the mean of the reconstructions.

    refine       residual to the node's own reconstruction, range rescaled     each round: variance / 2^2b
    vanilla      the logits again, full range (Algorithm 1)                    stalls after one round
    fixed_step   residual to the own reconstruction, step not rescaled         stalls after one round
    broadcast    residual to the broadcast mean, range rescaled                as the paper writes it: fails when
                 nodes differ by more than the rescaled range
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Array, Floats, Ints, Reals


@dataclass(frozen=True, eq=False, slots=True)
class Quantizer:
    """Quantize with a clip, a step and an index offset; each broadcasts against the values.

    `clip` is the half-range L, `step` the cell width, `offset` the index of the value zero. `levels` is the number of
    symbols (None for the channel of the paper, which is not limited). With a zero step the range is zero, and every
    value decodes to zero. With one level nothing is sent, and the value decodes to zero.
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
        # Rounding in the line above can carry a value at the edge over it.
        return index if self.levels is None else np.clip(index, 0, self.levels - 1)

    def decode(self, index: Ints, dither: Floats) -> Floats:
        """Decode indices to values; one rounding only, so every machine computes the same."""
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
    half = np.asarray(clip, np.float64)
    rate = np.asarray(bits, np.float64)
    _refuse("clip", "finite and greater than 0", half, np.isfinite(half) & (half > 0))
    _refuse("bits", "finite and at least 0", rate, np.isfinite(rate) & (rate >= 0))
    return Quantizer(half, 2.0 * half * np.exp2(-rate), np.zeros(()))


def wire_quantizer(clip: ArrayLike, levels: ArrayLike) -> Quantizer:
    """Build the quantizer with N symbols on [-L, L]: step 2L / (N - 1); with one level nothing is sent.

    >>> wire = wire_quantizer(1.0, [2, 3, 5])
    >>> wire.step.tolist()
    [2.0, 1.0, 0.5]
    """
    half = np.asarray(clip, np.float64)
    count = np.asarray(levels, np.int64)
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


def _refuse(name: str, must: str, values: Floats, good: Array) -> None:
    if not good.all():
        raise InputError(f"{name} must be {must}, got {values[~good].flat[0]:g}")


Channel = Callable[["Floats"], "Quantizer"]


@dataclass(frozen=True, eq=False, slots=True)
class Refinement:
    """Hold the state of one node, or of all, stacked: reconstruction, and half-range of the residual."""

    reconstruction: Floats
    half_range: Floats

    @classmethod
    def start(cls, shape: tuple[int, ...], clip: float | Floats) -> Refinement:
        """Start from zero, with the clip L as the range."""
        return cls(np.zeros(shape), np.asarray(clip, np.float64))


Scheme = Callable[[Refinement, Channel, "Reals", "Floats"], Refinement]


def refine(state: Refinement, channel: Channel, logits: Reals, dither: Floats) -> Refinement:
    """Send the residual to the own reconstruction at a step scaled to its range.

    >>> state = Refinement.start((1,), clip=1.0)
    >>> for _ in range(3):
    ...     state = refine(state, lambda half: paper_quantizer(half, 2), np.array([0.3]), np.array([0.1]))
    >>> float(state.half_range), bool(abs(state.reconstruction[0] - 0.3) <= 4.0**-3)
    (0.015625, True)
    """
    quantizer = channel(state.half_range)
    sent = quantizer(logits - state.reconstruction, dither)
    return Refinement(state.reconstruction + sent, quantizer.step / 2)


def vanilla(state: Refinement, channel: Channel, logits: Reals, dither: Floats) -> Refinement:
    """Send the logits anew at full range, whatever was sent before."""
    return Refinement(channel(state.half_range)(logits, dither), state.half_range)


def fixed_step(state: Refinement, channel: Channel, logits: Reals, dither: Floats) -> Refinement:
    """Send the residual to the own reconstruction, at the first round's step."""
    quantizer = channel(state.half_range)
    return Refinement(state.reconstruction + quantizer(logits - state.reconstruction, dither), state.half_range)


def broadcast(state: Refinement, channel: Channel, logits: Reals, dither: Floats) -> Refinement:
    """Send the residual to the broadcast mean over the first axis, at a step scaled as if it shrank."""
    quantizer = channel(state.half_range)
    common = state.reconstruction.mean(axis=0)
    return Refinement(common + quantizer(logits - common, dither), quantizer.step / 2)


def paper_channel(bits: float) -> Channel:
    """Return the paper's channel at b bits a coordinate for any half-range."""
    return lambda half_range: paper_quantizer(half_range, bits)
