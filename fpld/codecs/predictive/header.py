"""The header of a predictive payload: how it was coded, the step, and what its cells decode to.

The mode is a byte of flags, the step a number: 256 to an octave. If there is room, what the encoder measured follows
for each group of classes in use: where the mean of a cell lies, and the variance that is left. Without it the decoder
assumes what a smooth density gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import FrameError

if TYPE_CHECKING:
    from fpld.types import Ints

# Flags of the mode: coded against the prior, with dither, and that what was measured of the cells follows.
PRIOR = 1
DITHER = 2
MEASURED = 4
# Step n is 2^((n - offset) / 256): from 2^-22 to 2^4.
STEPS = 6656
PER_OCTAVE = 256
_OFFSET = 5632
GROUPS = 12
PER_GROUP = 4  # classes to a group: two nats of the prior

_START = np.dtype([("mode", "u1"), ("step", "<u2")])
_GROUP = np.dtype([("zero", "i1"), ("one", "i1"), ("more", "i1"), ("v0", "<f2"), ("v1", "<f2")])
START_BYTES = _START.itemsize
_MAX_CELL_BYTES = 2 + GROUPS * _GROUP.itemsize

Cells = np.ndarray[Any, Any]


def default_cells() -> Cells:
    """Return what a smooth, falling density would leave in cells: nothing measured."""
    cells = np.zeros(GROUPS, _GROUP)
    cells["one"] = -8
    cells["v0"] = 0.1
    cells["v1"] = 1 / 12
    return cells


@dataclass(frozen=True, eq=False, slots=True)
class PredictiveHeader:
    """Hold a payload's header; `cells` says for each group, in its cells' own units, what was measured.

    `zero` / 32: mean of log(p / pi) where the symbol is zero. `one`, `more` / 256: mean of |y| / step less the symbol.
    `v0`: variance of log(p / pi) at zeros. `v1`: variance of y / step elsewhere. `stated`: the groups whose cells a
    payload has.
    """

    mode: int
    step: int
    cells: Cells = field(default_factory=default_cells)
    stated: tuple[bool, ...] = (False,) * GROUPS

    @property
    def size(self) -> float:
        """Return the step itself."""
        return quantizer_step(self.step)

    @property
    def rounding(self) -> float:
        """Return what is added before cutting off; see `rounding_offset`."""
        return rounding_offset(self.mode, self.step)

    def to_bytes(self) -> bytes:
        """Serialize; of the cells only the groups in use."""
        start = np.array((self.mode, self.step), _START).tobytes()
        if not self.mode & MEASURED:
            return start
        used = self.cells["v1"] >= 0
        return start + np.packbits(used, bitorder="little").tobytes() + self.cells[used].tobytes()

    @classmethod
    def from_bytes(cls, payload: bytes | memoryview) -> tuple[PredictiveHeader, int]:
        """Read a header; return it and its length. Raise `FrameError` if it is unsound."""
        if len(payload) < START_BYTES:
            raise FrameError(f"payload must be empty or have at least {START_BYTES} bytes, got {len(payload)}")
        start = np.frombuffer(payload, _START, 1)[0]
        mode = int(start["mode"])
        step = int(start["step"])
        if mode & ~(PRIOR | DITHER | MEASURED) or step >= STEPS:
            raise FrameError(f"payload's mode must be below 8 and its step below {STEPS}, got {mode} and {step}")
        if not mode & MEASURED:
            return cls(mode, step), START_BYTES
        if mode & DITHER:
            raise FrameError("payload with dither states cells, which nobody reads")
        rest = bytes(payload[START_BYTES : START_BYTES + _MAX_CELL_BYTES])
        used = np.unpackbits(np.frombuffer(rest[:2], np.uint8), bitorder="little").astype(bool)
        end = 2 + int(used.sum()) * _GROUP.itemsize
        if len(used) != 16 or used[GROUPS:].any() or len(rest) < end:
            raise FrameError("payload's cells are cut short or name a group that does not exist")
        cells = default_cells()
        cells[used[:GROUPS]] = np.frombuffer(rest[2:end], _GROUP)
        for name in ("v0", "v1"):
            if not (np.isfinite(cells[name]) & ~np.signbit(cells[name])).all():
                raise FrameError("payload states a variance that is not a finite, non-negative number")
        if not mode & PRIOR and (used[1:].any() or cells["zero"][0]):
            raise FrameError("payload without a prior states cells of groups that only a prior has")
        return cls(mode, step, cells, tuple(used[:GROUPS].tolist())), START_BYTES + end

    def check_groups(self, counts: Ints) -> None:
        """Raise `FrameError` if cells are stated of a group in which no coordinate lies; `counts` are of each class."""
        there = counts[: GROUPS * PER_GROUP].reshape(GROUPS, PER_GROUP).any(axis=1)
        if (np.array(self.stated) & ~there).any():
            raise FrameError("payload states cells of a group in which no coordinate lies")


def cell_bytes(used: int) -> int:
    """Return the length of what was measured for so many groups."""
    return 2 + used * _GROUP.itemsize


def quantizer_step(number: int) -> float:
    """Return the step of a number."""
    return float(2.0 ** ((number - _OFFSET) / PER_OCTAVE))


def largest_symbol(number: int) -> int:
    """Return a bound on symbols with a step, computed in integers: y is at most 4, and both ends must agree."""
    octaves = -((number - _OFFSET) // PER_OCTAVE)
    return min((4 << max(octaves, 0)) + 2, (1 << 24) - 1)


def rounding_offset(mode: int, step: int) -> float:
    """Return what is added before cutting off: 1/2 with dither and for fine steps, less for coarse ones.

    Where most symbols are zero, a bit that rounding down saves is worth more than the distortion.
    """
    if mode & DITHER:
        return 0.5
    # From steps of 1/8 to 1/128 it changes gradually, so that the length of a code does not jump.
    fine = (_OFFSET - 3 * PER_OCTAVE - step) / (4 * PER_OCTAVE)
    return 0.42 + 0.08 * min(max(fine, 0.0), 1.0)
