"""Shared randomness: the dither that a node adds and the aggregator subtracts, bit for bit the same.

The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*,
SC 2011), written here in integer arithmetic, so that it depends on no library's stream. It is keyed by
(run key, round, node) and counts over (context, coordinate): the dither of any block of contexts costs only
that block, and does not depend on the budget.

From raw bits to dither: the 32-bit word w stands for the centre of the w-th of 2^32 equal cells of the
interval (-1/2, 1/2), that is u = (2w + 1 - 2^32) / 2^33. This is exact in float64, symmetric, and its mean is
exactly zero.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import _check

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.types import Floats, Words

ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BLOCK = 1 << 14  # counters at a time: what ten rounds touch stays in the cache


def philox4x32(counter: npt.NDArray[Any], key: tuple[int, int]) -> Words:
    """Encrypt counters [..., 4] (32-bit words) under a key of two 32-bit words: Philox4x32-10.

    >>> [f"{word:08x}" for word in philox4x32(np.zeros(4, np.uint32), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(ROUNDS):
        np.multiply(c0, _MULTIPLIERS[0], out=p0)
        np.multiply(c2, _MULTIPLIERS[1], out=p1)
        c1 ^= p1 >> _HALF
        c1 ^= np.uint64(k0)
        c3 ^= p0 >> _HALF
        c3 ^= np.uint64(k1)
        p0 &= _LOW
        p1 &= _LOW
        # The new words in order; the two that are no longer needed become the next products.
        c0, c1, c2, c3, p0, p1 = c1, p1, c3, p0, c0, c2
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(words: Words) -> Floats:
    """Map 32-bit words to the dither in units of a step, exactly: u = (2w + 1 - 2^32) / 2^33.

    >>> uniform(np.array([0, 2**31, 2**32 - 1], np.uint32)).tolist() == [2**-33 - 0.5, 2**-33, 0.5 - 2**-33]
    True
    """
    return (words.astype(np.float64) + (0.5 - 2.0**31)) * 2.0**-32


@dataclass(frozen=True, slots=True)
class Dither:
    """Hold the stream of one (run key, round, node); `words` and `block` give any part of it.

    >>> stream = Dither.derive(bytes(16), round=1, node=0)
    >>> bool((stream.block(range(5, 7), vocab=10) == stream.block(range(9), vocab=10)[5:7]).all())
    True
    """

    key: tuple[int, int]
    stream: tuple[int, int]

    @classmethod
    def derive(cls, run_key: bytes, *, round: int, node: int) -> Dither:
        """Derive the stream of a node in a round from the run's key by keyed BLAKE2b."""
        _check.integer("round", round, most=2**32 - 1)
        _check.integer("node", node, most=2**32 - 1)
        message = struct.pack("<II", round, node)
        digest = hashlib.blake2b(message, key=run_key, digest_size=16, person=b"fpld dither v1").digest()
        k0, k1, s0, s1 = struct.unpack("<4I", digest)
        return cls((k0, k1), (s0, s1))

    def words(self, contexts: range, vocab: int) -> Words:
        """Give the 32-bit words of a block of contexts, [len(contexts), vocab].

        Coordinate v of context l is word v mod 4 of the counter (v div 4, l, stream...).
        """
        quads = -(-vocab // 4)
        out = np.empty((len(contexts) * quads, 4), np.uint32)
        for start in range(0, len(out), _BLOCK):
            index = np.arange(start, min(start + _BLOCK, len(out)), dtype=np.int64)
            counter = np.empty((len(index), 4), np.uint32)
            counter[:, 0] = index % quads
            counter[:, 1] = contexts.start + index // quads * contexts.step
            counter[:, 2:] = self.stream
            out[start : start + len(index)] = philox4x32(counter, self.key)
        return out.reshape(len(contexts), 4 * quads)[:, :vocab]

    def block(self, contexts: range, vocab: int) -> Floats:
        """Give the dither of a block of contexts in units of a step, in (-1/2, 1/2)."""
        return uniform(self.words(contexts, vocab))
