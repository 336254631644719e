"""Steps of sampled labels, what both ends derive from a step, and the header of a payload.

A step tau is one of 7681 powers of two, numbered in 1/256 of an octave. All that encoder and decoder must agree on is
integer arithmetic: logarithms are integers in the same unit, of 1/256 of an octave.

For a coordinate with prior probability pi and draw u, the symbol floor(d / tau + u) is positive from
p / pi = 1 + tau (1 - u) / pi on, and negative up to p / pi = 1 - tau u / pi. So the two ratios tau (1 - u) / pi and
tau u / pi say how likely either sign is, whatever pi and tau are. Each ratio falls into a *bin* of half an octave. A
*candidate* is a coordinate for which at least one ratio is small; all others share the last bin of both.

A label pi + tau s is no probability, but the p behind it is one: from 0 to 1. Given u and pi that bounds the symbol,
and a reader refuses all others (`possible_symbol`).

One step may leave much of the budget unused where the next finer one exceeds it: tokens with equal probabilities change
together. Then the first contexts have the finer step, and the header says how many.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.prior import LEAST_PRIOR
from fpld.codecs.samples.draws import DRAW_RANGE
from fpld.errors import FrameError
from fpld.kernels import inlined

if TYPE_CHECKING:
    from fpld.types import Array, Floats32

# Step number n stands for tau = 2^((n - STEP_OFFSET) / STEPS_PER_OCTAVE), from 2^-24 to 2^6.
STEPS_PER_OCTAVE = 256
STEP_COUNT = 30 * STEPS_PER_OCTAVE + 1
STEP_OFFSET = 24 * STEPS_PER_OCTAVE

# A level is minus the prior's integer. -log2(pi) by level: 256 log2(e) / 8 = 47274 / 1024, rounded.
LEVEL_COUNT = -LEAST_PRIOR + 1
MINUS_LOG2_PRIOR = (np.arange(LEVEL_COUNT) * 47274 + 512) >> 10

# log2(x / 2^32) of a distance x = 1..2^32, by `draws.log_index`: its exponent and the three bits below it select a
# cell, and the value is that of the cell's middle.
_MANTISSA_LOG2 = np.array([22, 63, 100, 134, 165, 193, 220, 244])
DISTANCE_LOG2 = (STEPS_PER_OCTAVE * (np.arange(33) - 32)[:, None] + _MANTISSA_LOG2).ravel()

# A bin is 2^7 units wide, half an octave. The first one holds all ratios up to 2^-3.5. Candidates have ratios below 2^4
# (plus) or below 2^0.5 (minus); bin number PLUS_BINS or MINUS_BINS is for all ratios beyond.
BIN_SHIFT = 7
BIN_OFFSET = 8
PLUS_BINS = 16
MINUS_BINS = 9

# A symbol may stand for a p from -2^-16 pi to 1 + 2^-16, and for no other.
PROBABILITY_SLACK = 2.0**-16

# A payload has at most so many nonzero symbols for each byte of code: it bounds the memory that hostile bytes claim.
MAX_SYMBOLS_PER_BYTE = 16

_HEADER = struct.Struct("<Hf")
_FINER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
FINER_BYTES = _FINER.size
_TWO_STEPS = 1 << 15  # the bit of the step's field that says that the header has a count of finer contexts


def step_to_tau(step: int) -> float:
    """Return the step size tau of a step number."""
    return float(2.0 ** ((step - STEP_OFFSET) / STEPS_PER_OCTAVE))


def tau_to_step(tau: float) -> int:
    """Return the number of the step nearest to tau."""
    return min(max(round(STEPS_PER_OCTAVE * math.log2(tau)) + STEP_OFFSET, 0), STEP_COUNT - 1)


def log_ratios(step: int) -> Array:
    """Return log2(tau / pi) by level, [LEVEL_COUNT]."""
    return MINUS_LOG2_PRIOR + (step - STEP_OFFSET)


@inlined
def ratio_bins(ratio: Any, upper: Any, lower: Any) -> Any:
    """Return the bins (plus, minus) of a coordinate from log2(tau / pi) and the log indices of 1 - u and u."""
    plus = ((ratio + DISTANCE_LOG2[upper]) >> BIN_SHIFT) + BIN_OFFSET
    minus = ((ratio + DISTANCE_LOG2[lower]) >> BIN_SHIFT) + BIN_OFFSET
    return min(max(plus, 0), PLUS_BINS), min(max(minus, 0), MINUS_BINS)


@inlined
def possible_symbol(symbol: Any, prior: Any, inverse: Any, draw: Any) -> Any:
    """Return whether some p from 0 to 1 gives this symbol, s = floor((p - pi) / tau + u).

    `prior` is pi, `inverse` 1 / tau, `draw` the integer of u. The symbol does not fall as p rises, so those of p = 0
    and p = 1 are the bounds. An encoder's floats are exact to some 2^-22: the slack refuses no honest one, and gives an
    attacker nothing.
    """
    u = (draw + 0.5) / DRAW_RANGE
    least = np.floor(u - (1.0 + PROBABILITY_SLACK) * prior * inverse)
    most = np.floor(u + (1.0 + PROBABILITY_SLACK - prior) * inverse)
    return least <= symbol <= most


class LabelHeader(NamedTuple):
    """Hold a payload's step number and noise, and how many of the first contexts have the next finer step.

    `noise` is the label's variance summed over tokens, averaged over contexts, as the encoder measured it.
    """

    step: int
    noise: float
    finer: int = 0

    @property
    def tau(self) -> float:
        """Return the step size."""
        return step_to_tau(self.step)

    @property
    def finest(self) -> int:
        """Return the number of the finest step."""
        return self.step - (self.finer > 0)

    @property
    def size(self) -> int:
        """Return the length of the header in bytes."""
        return HEADER_BYTES + FINER_BYTES * (self.finer > 0)

    def taus(self, rows: range) -> Floats32:
        """Return the step size of each of these contexts."""
        finer = np.arange(rows.start, rows.stop) < self.finer
        return np.where(finer, step_to_tau(self.finest), self.tau).astype(np.float32)

    def to_bytes(self) -> bytes:
        """Serialize the header."""
        if not self.finer:
            return _HEADER.pack(self.step, self.noise)
        return _HEADER.pack(self.step | _TWO_STEPS, self.noise) + _FINER.pack(self.finer)

    @classmethod
    def from_bytes(cls, payload: bytes | memoryview) -> LabelHeader:
        """Parse the header of a payload; raise `FrameError` for one that no encoder writes."""
        field, noise = _unpack(_HEADER, payload, 0)
        two, step = divmod(field, _TWO_STEPS)
        header = cls(step, noise, *(_unpack(_FINER, payload, HEADER_BYTES) if two else ()))
        if not two <= header.step < STEP_COUNT:
            raise FrameError(
                f"payload's step must be below {STEP_COUNT}, and not 0 beside a finer one, got {header.step}"
            )
        if two and not header.finer:
            raise FrameError("payload's finer step must be that of one context at least, got 0")
        # tau^2 f (1 - f) is at most tau |d| in each token, and the |d| of a context add up to 2 at most.
        if not (math.isfinite(header.noise) and 0 <= header.noise <= 2.001 * header.tau):
            raise FrameError(f"payload's noise must lie from 0 to twice its step, got {header.noise:g}")
        return header


def _unpack(form: struct.Struct, payload: bytes | memoryview, at: int) -> tuple[Any, ...]:
    if len(payload) < at + form.size:
        raise FrameError(f"payload must be empty or have at least {at + form.size} bytes, got {len(payload)}")
    return form.unpack_from(payload, at)
