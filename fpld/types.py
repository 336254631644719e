"""The small types that everything shares: arrays, the plan of one node's round, what a codec decodes."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fpld import _check
from fpld.errors import InputError

if TYPE_CHECKING:
    from fpld.codecs.prior import Prior

Floats = npt.NDArray[np.float64]
Reals = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

MAX_CONTEXTS = 2**32 - 1
MAX_VOCAB = 2**24
MAX_BITS = 1024  # a coordinate: far more than raw logits take; a budget beyond it is a mistake, or worse
LEAST_TOKENS = 16  # counted for a smaller vocabulary, beside which heads and ranges are large
MAX_SLOTS = 2**16  # as many points as the dither's interval has


def run_id(key: bytes) -> bytes:
    """Return a name of the run with this key that does not reveal it (16 bytes)."""
    return hashlib.blake2b(b"run id", key=key, digest_size=16, person=b"fpld v1").digest()


@dataclass(frozen=True, slots=True)
class Plan:
    """State what one node is to send in one round: all that encoder and decoder must agree on.

    `bits` is the budget B_i in bits per probe context. `clip` is the clip level L of the paper, or None for a
    centre and a range of its own for each context (32 bits each, charged to the budget). `prior` is a prediction of the
    logits that both ends hold exactly, in small integers (see `fpld.codecs.prior`). With `slots` > 1 the dither is
    stratified over that many nodes, of which this one is number `slot` (see `fpld.codecs.dither`). `learnt` is what a
    codec that learns begins with: what it had learnt at the end of the round before.

    >>> plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=100, vocab=256, bits=600.5)
    >>> plan.budget_bytes
    7506
    """

    run_key: bytes
    round: int
    node: int
    probe: bytes
    contexts: int
    vocab: int
    bits: float
    clip: float | None = None
    slot: int = 0
    slots: int = 1
    prior: Prior | None = field(default=None, compare=False, repr=False)
    learnt: npt.NDArray[np.uint16] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.run_key, bytes) or not 16 <= len(self.run_key) <= 64:
            raise InputError("run_key must be 16 to 64 bytes")
        if not isinstance(self.probe, bytes) or len(self.probe) != 32:
            raise InputError("probe must be the 32-byte digest of the probe set")
        _check.integer("round", self.round, most=2**32 - 1)
        _check.integer("node", self.node, most=2**32 - 1)
        _check.integer("contexts", self.contexts, least=1, most=MAX_CONTEXTS)
        _check.integer("vocab", self.vocab, least=2, most=MAX_VOCAB)
        _check.real("bits", self.bits, least=0.0)
        if self.bits > MAX_BITS * max(self.vocab, LEAST_TOKENS):
            raise InputError(f"bits must be at most {MAX_BITS} for each of {self.vocab} tokens, got {self.bits:g}")
        if self.clip is not None:
            _check.real("clip", self.clip, above=0.0)
        if self.learnt is not None and (self.learnt.dtype != np.uint16 or self.learnt.ndim != 1):
            raise InputError(f"learnt must be uint16 in one dimension, got {self.learnt.dtype} {self.learnt.shape}")
        if self.prior is not None and not hasattr(self.prior, "digest"):
            raise InputError(f"prior must be a Prior, for an array ArrayPrior(array), got {type(self.prior).__name__}")
        _check.integer("slots", self.slots, least=1, most=MAX_SLOTS)
        _check.integer("slot", self.slot, most=self.slots - 1)

    @property
    def run_id(self) -> bytes:
        """Return a name of the run that does not reveal its key (16 bytes)."""
        return run_id(self.run_key)

    @property
    def digest(self) -> bytes:
        """Return the digest of all that both ends must agree on, prior and tables too (32 bytes)."""
        clip = -1.0 if self.clip is None else float(self.clip)
        whole = struct.pack("<IIIIddII", *(self.round, self.node, *self.shape), self.bits, clip, self.slot, self.slots)
        hashed = hashlib.blake2b(self.run_id + self.probe + whole, digest_size=32, person=b"fpld plan")
        hashed.update(bytes(32) if self.prior is None else self.prior.digest)
        if self.learnt is not None:
            hashed.update(struct.pack("<I", self.learnt.size) + self.learnt.astype("<u2", copy=False).tobytes())
        return hashed.digest()

    @property
    def budget_bytes(self) -> int:
        """Return the whole bytes that `contexts * bits` bits hold: no payload is longer."""
        # Exact: a float is a ratio of integers, and m * B in floats could round up past a byte.
        numerator, denominator = float(self.bits).as_integer_ratio()
        return self.contexts * numerator // (8 * denominator)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape [m, V] of the logits."""
        return self.contexts, self.vocab


class Decoded(NamedTuple):
    """Hold a decoded block of contexts; each field broadcasts against `values`.

    `values` [n, V] are logits; log-probabilities will do. `variance` is that of the error that coding adds to them.
    `bias` is log E[exp(error)]: subtract it from `values` before exponentiating; 0 says that there is nothing to
    correct. `chances` [n, V] are the codec's own unbiased estimate of the probabilities, where it has one; some may be
    negative.
    """

    values: Reals
    variance: Reals
    bias: Reals
    chances: Reals | None = None
