"""The predictive codec's coders against constriction, a library of entropy coders: sizes on the same static models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import constriction
import numpy as np
import pytest

from fpld.codecs.predictive import tokens
from fpld.codecs.predictive.ans import write_ans
from fpld.codecs.predictive.compact_ans import write_compact_ans

if TYPE_CHECKING:
    from fpld.types import Array

COUNT = 100_000
MODELS: dict[str, list[int]] = {
    "even": [64] * 64,
    "one token takes nearly all": [tokens.ONE - 3, 1, 1, 1],
    "halves": [2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1],
    "odd": [1009, 877, 701, 499, 401, 307, 199, 103],
}


def draw(frequencies: Array, count: int) -> Array:
    return np.random.default_rng(7).choice(len(frequencies), count, p=frequencies / tokens.ONE).astype(np.int32)


def constriction_bits(symbols: Array, probabilities: Array) -> int:
    """Return the bits that constriction's coder of the same kind (rANS, 24 bits of precision) takes."""
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(symbols, constriction.stream.model.Categorical(probabilities, perfect=True))
    return int(coder.num_bits())


def code_bits(write: Any, symbols: Array, frequencies: Array) -> int:
    """Return the bits of a code of tokens without raw bits; every other token goes to the second state of `ans`."""
    below = np.cumsum(frequencies) - frequencies
    records = (
        (np.arange(symbols.size) & 1) << tokens.KIND_SHIFT
        | frequencies[symbols] << tokens.FREQUENCY_SHIFT
        | below[symbols]
    )
    size = write(records.astype(np.int64), np.empty(8 * symbols.size + 64, np.uint8))
    return 8 * (sum(size) if isinstance(size, tuple) else int(size))


@pytest.mark.parametrize("count", [0, 1, 100, COUNT])
@pytest.mark.parametrize("name", MODELS)
def test_codes_are_as_short_as_those_of_constriction(name: str, count: int) -> None:
    """But for the states with which a code begins: 64 bits of `ans`, up to two bytes of `compact_ans`."""
    frequencies = np.array(MODELS[name])
    symbols = draw(frequencies, count)
    information = float(tokens.COST[frequencies[symbols]].sum())
    slack = 1e-4 * count
    theirs = constriction_bits(symbols, frequencies / tokens.ONE)
    for write, state in ((write_ans, 64), (write_compact_ans, 16)):
        ours = code_bits(write, symbols, frequencies)
        assert information - slack <= ours <= theirs + state + slack


@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_tables_of_12_bits_cost_no_more_than_their_least_frequencies(scale: float) -> None:
    """A frequency is above count (4096 - n) / total, so a token costs at most log2(4096 / (4096 - n)) bits more."""
    models = tokens.new_models(np.array([1 << 20, 0]), 1 << 16, None, decoder=False)
    n = int(models.pace[0, 0, tokens.SIZE])
    numbers = np.minimum(np.random.default_rng(8).exponential(scale, COUNT).astype(np.int32), n - 1)
    models.tables[0, tokens.COUNTS, :n] = np.bincount(numbers, minlength=n)
    models.pace[0, 0, tokens.DUE] = models.pace[0, 0, tokens.PERIOD]
    tokens.renew_table(*models, 0, 0)
    frequencies = models.tables[0, tokens.FREQUENCIES, :n].astype(np.int64)
    assert frequencies.sum() == tokens.ONE
    assert frequencies.min() >= 1
    assert np.array_equal(models.tables[0, tokens.BELOW, :n], np.cumsum(frequencies) - frequencies)
    theirs = constriction_bits(numbers, np.bincount(numbers, minlength=n) / COUNT)  # 24 bits of precision
    most = COUNT * np.log2(tokens.ONE / (tokens.ONE - n))
    assert code_bits(write_ans, numbers, frequencies) <= theirs + most + 64
    assert code_bits(write_ans, numbers, frequencies) >= theirs - 64  # the counts themselves are the best model
