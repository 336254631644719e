"""The dither is a published generator, the same on every machine, and uniform."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from scipy import stats

from fpld import Dither, InputError
from fpld.dither import philox4x32, uniform

# Random123's known answers for philox4x32-10: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


GOLDEN = [
    "5e4492b5 d2aeb8f2 2919974d 034f177d 46bd223d",
    "cf6ef47c 55882fba c446d812 b359e619 991122e3",
]


def parse(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_published_vectors(counter: str, key: str, output: str) -> None:
    k0, k1 = parse(key)
    assert philox4x32(np.array(parse(counter), np.uint32), (k0, k1)).tolist() == parse(output)


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator in Python's integers, as its paper has it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_arrays_equal_python_integers() -> None:
    counters = np.random.default_rng(1).integers(0, 2**32, (50, 4), dtype=np.uint32)
    found = philox4x32(counters, (0xDEADBEEF, 0x12345678))
    expected = [plain_philox(row, [0xDEADBEEF, 0x12345678]) for row in counters.tolist()]
    assert found.tolist() == expected


def test_golden_words() -> None:
    words = Dither.derive(bytes(range(16)), round=7, node=3).words(range(1000, 1002), vocab=5)
    assert [" ".join(f"{word:08x}" for word in row) for row in words.tolist()] == GOLDEN


def test_golden_words_by_hand() -> None:
    """The same words from the definition alone: BLAKE2b for the key, then the counter (v div 4, context, stream)."""
    digest = hashlib.blake2b(
        struct.pack("<II", 7, 3), key=bytes(range(16)), digest_size=16, person=b"fpld dither v1"
    ).digest()
    k0, k1, s0, s1 = struct.unpack("<4I", digest)
    for context, row in zip((1000, 1001), GOLDEN, strict=True):
        words = [word for quad in (0, 1) for word in plain_philox([quad, context, s0, s1], [k0, k1])]
        assert words[:5] == parse(row)


def test_any_block_costs_only_itself_and_agrees_with_the_whole() -> None:
    stream = Dither.derive(bytes(16), round=1, node=0)
    whole = stream.words(range(40), vocab=1001)
    assert np.array_equal(stream.words(range(17, 29), vocab=1001), whole[17:29])
    assert stream.words(range(4_000_000_000, 4_000_000_001), vocab=3).shape == (1, 3)


@pytest.mark.parametrize("change", [{"round": 2}, {"node": 1}, {"run_key": b"another run key!"}])
def test_streams_of_other_rounds_nodes_and_runs_differ(change: dict[str, object]) -> None:
    base: dict[str, object] = {"run_key": bytes(16), "round": 1, "node": 0}
    one, other = (Dither.derive(**fields).words(range(10), 100) for fields in (base, {**base, **change}))  # type: ignore[arg-type]
    assert (one == other).mean() < 0.01


def test_dither_is_symmetric_and_exact() -> None:
    words = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    dither = uniform(words)
    assert (dither == -uniform(~words)).all()
    assert (np.abs(dither) < 0.5).all()
    assert [float(u) * 2**33 for u in dither] == [2 * int(w) + 1 - 2**32 for w in words]


def test_dither_is_uniform_and_uncorrelated() -> None:
    """Four tests at a false-alarm rate of 1e-4 each, on a fixed seed."""
    u = np.stack([Dither.derive(bytes(16), round=r, node=0).block(range(300), 1000) for r in (1, 2)])
    assert stats.kstest(u[0].ravel() + 0.5, "uniform").pvalue > 1e-4
    limit = stats.norm.isf(1e-4 / 2) / np.sqrt(u[0].size)
    for one, other in ((u[0], u[1]), (u[0, :, 1:], u[0, :, :-1]), (u[0, 1:], u[0, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < limit * 1.01


@pytest.mark.parametrize("bad", [{"round": -1}, {"node": 2**32}, {"round": 1.0}])
def test_bad_counters_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        Dither.derive(bytes(16), **{"round": 1, "node": 0, **bad})  # type: ignore[arg-type]
