"""The dither is a published generator, the same on every machine, and uniform."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from scipy import stats

from fpld import InputError
from fpld.codecs.dither import Dither, philox4x32, uniform_dither
from fpld.paper.quantize import Quantizer, paper_quantizer, wire_quantizer

# Random123's known answers for philox4x32-10: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


GOLDEN = [
    "2792 2b7b c86e 0c69 080a",
    "7b27 1e91 4f3b a478 b595",
]
GOLDEN_SLOT_2_OF_5 = [
    "9d94 8e70 3222 daa1 435c",
    "08e4 2229 cfe6 8e59 a386",
]


def parse(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_published_vectors(counter: str, key: str, output: str) -> None:
    k0, k1 = parse(key)
    assert philox4x32(np.array(parse(counter), np.uint32), (k0, k1)).tolist() == parse(output)


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator in Python's integers, as its paper has it."""
    c = list(counter)
    k = list(key)
    for _ in range(10):
        p0 = 0xD2511F53 * c[0]
        p1 = 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_arrays_equal_python_integers() -> None:
    counters = np.random.default_rng(1).integers(0, 2**32, (50, 4), dtype=np.uint32)
    found = philox4x32(counters, (0xDEADBEEF, 0x12345678))
    expected = [plain_philox(row, [0xDEADBEEF, 0x12345678]) for row in counters.tolist()]
    assert found.tolist() == expected


STRATA = [({}, GOLDEN), ({"slot": 2, "slots": 5}, GOLDEN_SLOT_2_OF_5)]


@pytest.mark.parametrize(("strata", "golden"), STRATA)
def test_golden_units(strata: dict[str, int], golden: list[str]) -> None:
    units = Dither.derive(bytes(range(16)), round=7, node=3, **strata).units(range(1000, 1002), vocab=5)
    assert [" ".join(f"{unit:04x}" for unit in row) for row in units.tolist()] == golden


def plain_mix(j: int, key: list[int]) -> int:
    """The hash of a position in Python's integers."""
    low = 0xFFFFFFFF
    h = (j * 0x9E3779B9 + key[0]) & low
    h = ((h ^ h >> 16) * 0x21F0AAAD) & low
    h ^= key[1]
    h = ((h ^ h >> 15) * 0xD35A2D97) & low
    h = (h + key[2]) & low
    return h ^ h >> 15


