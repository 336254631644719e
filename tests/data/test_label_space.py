"""Alphabets, maps and places: what tokenizers that differ can be compared in, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.data import (
    AlphabetSize,
    ByteTokenizer,
    PlaceProbe,
    ProbeSet,
    ReaderLimits,
    Tokenizer,
    TokenStrings,
    load_probe,
)
from fpld.data.label_space import ONE, Alphabet, TokenMap, space_digest
from fpld.data.tokenizers import PretrainedTokenizer
from fpld.errors import InputError
from fpld.protocol.group_audit import last_tokens
from tests.data.spellings import TEXT, bpe, sentencepiece

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def readers() -> list[ReaderLimits]:
    tokenizers: dict[str, Tokenizer] = {
        "bpe": bpe(300),
        "small": bpe(270),
        "bytes": ByteTokenizer(),
        "sentencepiece": sentencepiece(),
    }
    return [ReaderLimits(name, TokenStrings(each), 120) for name, each in tokenizers.items()]


@pytest.fixture(scope="module")
def probe(readers: list[ReaderLimits]) -> PlaceProbe:
    return draw(readers)


def draw(readers: list[ReaderLimits], **changes: Any) -> PlaceProbe:
    options: dict[str, Any] = {"contexts": 240, "length": 8, "size": AlphabetSize(320, 8), "seed": 0}
    return PlaceProbe.draw([TEXT], readers, **(options | changes))


def test_every_tokenizer_has_a_boundary_at_every_place(probe: PlaceProbe, readers: list[ReaderLimits]) -> None:
    assert probe.sequences.shape == probe.offsets.shape == (30, 8)
    for reader in readers:
        reading = probe.read(reader.strings)
        for row, passage in enumerate(probe.passages):
            data = passage.encode()
            for place, end in zip(probe.offsets[row], reading.ends[row], strict=True):
                spelled = b"".join(reader.strings.strings[token] for token in reading.tokens[row, : end + 1])
                assert spelled == data[:place]


def test_the_symbol_that_ends_a_context_is_never_that_of_another_passage(probe: PlaceProbe) -> None:
    following = probe.following.reshape(30, 8)
    assert (following[:, -1] == -1).all()
    assert (following[:, :-1] >= 0).all()
    for row, passage in enumerate(probe.passages):
        for place, symbol in zip(probe.offsets[row, :-1], following[row], strict=False):
            assert passage.encode()[place:].startswith(probe.alphabet.symbols[symbol])
    last = last_tokens(probe.following).reshape(30, 8)
    assert (last[:, 0] == -1).all()
    assert np.array_equal(last[:, 1:], following[:, :-1])


def test_a_map_keeps_the_sum_and_agrees_with_its_definition(probe: PlaceProbe, readers: list[ReaderLimits]) -> None:
    rng = np.random.default_rng(0)
    for reader in readers:
        space = probe.read(reader.strings).space
        assert (np.bincount(space.tokens, space.shares, space.vocab) == ONE).all()
        p = rng.dirichlet(np.full(space.vocab, 0.1), 5)
        mapped = space.apply(p)
        np.testing.assert_allclose(mapped.sum(1), 1, rtol=1e-12)
        # A token goes to symbols that begin as it does, or that it begins with.
        for token, symbol in zip(space.tokens, space.symbols, strict=True):
            string = reader.strings.strings[token]
            name = probe.alphabet.symbols[symbol]
            assert string.startswith(name) or name.startswith(string)


def test_digests_tell_maps_apart_and_equal_ones_agree(probe: PlaceProbe, readers: list[ReaderLimits]) -> None:
    digests = [probe.read(reader.strings).space.digest for reader in readers]
    assert len(set(digests)) == len(readers)
    again = probe.read(TokenStrings(bpe(300))).space
    first = probe.read(readers[0].strings).space
    assert again.digest == first.digest
    assert space_digest(again, first) != space_digest(first, probe.read(readers[1].strings).space)


def test_shares_follow_from_counts_by_hand() -> None:
    alphabet = Alphabet.collect([b" hot ", b" hot ", b" hos", b" hos"], symbols=260)
    space = TokenMap.make([b" ", b" hot"], alphabet, {0: {alphabet.symbol(b" h"): 3}})
    assert [alphabet.symbols[symbol] for symbol in space.symbols] == [b" ", b" h", b" ho", b" hos", b" ho"]
    # Of " " 3 were seen before " h"; 4 more are in proportion to the public counts 0, 0, 2 and 2, each plus one.
    assert space.shares.tolist() == [4681, 32768, 14044, 14043, ONE]
    assert space.digest.hex()[:16] == "dfeff4d884b493ba"


def test_a_probe_set_comes_back_from_its_file(probe: PlaceProbe, tmp_path: Path) -> None:
    probe.save(tmp_path / "probe.json")
    again = load_probe(tmp_path / "probe.json")
    assert isinstance(again, PlaceProbe)
    assert again.digest == probe.digest
    np.testing.assert_array_equal(again.sequences, probe.sequences)
    tokens = ProbeSet(np.zeros((2, 3), np.int32), 256, ByteTokenizer().digest)
    tokens.save(tmp_path / "tokens.json")
    assert isinstance(load_probe(tmp_path / "tokens.json"), ProbeSet)


def test_changed_probe_sets_are_refused(probe: PlaceProbe, tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    probe.save(path)
    whole = json.loads(path.read_text())
    rng = np.random.default_rng(0)
    junk: list[Any] = [None, -1, 10**30, "x", [], {}, [[1, 2], [3]], 1.5, ["00"], True, [None]]
    for _ in range(150):
        changed = json.loads(json.dumps(whole))
        key = sorted(whole)[rng.integers(len(whole))]
        value = changed[key]
        if isinstance(value, list) and rng.random() < 0.6:
            value[rng.integers(len(value))] = junk[rng.integers(len(junk))]
        else:
            changed[key] = junk[rng.integers(len(junk))]
        path.write_text(json.dumps(changed))
        with pytest.raises(InputError):
            load_probe(path)


@pytest.mark.parametrize(
    "change",
    [
        {"symbols": np.array([0, 400], np.int32)},
        {"tokens": np.array([1, 0], np.int32)},
        {"tokens": np.array([0, 2], np.int32)},
        {"shares": np.array([ONE, 1], np.int32)},
        {"shares": np.array([0, ONE], np.int32)},
        {"shares": np.array([ONE], np.int32)},
        {"shares": np.array([ONE, ONE], np.int64)},
    ],
)
def test_unsound_maps_are_refused(change: dict[str, Any]) -> None:
    sound = {name: np.array(values, np.int32) for name, values in (("tokens", [0, 1]), ("symbols", [0, 3]))}
    sound["shares"] = np.array([ONE, ONE], np.int32)
    TokenMap(2, 300, **sound)
    with pytest.raises(InputError):
        TokenMap(2, 300, **(sound | change))


BYTES = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("symbols", "reason"),
    [
        ([b"", *BYTES, b"ab", b"abcd"], "prefix"),
        ([b"", *BYTES[:-1], b"ab", b"ac"], "single bytes"),
        ([b"", *BYTES[:-1], b"ab"], "single bytes"),
        ([*BYTES, b"ab"], "empty symbol"),
        ([b"", *BYTES, b"ab", b"ab"], "rise"),
        ([b"", *BYTES[::-1]], "rise"),
        ([b"", *BYTES, *(b"a" * size for size in range(2, 66))], "at most 64 bytes"),
        ([b"", *BYTES[1:]], "257 to 65536"),
    ],
)
def test_unsound_alphabets_are_refused(symbols: list[bytes], reason: str) -> None:
    names = symbols if reason == "rise" else sorted(symbols)
    with pytest.raises(InputError, match=reason):
        Alphabet(tuple(names), (0,) * len(names))


def test_counts_of_an_alphabet_are_one_each_and_small() -> None:
    names = (b"", *BYTES)
    assert len(Alphabet(names, (0,) * 257)) == 257
    for counts in ((0,) * 256, (0,) * 256 + (-1,), (0,) * 256 + (2**32,)):
        with pytest.raises(InputError, match="count"):
            Alphabet(names, counts)


def serial(**changes: Any) -> str:
    value = json.loads(sentencepiece().library_json())
    value.update(changes)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalises text"),
        ({"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}}, "does not give back"),
    ],
)
def test_tokenizers_that_lose_bytes_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        TokenStrings(PretrainedTokenizer(serial(**changes)))


def test_tokenizers_without_byte_fallback_or_of_words_are_refused() -> None:
    value = json.loads(sentencepiece().library_json())
    value["model"]["byte_fallback"] = False
    with pytest.raises(InputError, match="no byte fallback"):
        TokenStrings(PretrainedTokenizer(json.dumps(value)))
    words = {"type": "WordPiece", "unk_token": "u", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
    value = {"model": {**words, "vocab": {"u": 0, "a": 1}}, "added_tokens": []}
    with pytest.raises(InputError, match="WordPiece"):
        TokenStrings(PretrainedTokenizer(json.dumps(value)))


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    """The library takes them: its vocabulary counts tokens. A model's V may have room for them."""
    value = json.loads(bpe(270).library_json())
    name = next(reversed(value["model"]["vocab"]))
    value["model"]["vocab"][name] = 10**6
    with pytest.raises(InputError, match="largest id, 1000000; it is 270"):
        PretrainedTokenizer(json.dumps(value))
    assert PretrainedTokenizer(json.dumps(value), vocab=10**6 + 1).encode("the").max() <= 10**6


def test_too_little_text_names_who_cannot_read_it(readers: list[ReaderLimits]) -> None:
    with pytest.raises(InputError, match="all models can read"):
        draw(readers, contexts=10**6)
    short = [readers[0], ReaderLimits("the node with a short memory", readers[2].strings, 4)]
    with pytest.raises(InputError, match="short memory"):
        draw(short)
    with pytest.raises(InputError, match="boundary"):
        draw([readers[2]]).read(readers[0].strings)
