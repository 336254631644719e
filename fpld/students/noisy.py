"""The noisy mean of a step of DP-SGD: gradients of single units, clipped, summed and hidden by Gaussian noise.

The gradients of units are computed one after the other. On a CPU that is about as fast as one minibatch of all of them,
once a unit has some hundred tokens, and it takes the memory of one gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fpld.privacy import Mechanism, PrivateText, RandomSource


class UnitGradient(NamedTuple):
    """The mean loss over the tokens of a unit, and its gradient."""

    loss: float
    parts: Sequence[Tensor]


class NoisyMean(NamedTuple):
    """A noisy mean of clipped gradients, which is private, and the losses of the units, which are not."""

    parts: list[Tensor]
    losses: list[float]


def noisy_mean(
    text: PrivateText,
    mechanism: Mechanism,
    random: RandomSource,
    gradient: Callable[[np.ndarray], UnitGradient],
    like: Sequence[Tensor],
) -> NoisyMean:
    """Return the noisy mean over the units that take part in a step.

    Parameters
    ----------
    gradient
        From the windows of a unit [W, T+1] to its gradient.
    like
        Tensors of the shapes of a gradient.
    """
    total = [torch.zeros_like(part, dtype=torch.float32) for part in like]
    losses = []
    for windows in text.draw(mechanism.rate, mechanism.windows, random):
        unit = gradient(windows)
        losses.append(unit.loss)
        add_clipped(total, unit.parts, mechanism.clip)
    # Divided by the expected number of units: the actual one would tell who took part.
    expected = mechanism.rate * text.units
    for part in total:
        noise = torch.from_numpy(random.normals(part.numel()).astype(np.float32)).view_as(part)
        part.add_(noise.to(part.device), alpha=mechanism.noise * mechanism.clip).div_(expected)
    return NoisyMean(total, losses)


def add_clipped(total: Sequence[Tensor], gradient: Sequence[Tensor], clip: float) -> None:
    """Add a unit's gradient to a sum, scaled so that its norm over all parts is at most `clip`.

    A gradient that is not finite adds nothing.
    """
    parts = [part.float() for part in gradient]
    norm = float(torch.stack([part.norm() for part in parts]).double().norm())
    if math.isfinite(norm):
        scale = min(1.0, clip / norm) if norm > 0 else 0.0
        for some, part in zip(total, parts, strict=True):
            some.add_(part, alpha=scale)
