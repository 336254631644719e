"""The head of a payload of sampled labels: the step's number, and the label's mean noise that the encoder measured."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from fpld.codecs.samples.grid import STEPS, step_size
from fpld.errors import FrameError

_FORM = struct.Struct("<Hf")
HEAD_BYTES = _FORM.size


class Head(NamedTuple):
    """Hold a payload's step number, and the label's variance summed over tokens, in the mean of contexts."""

    step: int
    noise: float

    @property
    def tau(self) -> float:
        """Return the step."""
        return step_size(self.step)

    def to_bytes(self) -> bytes:
        """Serialize."""
        return _FORM.pack(self.step, self.noise)

    @classmethod
    def from_bytes(cls, payload: bytes | memoryview) -> Head:
        """Read a head; refuse what no encoder writes."""
        if len(payload) < HEAD_BYTES:
            raise FrameError(f"payload must be empty or have at least {HEAD_BYTES} bytes, got {len(payload)}")
        head = cls(*_FORM.unpack_from(payload))
        if head.step >= STEPS:
            raise FrameError(f"payload's step must be below {STEPS}, got {head.step}")
        # tau^2 f (1 - f) is at most tau |d| in each token, and the |d| of a context add up to 2 at most.
        if not (math.isfinite(head.noise) and 0 <= head.noise <= 2.001 * head.tau):
            raise FrameError(f"payload's noise must lie from 0 to twice its step, got {head.noise:g}")
        return head
