"""Draws of sampled labels: for every coordinate a random 32-bit number that both ends compute.

A node's draws come from the run's key, the round, the node and the context, as its dither does, but from a separate
stream. The upper half of a draw is 16 bits of a word that two tokens share. The lower half comes from another word,
computed only where it is needed. The draw w stands for u = (w + 1/2) / 2^32.

**Stratified draws.** With several slots, all nodes have the same draws but for a shift of the upper half by
slot / slots. Each node's draws are as uniform as before, and the errors of the nodes' labels tend to cancel.

A context's *key* has five words: the four that Philox derives, then the shift of the node's slot.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.dither import GOLDEN, MIX_1, MIX_2, Dither, mix
from fpld.kernels import inlined

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.types import Floats, Plan, Tokens, Words

HALF_BITS = 16
HALF_RANGE = 1 << HALF_BITS
DRAW_RANGE = 1 << (2 * HALF_BITS)
SHIFT = 4  # the place of the slot's shift in a key
_MASK = DRAW_RANGE - 1
_KEY_BLOCK = 1024  # contexts whose keys are derived, and cached, together

# The bits of a float64: a mantissa of 52 bits below an exponent that is biased by 1023.
_LOG_SHIFT = 52 - 3
_LOG_BIAS = 1023 << 3


def draw_keys(plan: Plan, rows: range) -> Words:
    """Return the keys of contexts, [len(rows), 5]."""
    shared = plan.slots > 1
    message = struct.pack("<II", plan.round, plan.slots if shared else plan.node)
    person = b"fpld strata" if shared else b"fpld samples"
    digest = hashlib.blake2b(message, key=plan.run_key, digest_size=16, person=person).digest()
    k0, k1, s0, s1 = struct.unpack("<4I", digest)
    stream = Dither((k0, k1), (s0, s1))
    keys = np.empty((len(rows), SHIFT + 1), np.uint32)
    keys[:, SHIFT] = (plan.slot << HALF_BITS) // plan.slots
    # `Dither.keys` caches what it returns: aligned blocks of contexts serve all the small ranges within them.
    for start in range(rows.start // _KEY_BLOCK * _KEY_BLOCK, rows.stop, _KEY_BLOCK):
        block = stream.keys(range(start, min(start + _KEY_BLOCK, plan.contexts)))
        part = range(max(rows.start, start), min(rows.stop, start + _KEY_BLOCK))
        keys[part.start - rows.start : part.stop - rows.start, :SHIFT] = block[part.start - start : part.stop - start]
    return keys


def upper_halves(key: Words, vocab: int) -> npt.NDArray[np.uint16]:
    """Return the upper halves of a context's draws, [vocab]."""
    pairs = mix(np.arange(-(-vocab // 2), dtype=np.uint32), key).astype("<u4")
    shifted: npt.NDArray[np.uint16] = pairs.view("<u2")[:vocab] + np.uint16(key[SHIFT])
    return shifted


def context_draws(key: Words, vocab: int) -> Words:
    """Return all draws of a context, [vocab]: the reference implementation of `token_draw`."""
    lower = mix(np.arange(vocab, dtype=np.uint32), key[[3, 2, 1]]) >> np.uint32(HALF_BITS)
    return upper_halves(key, vocab).astype(np.uint32) << np.uint32(HALF_BITS) | lower


def draw_fractions(keys: Words, tokens: Tokens) -> Floats:
    """Return u, to 16 bits, of each token under the key of its context: `keys` has one row for each token."""
    pairs = mix((tokens >> 1).astype(np.uint32), keys)
    halves = np.where(tokens & 1, pairs >> np.uint32(HALF_BITS), pairs) + keys[:, SHIFT]
    return ((halves & np.uint32(HALF_RANGE - 1)) + 0.5) / HALF_RANGE


@inlined
def _mix_scalar(index: Any, a: Any, b: Any, c: Any) -> Any:
    """Hash an index as `fpld.codecs.dither.mix` does, in integers wider than 32 bits."""
    h = (index * GOLDEN + a) & _MASK
    h ^= h >> 16
    h = ((h * MIX_1) & _MASK) ^ b
    h ^= h >> 15
    h = (h * MIX_2 + c) & _MASK
    return h ^ (h >> 15)


@inlined
def upper_half(key: Any, token: Any) -> Any:
    """Return the upper half of a token's draw: `upper_halves` for one token."""
    pair = _mix_scalar(int(token) >> 1, int(key[0]), int(key[1]), int(key[2]))
    return (pair >> (HALF_BITS * (int(token) & 1))) + int(key[SHIFT]) & (HALF_RANGE - 1)


@inlined
def token_draw(key: Any, upper: Any, token: Any) -> Any:
    """Return the draw of a token from its upper half."""
    return int(upper) << HALF_BITS | _mix_scalar(int(token), int(key[3]), int(key[2]), int(key[1])) >> HALF_BITS


@inlined
def log_index(distance: Any) -> Any:
    """Return the index of a distance 1..2^32 in `steps.DISTANCE_LOG2`: its exponent and the three bits below.

    Both are the upper bits of the distance as a float64, which is exact.
    """
    return (np.float64(distance).view(np.int64) >> _LOG_SHIFT) - _LOG_BIAS
