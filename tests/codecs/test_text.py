"""The text code: round trip, golden bytes, hostile bytes, and its length beside the entropy of a known source."""

from __future__ import annotations

import time
from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpld.codecs import text
from fpld.codecs.text import decode_tokens, encode_tokens
from fpld.errors import BudgetError, FrameError, InputError
from tests.codecs import wire_text
from tests.helpers import without_numba

VOCABS = [2, 3, 16, 1000, 1024, 50257, 65535, 65536]
MANY_BYTES = 1 << 16


def sequences_of(vocab: int, count: int, length: int, *, kinds: int, seed: int) -> np.ndarray:
    """Return sequences that hold at most so many kinds of tokens, the highest of the vocabulary among them."""
    rng = np.random.default_rng(seed)
    tokens = np.append(rng.integers(vocab, size=kinds), vocab - 1)
    return rng.choice(tokens, (count, length)).astype(np.int32)


@settings(max_examples=150)
@given(
    st.sampled_from(VOCABS) | st.integers(2, 65536),
    st.integers(1, 9),
    st.integers(1, 40),
    st.sampled_from([1, 3, 300]),
    st.integers(0, 2**32 - 1),
)
def test_round_trip(vocab: int, count: int, length: int, kinds: int, seed: int) -> None:
    sequences = sequences_of(vocab, count, length, kinds=kinds, seed=seed)
    code = encode_tokens(sequences, vocab, capacity=MANY_BYTES)
    decoded = decode_tokens(code, sequences[:, 0], length, vocab)
    assert np.array_equal(decoded, sequences)
    assert encode_tokens(decoded, vocab, capacity=len(code)) == code
    if code:
        with pytest.raises(BudgetError):
            encode_tokens(sequences, vocab, capacity=len(code) - 1)


def test_of_one_token_a_sequence_nothing_but_the_end_marker_is_coded() -> None:
    codes = {encode_tokens(np.full((count, 1), 7), 1024, capacity=8) for count in (1, 5)}
    assert codes == {bytes.fromhex("0e2a")}


GOLDEN = [(2, 3, 9), (1024, 2, 8), (65536, 1, 5), (700, 4, 150)]  # vocabulary, sequences, length
CODES = [
    "046253",
    "3f82ad873d206662300f21236682fafbf55bed3369",
    "e0fe614e4e2bd3ecb290",
    "c4aeb606d90d9ef1e687aa284c76a8ad4d8b0e793ed2ab1113024303557d07cd14a9a8d8c6da0a3464eda5d4ac6fc065bb01adf60911e763627e276fe6f2bfaf0a7f3bc7905a4e8974b02afcc84162ac3f4e861559",
]


def golden_text(vocab: int, count: int, length: int) -> np.ndarray:
    k = np.arange(count * length) % 53
    return ((7919 * k * k + 13 * k + 5) % vocab).astype(np.int32).reshape(count, length)


def small() -> list[str]:
    """Return codes of texts that differ in all that a code depends on, in hexadecimal; the last text repeats."""
    return [encode_tokens(golden_text(*sizes), sizes[0], capacity=400).hex() for sizes in GOLDEN]


def test_golden_bytes() -> None:
    assert small() == CODES


@pytest.mark.parametrize(("vocab", "count", "length"), GOLDEN)
def test_the_page_alone_is_enough_to_decode(vocab: int, count: int, length: int) -> None:
    code = bytes.fromhex(CODES[GOLDEN.index((vocab, count, length))])
    sequences = golden_text(vocab, count, length)
    assert wire_text.decoded(code, sequences[:, 0].tolist(), length, vocab) == sequences.tolist()


@pytest.mark.slow
def test_without_numba_the_bytes_are_the_same() -> None:
    assert without_numba("tests.codecs.test_text", "small") == small()


def test_the_tables_follow_their_formulas() -> None:
    """Each entry is the logistic function in 2^-16, rounded; the inverse table is that of the interpolated one."""
    assert text._LOGISTIC.tolist() == [round(65536 / (1 + exp(-(k - 48) / 4))) for k in range(97)]
    squashed = [text._squash_plain(x) for x in range(-3072, 3072)]
    assert [text._squash(np.int64(x)) for x in (-3072, -100, 0, 77, 3071)] == [
        squashed[x + 3072] for x in (-3072, -100, 0, 77, 3071)
    ]
    for p in range(4096):
        x = int(text._STRETCH[p])
        assert squashed[x + 3072] <= 16 * p + 8
        assert x == 3071 or squashed[x + 1 + 3072] > 16 * p + 8
        # Beside the exact inverse: the interpolation and the rounding of entries are worth up to 3 units.
        exact = 256 * log((p + 0.5) / (4095.5 - p))
        assert abs(x - exact) < 3 + 0.15 * max(abs(exact) - 1300, 0)


