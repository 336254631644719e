"""Sampled labels decoded by what docs/wire.md says of them, in plain Python: nothing of the codec is used."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs.dither import mix, philox4x32

if TYPE_CHECKING:
    from fpld import Plan

ABOVE = (21000, 20000, 18000, 16000, 14500, 12500, 10000, 8000, 5500, 4000, 2500, 1650, 1000, 600, 350, 220, 130)
BELOW = (42000, 39000, 38000, 36000, 32000, 27000, 20000, 8000, 300, 30)
MANTISSAS = (22, 63, 100, 134, 165, 193, 220, 244)
WHOLE = 1 << 48


class Decisions:
    """Read decisions, and learn."""

    def __init__(self, code: bytes) -> None:
        self.code = code
        self.width = WHOLE
        self.at = 6
        self.start = 0
        self.ahead = int.from_bytes(code[:6].ljust(6, b"\0"), "big")
        pairs = [(a, b) for a in ABOVE for b in BELOW]
        either = [a + b - (a * b >> 16) for a, b in pairs]
        signs = [(b << 16) // (a + b) for a, b in pairs]
        first = [q for q in either for _ in range(3)] + either + signs + [1 << 14] * 1248 + [1 << 15] * 169
        self.probabilities = [64 * q for q in first]
        self.counts = [2] * 850 + [0] * (len(first) - 850)

    def decide(self, probability: int) -> int:
        """Read a decision with a probability in 2^-16."""
        cut = (self.width >> 16) * probability
        one = self.ahead < cut
        self.width = cut if one else self.width - cut
        self.start, self.ahead = (self.start, self.ahead) if one else (self.start + cut, self.ahead - cut)
        while self.width < 1 << 40:
            byte = self.code[self.at] if self.at < len(self.code) else 0
            self.width = self.width << 8
            self.ahead = self.ahead << 8 | byte
            self.at = self.at + 1
            self.start = (self.start << 8) % WHOLE
        return int(one)

    def bit(self, place: int) -> int:
        """Read the decision of a place."""
        q = self.probabilities[place]
        c = self.counts[place]
        one = self.decide(min(max(q >> 6, 24), 65512))
        rate = min((1 << 17) // (2 * c + 3), 1 << 15)
        self.probabilities[place] = q + (((1 << 22) - q) * rate >> 16) if one else q - (q * rate >> 16)
        self.counts[place] = min(c + 1, 250)
        return one

    def number(self, place: int, octaves: int) -> int:
        """Read a number."""
        e = 0
        while e < octaves - 1 and self.bit(place + e):
            e += 1
        successor = 1
        for k in range(e):
            successor = successor << 1 | (self.decide(1 << 15) if k else self.bit(place + octaves + e))
        return successor - 1

    def signed(self, sign: int, size: tuple[int, int]) -> int:
        """Read a symbol that is not zero, its size at one of two places."""
        below = self.bit(sign)
        return (1 + self.number(size[below], 26)) * (-1 if below else 1)

    def ended(self) -> bool:
        """Return whether the mark comes, and then nothing but the shortest end."""
        mark = [self.decide(1 << 15) for _ in range(16)]
        for j in range(7):
            unit = 1 << (48 - 8 * j)
            least = -(-self.start // unit) * unit
            if least < self.start + self.width:
                break
        whole = self.at >= len(self.code) and not self.code.endswith(b"\0")
        return whole and mark == [int(c) for c in f"{0xF1D5:016b}"] and self.start + self.ahead == least


def draws(plan: Plan) -> np.ndarray:
    """Return the draws w [m, V]."""
    shared = plan.slots > 1
    message = struct.pack("<II", plan.round, plan.slots if shared else plan.node)
    person = b"fpld strata" if shared else b"fpld samples"
    digest = hashlib.blake2b(message, key=plan.run_key, digest_size=16, person=person).digest()
    k0, k1, s0, s1 = struct.unpack("<4I", digest)
    result = np.empty(plan.shape, np.int64)
    for context in range(plan.contexts):
        a, b, c, d = philox4x32(np.array([0, context, s0, s1], np.uint32), (k0, k1))
        for v in range(plan.vocab):
            word = int(mix(np.array([v // 2], np.uint32), np.array([a, b, c]))[0]) >> 16 * (v % 2)
            upper = (word + 65536 * plan.slot // plan.slots) % 65536
            result[context, v] = upper << 16 | int(mix(np.array([v], np.uint32), np.array([d, c, b]))[0]) >> 16
    return result


def logarithm(x: int) -> int:
    """Return log2(x / 2^32) in 1/256 of an octave."""
    e = x.bit_length() - 1
    return 256 * (e - 32) + MANTISSAS[(8 * x >> e) - 8]


def steps(payload: bytes, plan: Plan) -> np.ndarray:
    """Return the step number of each context [m]."""
    (field,) = struct.unpack_from("<H", payload)
    numbers = np.full(plan.contexts, field % (1 << 15))
    if field >> 15:
        numbers[: struct.unpack_from("<I", payload, 6)[0]] -= 1
    return numbers


def possible(found: np.ndarray, payload: bytes, plan: Plan) -> bool:
    """Return whether probabilities from 0 to 1 give all of these symbols [m, V]."""
    assert plan.prior is not None
    powers = np.exp(plan.prior.block(range(plan.contexts)) / 8)
    pi = powers / powers.sum(axis=1, keepdims=True)
    tau = 2.0 ** ((steps(payload, plan)[:, None] - 6144) / 256)
    u = (draws(plan) + 0.5) / 2**32
    slack = 2.0**-16
    least = np.floor(u - (1 + slack) * pi / tau)
    most = np.floor(u + (1 + slack - pi) / tau)
    return bool(((least <= found) & (found <= most)).all())


def symbols(payload: bytes, plan: Plan) -> np.ndarray:
    """Return the symbols s [m, V] of a payload with a head."""
    assert plan.prior is not None
    levels = -plan.prior.block(range(plan.contexts)).astype(int)
    w = draws(plan)
    ratios = ((47274 * levels + 512) >> 10) + steps(payload, plan)[:, None] - 6144
    coder = Decisions(payload[10 if payload[1] >> 7 else 6 :])
    result = np.zeros(plan.shape, int)
    escape = coder.number(2151, 58)
    for row in range(plan.contexts):
        some = 0
        expected = 0
        for v in range(plan.vocab):
            ratio = int(ratios[row, v])
            draw = int(w[row, v])
            plus = min(max(((ratio + logarithm((1 << 32) - draw)) >> 7) + 8, 0), 16)
            minus = min(max(((ratio + logarithm(draw + 1)) >> 7) + 8, 0), 9)
            if (plus, minus) == (16, 9):
                continue
            k = 10 * plus + minus
            scaled = (some + 1) << 24
            usual = expected + (1 << 22)
            one = coder.bit(3 * k + (0 if scaled < 3 * usual else 1 if scaled <= 6 * usual else 2))
            some = some + one
            expected = expected + coder.probabilities[510 + k]
            coder.probabilities[510 + k] += ((one << 22) - coder.probabilities[510 + k]) >> 7
            if one:
                size = 850 + 104 * min(max((512 - ratio) >> 8, 0), 11)
                result[row, v] = coder.signed(680 + k, (size, size + 52))
        while escape < (row + 1) * plan.vocab:
            result[row, escape % plan.vocab] = coder.signed(2098, (2099, 2099))
            escape += 1 + coder.number(2151, 58)
    assert escape == plan.contexts * plan.vocab
    assert coder.ended()
    return result
