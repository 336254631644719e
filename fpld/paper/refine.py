"""Sequential refinement (Theorem 3), and the schemes beside it that stall.

In round t a node codes the residual to its own reconstruction. Both ends know that reconstruction, and
after each round |logits - reconstruction| <= step / 2 holds, so the next round codes a range that is 2^-b times
the last one: no overload, and the error shrinks by 2^-b each round, also when the nodes' logits differ.

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

from fpld.paper.quantize import paper_quantizer

if TYPE_CHECKING:
    from fpld.paper.quantize import Quantizer
    from fpld.types import Floats, Reals

Channel = Callable[["Floats"], "Quantizer"]


@dataclass(frozen=True, eq=False, slots=True)
class Refinement:
    """State of one node (or of all, stacked) that both ends know: reconstruction, and half-range of the residual."""

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
    """Send the logits anew at full range; what was sent before is not used."""
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
