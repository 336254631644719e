"""Draws of sampled labels: for every coordinate a number of 32 bits that both ends know.

A node's draws come from the run's key, the round, the node and the context, as its dither does, but from a stream of
their own. The upper half of a draw is 16 bits of a word that two tokens share; the lower half is another word's, made
only where it is asked for. The draw w stands for u = (w + 1/2) / 2^32.

Stratified over several slots, all nodes have the same draws but for a shift of the upper half by slot / slots: each
node's draws are as uniform as before, and what one node's label has too much of another's tends to lack.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.dither import GOLDEN, MIX_1, MIX_2, Dither, mix
from fpld.compiled import inlined

if TYPE_CHECKING:
    from fpld.types import Plan, Words

ONE = 1 << 32
_MASK = ONE - 1
_CONTEXTS = 1024  # whose keys are made at once


def keys_of(plan: Plan, rows: range) -> Words:
    """Return four key words for each context, and the slot's shift."""
    shared = plan.slots > 1
    message = struct.pack("<II", plan.round, plan.slots if shared else plan.node)
    person = b"fpld strata" if shared else b"fpld samples"
    digest = hashlib.blake2b(message, key=plan.run_key, digest_size=16, person=person).digest()
    k0, k1, s0, s1 = struct.unpack("<4I", digest)
    stream, keys = Dither((k0, k1), (s0, s1)), np.empty((len(rows), 5), np.uint32)
    keys[:, 4] = (plan.slot << 16) // plan.slots
    for at in range(rows.start // _CONTEXTS * _CONTEXTS, rows.stop, _CONTEXTS):
        chunk = range(max(rows.start, at), min(rows.stop, at + _CONTEXTS))
        # Made for many contexts at once: they are kept, and blocks are small.
        made = stream.keys(range(at, min(at + _CONTEXTS, plan.contexts)))
        keys[chunk.start - rows.start : chunk.stop - rows.start, :4] = made[chunk.start - at : chunk.stop - at]
    return keys


def uppers(key: Words, vocab: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return the upper halves of a context's draws."""
    pairs = mix(np.arange(-(-vocab // 2), dtype=np.uint32), key).astype("<u4")
    shifted: np.ndarray[Any, np.dtype[np.uint16]] = pairs.view("<u2")[:vocab] + np.uint16(key[4])
    return shifted


def all_draws(key: Words, vocab: int) -> Words:
    """Return all draws of a context: the reference implementation of `draw`."""
    lower = mix(np.arange(vocab, dtype=np.uint32), key[[3, 2, 1]]) >> np.uint32(16)
    return uppers(key, vocab).astype(np.uint32) << np.uint32(16) | lower


def shares(keys: Words, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return u, to 16 bits, of one token for each key: the key of its context."""
    pairs = mix((tokens >> 1).astype(np.uint32), keys)
    halves = np.where(tokens & 1, pairs >> np.uint32(16), pairs) + keys[:, 4]
    return ((halves & np.uint32(0xFFFF)) + 0.5) / (1 << 16)


@inlined
def mixed(index: Any, a: Any, b: Any, c: Any) -> Any:
    """Hash an index as `fpld.codecs.dither.mix` does, in integers wider than 32 bits."""
    h = (index * GOLDEN + a) & _MASK
    h ^= h >> 16
    h = ((h * MIX_1) & _MASK) ^ b
    h ^= h >> 15
    h = (h * MIX_2 + c) & _MASK
    return h ^ (h >> 15)


@inlined
def upper_half(key: Any, v: Any) -> Any:
    """Return the upper half of the draw of token v: the reference implementation for one token of `uppers`."""
    return (mixed(int(v) >> 1, int(key[0]), int(key[1]), int(key[2])) >> (16 * (int(v) & 1))) + int(key[4]) & 65535


@inlined
def draw(key: Any, upper: Any, v: Any) -> Any:
    """Return the draw of token v, whose upper half is known."""
    return int(upper) << 16 | mixed(int(v), int(key[3]), int(key[2]), int(key[1])) >> 16


@inlined
def log_place(distance: Any) -> Any:
    """Return the place of a distance 1..2^32 in `grid.LOGS`: by its exponent and the three bits below."""
    return (np.float64(distance).view(np.int64) >> 49) - (1023 << 3)
