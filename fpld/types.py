"""Types that all packages share: aliases for arrays, the plan of a node's round, and decoded blocks."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fpld import validation
from fpld.errors import InputError

if TYPE_CHECKING:
    from fpld.codecs.prior import Prior

# Aliases for arrays by the type of their elements; docstrings state shapes.
Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Floats = npt.NDArray[np.float64]
Floats32 = npt.NDArray[np.float32]
Reals = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

MAX_CONTEXTS = 2**32 - 1
MAX_VOCAB = 2**24
MAX_BITS = 1024  # per coordinate: far more than raw logits take, so a larger budget is a mistake or an attack
LEAST_TOKENS = 16  # a smaller vocabulary counts as this many: headers and ranges are large beside it
MAX_SLOTS = 2**16  # the number of points in the dither's interval


def run_id(key: bytes) -> bytes:
    """Return the id of a run (16 bytes), which does not reveal its key."""
    return hashlib.blake2b(b"run id", key=key, digest_size=16, person=b"fpld v1").digest()


@dataclass(frozen=True, slots=True)
class Plan:
    """State what one node is to send in one round: all that encoder and decoder must agree on.

    Parameters
    ----------
    run_key
        Secret of the run, 16 to 64 bytes: keys its dither and draws.
    round, node
        Number of the round and of the node.
    probe
        SHA-256 of the probe set.
    contexts, vocab
        Shape [m, V] of the logits.
    bits
        Budget B_i in bits per probe context.
    clip
        Clip level L of the paper; None sends a centre and a range for each context, charged to the budget.
    slot, slots
        With `slots` > 1 the dither is stratified over that many nodes, and this one is number `slot`.
    prior
        Prediction of the logits that both ends hold exactly, in small integers (`fpld.codecs.prior`).
    written
        How many contexts the node's own model is to write and label besides (`fpld.protocol.written`); the budget is
        for these too.
    learnt
        Symbol tables with which an adaptive codec begins: those of the end of the round before.
    space
        Where labels are over strings: the digest of the maps from the node's and the student's tokens to the symbols
        (`fpld.data.label_space`). Empty over tokens, where the map is the identity.

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
    written: int = 0
    space: bytes = b""
    prior: Prior | None = field(default=None, compare=False, repr=False)
    learnt: npt.NDArray[np.uint16] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.run_key, bytes) or not 16 <= len(self.run_key) <= 64:
            raise InputError("run_key must be 16 to 64 bytes")
        if not isinstance(self.probe, bytes) or len(self.probe) != 32:
            raise InputError("probe must be the 32-byte digest of the probe set")
        if not isinstance(self.space, bytes) or len(self.space) not in (0, 32):
            raise InputError("space must be the 32-byte digest of two maps, or empty for labels over tokens")
        validation.integer("round", self.round, most=2**32 - 1)
        validation.integer("node", self.node, most=2**32 - 1)
        validation.integer("contexts", self.contexts, least=1, most=MAX_CONTEXTS)
        validation.integer("vocab", self.vocab, least=2, most=MAX_VOCAB)
        validation.real("bits", self.bits, least=0.0)
        if self.bits > MAX_BITS * max(self.vocab, LEAST_TOKENS):
            raise InputError(f"bits must be at most {MAX_BITS} for each of {self.vocab} tokens, got {self.bits:g}")
        if self.clip is not None:
            validation.real("clip", self.clip, above=0.0)
        if self.learnt is not None and (self.learnt.dtype != np.uint16 or self.learnt.ndim != 1):
            raise InputError(f"learnt must be uint16 in one dimension, got {self.learnt.dtype} {self.learnt.shape}")
        if self.prior is not None and not hasattr(self.prior, "digest"):
            raise InputError(f"prior must be a Prior, for an array ArrayPrior(array), got {type(self.prior).__name__}")
        validation.integer("written", self.written, most=MAX_CONTEXTS)
        validation.integer("slots", self.slots, least=1, most=MAX_SLOTS)
        validation.integer("slot", self.slot, most=self.slots - 1)

    @property
    def run_id(self) -> bytes:
        """Return the id of the run (16 bytes), which does not reveal its key."""
        return run_id(self.run_key)

    @property
    def digest(self) -> bytes:
        """Return the digest of all fields, prior and tables included (32 bytes)."""
        clip = -1.0 if self.clip is None else float(self.clip)
        numbers = struct.pack(
            "<IIIIddII", *(self.round, self.node, *self.shape), self.bits, clip, self.slot, self.slots
        )
        hashed = hashlib.blake2b(self.run_id + self.probe + numbers, digest_size=32, person=b"fpld plan")
        hashed.update(bytes(32) if self.prior is None else self.prior.digest)
        if self.learnt is not None:
            hashed.update(struct.pack("<I", self.learnt.size) + self.learnt.astype("<u2", copy=False).tobytes())
        if self.written:
            hashed.update(b"written" + struct.pack("<I", self.written))
        if self.space:
            hashed.update(b"space" + self.space)
        return hashed.digest()

    @property
    def budget_bytes(self) -> int:
        """Return the largest length of a payload: whole bytes in `bits` bits for each public and written context."""
        # Exact: a float is a ratio of integers, and m * B in floats could round up past a byte.
        numerator, denominator = float(self.bits).as_integer_ratio()
        return (self.contexts + self.written) * numerator // (8 * denominator)

    @property
    def public(self) -> Plan:
        """Return the plan for the public contexts alone."""
        return replace(self, written=0) if self.written else self

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape [m, V] of the logits."""
        return self.contexts, self.vocab


class Decoded(NamedTuple):
    """Hold a decoded block of n contexts; each field broadcasts against `values`.

    Attributes
    ----------
    values
        Logits [n, V], or log-probabilities.
    variance
        Variance of the error that coding adds to them.
    bias
        log E[exp(error)], which is subtracted from `values` before they are exponentiated; 0 without a bias.
    probabilities
        The codec's unbiased estimate of the probabilities [n, V], if it has one; some may be negative.
    """

    values: Reals
    variance: Reals
    bias: Reals
    probabilities: Reals | None = None
