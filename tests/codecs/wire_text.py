"""Text decoded by what docs/wire.md says of it, in plain Python: nothing of the codec is used."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import exp

from tests.codecs.wire_samples import Decisions

CLASS_ENDS = ((0, 3, 19), (0, 2, 11), (0, 2, 255))
LOGISTIC = [round(2**16 / (1 + exp(-(i - 48) / 4))) for i in range(97)]


def squash(x: int) -> int:
    """Return the probability of an input, in 2^-16."""
    i, r = divmod(min(max(x, -3072), 3071) + 3072, 64)
    return (LOGISTIC[i] * (64 - r) + LOGISTIC[i + 1] * r) // 64


SQUASHED = [squash(x) for x in range(-3072, 3072)]


@cache
def stretch(a: int) -> int:
    """Return the largest input whose probability is at most 16 a + 8."""
    return max(x for x in range(-3072, 3072) if SQUASHED[x + 3072] <= 16 * a + 8)


def mixed(x: int, y: int) -> int:
    """Return H(x, y)."""
    u = 0x2545F491 * x + 0x1E35A7BD * y
    z = 0x2C1B3C6D * ((u ^ (u >> 31)) % 2**31)
    return (z ^ (z >> 29)) % 2**31


class Models:
    """Predict bits, and learn from them."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.cells: dict[tuple[int, int], tuple[int, int]] = defaultdict(lambda: (1 << 21, 0))
        self.weights: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [1 << 15] * 4)

    def bit(self, decisions: Decisions, hashes: list[int], prefix: int) -> int:
        """Read the next bit of a token."""
        keys = [(j, mixed(h, prefix) % self.places) for j, h in enumerate(hashes)]
        inputs = [stretch(q >> 10) if c else 0 for q, c in map(self.cells.__getitem__, keys)]
        counts = [self.cells[key][1] for key in keys[1:]]
        classes = tuple(sum(c > end for end in ends) for c, ends in zip(counts, CLASS_ENDS, strict=True))
        weights = self.weights[classes]
        total = sum(v * x for v, x in zip(weights, inputs, strict=True))
        t = min(max(squash(total >> 16), 24), 65512)
        one = decisions.decide(t)
        for j, (key, x) in enumerate(zip(keys, inputs, strict=True)):
            weights[j] += (6 * x * ((one << 16) - t) + (1 << 17)) >> 18
            q, c = self.cells[key]
            rate = min((1 << 17) // (2 * c + 3), 1 << 15)
            q = q + (((1 << 22) - q) * rate >> 16) if one else q - (q * rate >> 16)
            self.cells[key] = q, min(c + 1, 250)
        return one


def decoded(code: bytes, first: list[int], length: int, vocab: int) -> list[list[int]]:
    """Return the sequences of a code; raise ValueError if it is none."""
    bits = (vocab - 1).bit_length()
    digits = max(4 * bits * len(first) * length, 1 << 10).bit_length()
    models = Models(1 << min(digits, 22))
    decisions = Decisions(code)
    out = []
    for token in first:
        sequence = [token]
        for _ in range(length - 1):
            t1, t2, t3 = ([token + 1 for token in reversed(sequence)] + [0, 0])[:3]
            hashes = [0, mixed(t1, 1)]
            hashes.append(mixed(hashes[1], t2 + 2))
            hashes.append(mixed(hashes[2], t3 + 3))
            prefix = 1
            for _ in range(bits):
                prefix = prefix << 1 | models.bit(decisions, hashes, prefix)
            sequence.append(prefix - (1 << bits))
        out.append(sequence)
    if not decisions.ended() or max(map(max, out)) >= vocab:
        raise ValueError("no code of a text")
    return out