@pytest.mark.parametrize("vocab", [16, 64])
def test_the_length_is_near_the_entropy_of_a_markov_source(vocab: int) -> None:
    """The rate is at most 0.15 bits a token above the entropy rate, which includes what learning 2^15 tokens costs.

    No code beats the empirical log-likelihood of the source by more than a few bits, so there is a lower bound too: a
    code that is shorter by 40 bits has a chance of 2^-40.
    """
    rng = np.random.default_rng(vocab)
    chances = np.full((vocab, vocab), 0.02 / vocab)
    for row in chances:
        row[rng.choice(vocab, 4, replace=False)] += 0.98 * rng.dirichlet(np.ones(4))
    tokens = np.zeros(1 << 15, np.int32)
    draws = rng.random(tokens.size)
    cumulated = chances.cumsum(axis=1)
    for t in range(1, tokens.size):
        tokens[t] = min(np.searchsorted(cumulated[tokens[t - 1]], draws[t]), vocab - 1)
    sequences = tokens.reshape(-1, 64)
    bits = 8 * len(encode_tokens(sequences, vocab, capacity=MANY_BYTES))
    likelihood = -np.log2(chances[sequences[:, :-1], sequences[:, 1:]]).sum()
    assert likelihood - 40 < bits < likelihood + 0.15 * (sequences.size - len(sequences))


def test_tokens_that_surprise_most_cost_no_more_than_the_bound() -> None:
    """The bound of `encode_text`, on a text that repeats one token until it is certain, and then another."""
    from fpld.protocol.written import encode_text

    text = np.repeat(np.array([0, 65535, 21845, 43690], np.int32), 400)[None]
    assert np.array_equal(decode_tokens(encode_text(text, 65536), text[:, 0], 1600, 65536), text)
    changing = np.where(np.arange(4000) % 97 == 96, 65535, 0).astype(np.int32)[None]
    assert len(encode_text(changing, 65536)) < 4 * changing.size


def test_cut_and_changed_codes_are_refused_or_another_text() -> None:
    """A code that still ends in the end marker after a change has a chance of 2^-16; such a one is a text as well."""
    sequences = sequences_of(1000, 6, 20, kinds=300, seed=4)
    first = sequences[:, 0]
    code = encode_tokens(sequences, 1000, capacity=MANY_BYTES)
    taken = 0
    rng = np.random.default_rng(5)
    tries = [code[:end] for end in range(len(code))] + [code + bytes([k]) for k in range(256)]
    for _ in range(2000):
        changed = bytearray(code)
        changed[int(rng.integers(len(code)))] ^= int(rng.integers(1, 256))
        tries.append(bytes(changed))
    tries += [rng.bytes(int(rng.integers(300))) for _ in range(2000)]
    for data in tries:
        try:
            decoded = decode_tokens(memoryview(data), first, 20, 1000)
        except FrameError:
            continue
        taken += 1
        assert decoded.max() < 1000
        assert encode_tokens(decoded, 1000, capacity=MANY_BYTES) == data
    # Of 4,368 codes 0.07 are expected by chance: more than three have a chance below 1e-5.
    assert taken <= 3


def test_another_number_of_sequences_or_another_length_is_refused() -> None:
    sequences = sequences_of(1000, 6, 20, kinds=300, seed=4)
    code = encode_tokens(sequences, 1000, capacity=MANY_BYTES)
    for count, length in ((5, 20), (6, 19), (6, 21)):
        with pytest.raises(FrameError):
            decode_tokens(code, sequences[:count, 0], length, 1000)


def test_hostile_bytes_take_no_longer_than_the_text_that_was_asked_for() -> None:
    """A power of two has no id outside the vocabulary, so the decoder runs to the end: 2^16 tokens in a few seconds."""
    decode_tokens(
        encode_tokens(np.zeros((1, 2), np.int32), 1024, capacity=64), np.zeros(1, np.int32), 2, 1024
    )  # compiled
    begun = time.monotonic()
    with pytest.raises(FrameError):
        decode_tokens(np.random.default_rng(0).bytes(100), np.zeros(1024, np.int32), 64, 1024)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("sequences", "vocab"),
    [
        (np.zeros((0, 4), np.int32), 8),
        (np.zeros(4, np.int32), 8),
        (np.zeros((2, 4)), 8),
        (np.full((2, 4), 8), 8),
        (np.full((2, 4), -1), 8),
        (np.zeros((2, 4), np.int32), 1),
    ],
    ids=["none", "no matrix", "no integers", "too large", "negative", "vocabulary"],
)
def test_what_is_no_text_is_refused(sequences: np.ndarray, vocab: int) -> None:
    with pytest.raises(InputError):
        encode_tokens(sequences, vocab, capacity=100)
