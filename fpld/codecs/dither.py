"""Shared randomness: the dither that a node adds and the aggregator subtracts, bit for bit the same.

All of it is integer arithmetic written down here, so it depends on no library's stream. A run key, a round and a
node give a *stream*; Philox4x32-10 (Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*,
SC 2011) turns it into four 32-bit words for each context; a short keyed hash turns those into one 32-bit word for each
two coordinates. The dither of any block of contexts costs only that block, and does not depend on the budget.

From raw bits to dither: the 16-bit number w stands for the centre of the w-th of 2^16 equal cells of the interval
(-1/2, 1/2), that is u = (2w + 1 - 2^16) / 2^17. This is exact in float32, symmetric, and its mean is exactly zero.

**Stratified dither.** With `slots` = K > 1 all K nodes share one stream. In each coordinate they take the K points of
a regular grid over the interval, moved by one shared random shift, in a random order: node number w is the shared
number plus floor(65536 pi(slot) / K). Each node's dither is uniform as before. Where nodes agree to a fraction of a
step, their errors are a regular grid too, and the variance of the mean falls by another factor of K. The order pi must
change from coordinate to coordinate: a fixed one would align the errors of nodes whose values lie apart by their
distance in the grid. It is one of 256 random permutations, in turn, from a random one on in each context. A node
that does not answer leaves the others' dither uniform, and so the mean unbiased.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import validation
from fpld.numerics import split
from fpld.types import MAX_SLOTS

if TYPE_CHECKING:
    import numpy.typing as npt

    from fpld.types import Floats, Plan, Words

    Units = npt.NDArray[np.uint16]

PERMUTATIONS = 256
# Constants of the 32-bit hash: an odd increment (the golden ratio), and the multipliers of a well-tested mixer.
GOLDEN = 0x9E3779B9
MIX_1 = 0x21F0AAAD
MIX_2 = 0xD35A2D97
# Constants of Philox4x32: rounds, multipliers, and the increments of the two key words.
ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_PHASES_AT_ONCE = 1 << 18
_BLOCK = 1 << 16  # words that are mixed at a time: they stay in the cache


def philox4x32(counter: npt.NDArray[Any], key: tuple[int, int]) -> Words:
    """Encrypt counters [..., 4] (32-bit words) under a key of two 32-bit words: Philox4x32-10.

    >>> [f"{word:08x}" for word in philox4x32(np.zeros(4, np.uint32), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    p0 = np.empty_like(c0)
    p1 = np.empty_like(c0)
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
        # One permutation of six arrays: the new words in order; the two that are free take the next products.
        c0, c1, c2, c3, p0, p1 = c1, p1, c3, p0, c0, c2
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def mix(index: Words, keys: Words) -> Words:
    """Hash positions under the first three words of context keys [..., 4]: the word at each position of a context.

    >>> [f"{word:08x}" for word in mix(np.arange(2, dtype=np.uint32), np.zeros(4, np.uint32))]
    ['00000000', 'c4631032']
    """
    a, b, c = (keys[..., i] for i in range(3))
    h = index * np.uint32(GOLDEN) + a
    h ^= h >> np.uint32(16)
    h *= np.uint32(MIX_1)
    h ^= b
    h ^= h >> np.uint32(15)
    h *= np.uint32(MIX_2)
    h += c
    h ^= h >> np.uint32(15)
    return h


def uniform_dither(units: Units) -> Floats:
    """Map 16-bit numbers to the dither in units of a step, exactly: u = (2w + 1 - 2^16) / 2^17.

    >>> uniform_dither(np.array([0, 2**15, 2**16 - 1], np.uint16)).tolist() == [2**-17 - 0.5, 2**-17, 0.5 - 2**-17]
    True
    """
    return (units.astype(np.float64) + (0.5 - 2.0**15)) * 2.0**-16


@dataclass(frozen=True, slots=True)
class Dither:
    """Hold the stream of one node in one round, or of all nodes if it is stratified; compute any part of it.

    >>> stream = Dither.derive(bytes(16), round=1, node=0)
    >>> bool((stream.block(range(5, 7), vocab=10) == stream.block(range(9), vocab=10)[5:7]).all())
    True
    """

    key: tuple[int, int]
    stream: tuple[int, int]
    slot: int = 0
    slots: int = 1

    @classmethod
    def derive(cls, run_key: bytes, *, round: int, node: int, slot: int = 0, slots: int = 1) -> Dither:
        """Derive the stream of a node in a round from the run's key by keyed BLAKE2b; with slots, that of the round."""
        validation.integer("round", round, most=2**32 - 1)
        validation.integer("node", node, most=2**32 - 1)
        validation.integer("slots", slots, least=1, most=MAX_SLOTS)
        validation.integer("slot", slot, most=slots - 1)
        message = struct.pack("<II", round, node) if slots == 1 else struct.pack("<I", round)
        digest = hashlib.blake2b(message, key=run_key, digest_size=16, person=b"fpld dither v2").digest()
        k0, k1, s0, s1 = struct.unpack("<4I", digest)
        return cls((k0, k1), (s0, s1), slot, slots)

    @classmethod
    def of(cls, plan: Plan) -> Dither:
        """Derive the stream of a plan."""
        return cls.derive(plan.run_key, round=plan.round, node=plan.node, slot=plan.slot, slots=plan.slots)

    def keys(self, contexts: range) -> Words:
        """Return the four key words of each context, [len(contexts), 4]: Philox of the counter (0, context, stream)."""
        return _keys(self.key, self.stream, contexts)

    def words(self, contexts: range, count: int) -> Words:
        """Return the first `count` words of each context, before any slot: 32 random bits each."""
        keys = self.keys(contexts)
        index = np.arange(count, dtype=np.uint32)
        out = np.empty((len(contexts), count), np.uint32)
        stride = max(_BLOCK // count, 1)
        for start in range(0, len(out), stride):
            out[start : start + stride] = mix(index, keys[start : start + stride, None])
        return out

    def phases(self) -> Units:
        """Return what this slot adds under each of the permutations, [256]: floor(65536 pi(slot) / slots)."""
        row: Units = phases(self.key, self.stream, self.slots)[self.slot]
        return row

    def units(self, contexts: range, vocab: int) -> Units:
        """Return the 16-bit numbers of a block of contexts, [len(contexts), vocab].

        Coordinate v is the lower (v even) or upper (v odd) half of word v div 2, plus the phase of permutation
        (v + fourth key word) mod 256, modulo 2^16.
        """
        pairs = self.words(contexts, -(-vocab // 2)).astype("<u4", copy=False)
        units: Units = pairs.view("<u2")[:, :vocab]
        if self.slots > 1:
            first = self.keys(contexts)[:, 3:] % np.uint32(PERMUTATIONS)
            units += self.phases()[(first + np.arange(vocab, dtype=np.uint32)) % np.uint32(PERMUTATIONS)]
        return units

    def block(self, contexts: range, vocab: int) -> Floats:
        """Return the dither of a block of contexts in units of a step, in (-1/2, 1/2)."""
        return uniform_dither(self.units(contexts, vocab))


@lru_cache(maxsize=8)
def _keys(key: tuple[int, int], stream: tuple[int, int], contexts: range) -> Words:
    """Return the key words of contexts; cached, since nodes that share a stream need the same ones."""
    counter = np.zeros((len(contexts), 4), np.uint32)
    counter[:, 1] = np.arange(contexts.start, contexts.stop, contexts.step, dtype=np.int64)
    counter[:, 2:] = stream
    words = philox4x32(counter, key)
    words.flags.writeable = False
    return words


@lru_cache(maxsize=4)
def phases(key: tuple[int, int], stream: tuple[int, int], slots: int) -> Units:
    """Return the phase of every slot under every permutation, [slots, 256].

    The permutations are shuffled by Fisher and Yates: from the last place i down to 1, swap with the place
    (word (i + 1)) >> 32, where the word of permutation r is word r mod 4 of Philox at the counter (i, r div 4, stream).
    """
    # In pieces and in 16 bits: a task may name as many slots as there are numbers of them.
    places = np.empty((slots, PERMUTATIONS), np.uint16)
    result = np.empty((slots, PERMUTATIONS), np.uint16)
    for rows in split(slots, PERMUTATIONS, _PHASES_AT_ONCE):
        some = np.arange(rows.start, rows.stop, dtype=np.uint64)[:, None]
        counter = np.empty((len(some), PERMUTATIONS // 4, 4), np.uint32)
        counter[..., 0] = some
        counter[..., 1] = np.arange(PERMUTATIONS // 4)
        counter[..., 2:] = stream
        words = philox4x32(counter, key).reshape(len(some), PERMUTATIONS)
        places[rows.start : rows.stop] = words * (some + np.uint64(1)) >> _HALF
        result[rows.start : rows.stop] = some
    each = np.arange(PERMUTATIONS)
    for i in range(slots - 1, 0, -1):
        other = places[i]
        last = result[i].copy()
        result[i] = result[other, each]
        result[other, each] = last
    for rows in split(slots, PERMUTATIONS, _PHASES_AT_ONCE):
        order = result[rows.start : rows.stop].astype(np.uint32)
        result[rows.start : rows.stop] = (order << np.uint32(16)) // np.uint32(slots)
    result.flags.writeable = False
    return result