def plain_permutation(r: int, slots: int, key: list[int], stream: list[int]) -> list[int]:
    """Fisher and Yates, one permutation."""
    order = list(range(slots))
    for i in range(slots - 1, 0, -1):
        j = plain_philox([i, r // 4, *stream], key)[r % 4] * (i + 1) >> 32
        order[i], order[j] = order[j], order[i]
    return order


@pytest.mark.parametrize(("strata", "golden"), STRATA)
def test_golden_units_by_hand(strata: dict[str, int], golden: list[str]) -> None:
    """The same numbers from the definition alone, as docs/wire.md has it."""
    message = struct.pack("<I", 7) if strata else struct.pack("<II", 7, 3)
    digest = hashlib.blake2b(message, key=bytes(range(16)), digest_size=16, person=b"fpld dither v2").digest()
    k0, k1, s0, s1 = struct.unpack("<4I", digest)
    for context, row in zip((1000, 1001), golden, strict=True):
        key = plain_philox([0, context, s0, s1], [k0, k1])
        units = [plain_mix(v // 2, key) >> 16 * (v % 2) & 0xFFFF for v in range(5)]
        if strata:
            for v in range(5):
                order = plain_permutation((v + key[3]) % 256, 5, [k0, k1], [s0, s1])
                units[v] = (units[v] + (order[2] << 16) // 5) % 2**16
        assert units == parse(row)


def test_any_block_costs_only_itself_and_agrees_with_the_whole() -> None:
    stream = Dither.derive(bytes(16), round=1, node=0)
    whole = stream.units(range(40), vocab=1001)
    assert np.array_equal(stream.units(range(17, 29), vocab=1001), whole[17:29])
    assert stream.units(range(4_000_000_000, 4_000_000_001), vocab=3).shape == (1, 3)


@pytest.mark.parametrize("change", [{"round": 2}, {"node": 1}, {"run_key": b"another run key!"}])
def test_streams_of_other_rounds_nodes_and_runs_differ(change: dict[str, object]) -> None:
    base: dict[str, object] = {"run_key": bytes(16), "round": 1, "node": 0}
    one, other = (Dither.derive(**fields).words(range(10), 100) for fields in (base, {**base, **change}))  # type: ignore[arg-type]
    assert (one == other).mean() < 0.01


def test_dither_is_symmetric_and_exact() -> None:
    units = np.array([0, 1, 2**15 - 1, 2**15, 2**16 - 1], np.uint16)
    dither = uniform_dither(units)
    assert (dither == -uniform_dither(~units)).all()
    assert (np.abs(dither) < 0.5).all()
    assert (dither == dither.astype(np.float32)).all()
    assert [float(u) * 2**17 for u in dither] == [2 * int(w) + 1 - 2**16 for w in units]


@pytest.mark.parametrize("strata", [{}, {"slot": 3, "slots": 7}])
def test_dither_is_uniform_and_uncorrelated(strata: dict[str, int]) -> None:
    """Eight tests at a false-alarm rate of 1e-4 each, on a fixed seed."""
    u = np.stack([Dither.derive(bytes(16), round=r, node=0, **strata).block(range(300), 1000) for r in (1, 2)])
    assert stats.kstest(u[0].ravel() + 0.5, "uniform").pvalue > 1e-4
    limit = stats.norm.isf(1e-4 / 2) / np.sqrt(u[0].size)
    for lag in (1, 2, 256):
        one = u[0, :, lag:]
        other = u[0, :, :-lag]
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < limit * 1.2
    for one, other in ((u[0], u[1]), (u[0, 1:], u[0, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < limit * 1.01
    counts = np.histogram2d(u[0, :, ::2].ravel(), u[0, :, 1::2].ravel(), bins=16)[0]  # both halves of a word
    assert stats.chisquare(counts.ravel()).pvalue > 1e-4
    bits = np.unpackbits(Dither.derive(bytes(16), round=1, node=0).words(range(300), 1000).view(np.uint8))
    assert abs(bits.mean() - 0.5) < stats.norm.isf(1e-4 / 2) * 0.5 / np.sqrt(bits.size)


def strata(slots: int, contexts: int = 60, vocab: int = 700) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The dither of all slots, [K, m, V]."""
    streams = [Dither.derive(bytes(16), round=1, node=9, slot=slot, slots=slots) for slot in range(slots)]
    return np.stack([stream.block(range(contexts), vocab) for stream in streams])


@pytest.mark.parametrize("slots", [2, 3, 8, 37])
def test_slots_share_a_regular_grid_in_an_order_that_changes(slots: int) -> None:
    u = strata(slots)
    gaps = np.diff(np.sort(u, axis=0), axis=0)
    assert np.abs(gaps - 1 / slots).max() <= 2.0**-16
    order = u.argsort(axis=0)
    relative = (order - order[:1]) % slots  # a shift of all is not another order
    assert slots <= 2 or (relative[1] != relative[1, 0, 0]).mean() > 0.3
    # Every slot takes every place about equally often: 256 random permutations.
    places = np.stack([np.bincount(order[place].ravel(), minlength=slots) for place in range(slots)])
    assert np.abs(places / order[0].size - 1 / slots).max() < 0.1


@pytest.mark.parametrize("quantizer", [paper_quantizer(1.0, 3.0), wire_quantizer(1.0, 9)])
@pytest.mark.parametrize("slots", [2, 4, 16])
def test_the_mean_of_nodes_that_agree_has_a_kth_of_the_variance(quantizer: Quantizer, slots: int) -> None:
    u = strata(slots)
    values = np.random.default_rng(0).uniform(-1, 1, u.shape[1:])
    error = (quantizer(np.broadcast_to(values, u.shape), u) - values).mean(axis=0)
    assert float(error.var() / quantizer.variance) == pytest.approx(1 / slots**2, rel=0.03)
    assert abs(error.mean()) < stats.norm.isf(1e-4 / 2) * np.sqrt(error.var() / error.size)


@pytest.mark.parametrize("apart", [0.0, 0.25, 0.37, 0.5])
def test_the_mean_stays_unbiased_when_nodes_drop_out(apart: float) -> None:
    """Three of eight nodes answer, their values `apart` steps from each other."""
    slots = 8
    quantizer = paper_quantizer(1.0, 3.0)
    u = strata(slots)[[1, 4, 6]]
    base = np.random.default_rng(0).uniform(-0.7, 0.7, u.shape[1:])
    values = np.stack([base + k * apart * quantizer.step for k in range(3)])
    error = (quantizer(values, u) - values).mean(axis=0)
    assert abs(error.mean()) < stats.norm.isf(1e-4 / 2) * np.sqrt(error.var() / error.size)
    # At worst a little more than of independent nodes, far from three times (aligned errors).
    assert error.var() < 1.35 * quantizer.variance / 3


def test_nodes_that_differ_lose_nothing_on_average() -> None:
    u = strata(8)
    values = np.random.default_rng(1).uniform(-1, 1, u.shape)
    quantizer = paper_quantizer(1.0, 3.0)
    error = (quantizer(values, u) - values).mean(axis=0)
    assert float(error.var() / quantizer.variance) == pytest.approx(1 / 8, rel=0.03)


@pytest.mark.parametrize(
    "bad", [{"round": -1}, {"node": 2**32}, {"round": 1.0}, {"slots": 0}, {"slot": 1}, {"slots": 2**16 + 1}]
)
def test_bad_counters_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        Dither.derive(bytes(16), **{"round": 1, "node": 0, **bad})  # type: ignore[arg-type]
