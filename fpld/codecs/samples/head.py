"""The head of a payload of sampled labels: the step's number, and the label's mean noise that the encoder measured.

Where tokens tie, one step may leave room that the next finer one has not enough of. Then the first contexts have the
finer step, and the head says how many.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.samples.grid import STEPS, step_size
from fpld.errors import FrameError

if TYPE_CHECKING:
    import numpy.typing as npt

_FORM, _FINER = struct.Struct("<Hf"), struct.Struct("<I")
HEAD_BYTES, FINER_BYTES = _FORM.size, _FINER.size
_TWO = 1 << 15  # the bit of the step's field that says that there are two


class Head(NamedTuple):
    """Hold a payload's step number, and the label's variance summed over tokens, in the mean of contexts.

    The first `finer` contexts have the next finer step.
    """

    step: int
    noise: float
    finer: int = 0

    @property
    def tau(self) -> float:
        """Return the step."""
        return step_size(self.step)

    @property
    def finest(self) -> int:
        """Return the number of the finest step."""
        return self.step - (self.finer > 0)

    @property
    def size(self) -> int:
        """Return the bytes of the head."""
        return HEAD_BYTES + FINER_BYTES * (self.finer > 0)

    def taus(self, rows: range) -> npt.NDArray[np.float32]:
        """Return the step of each of these contexts."""
        finer = np.arange(rows.start, rows.stop) < self.finer
        return np.where(finer, step_size(self.finest), self.tau).astype(np.float32)

    def to_bytes(self) -> bytes:
        """Serialize."""
        if not self.finer:
            return _FORM.pack(self.step, self.noise)
        return _FORM.pack(self.step | _TWO, self.noise) + _FINER.pack(self.finer)

    @classmethod
    def from_bytes(cls, payload: bytes | memoryview) -> Head:
        """Read a head; refuse what no encoder writes."""
        field, noise = _unpack(_FORM, payload, 0)
        two, step = divmod(field, _TWO)
        head = cls(step, noise, *(_unpack(_FINER, payload, HEAD_BYTES) if two else ()))
        if not two <= head.step < STEPS:
            raise FrameError(f"payload's step must be below {STEPS}, and not 0 beside a finer one, got {head.step}")
        if two and not head.finer:
            raise FrameError("payload's finer step must be that of one context at least, got 0")
        # tau^2 f (1 - f) is at most tau |d| in each token, and the |d| of a context add up to 2 at most.
        if not (math.isfinite(head.noise) and 0 <= head.noise <= 2.001 * head.tau):
            raise FrameError(f"payload's noise must lie from 0 to twice its step, got {head.noise:g}")
        return head


def _unpack(form: struct.Struct, payload: bytes | memoryview, at: int) -> tuple[Any, ...]:
    if len(payload) < at + form.size:
        raise FrameError(f"payload must be empty or have at least {at + form.size} bytes, got {len(payload)}")
    return form.unpack_from(payload, at)
