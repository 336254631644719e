from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from fpld.data import BpeTokenizer, ByteTokenizer, Document, Tokenizer, encode_documents, load_tokenizer
from fpld.data.tokenizers import PretrainedTokenizer, bits_per_byte, check_token_ids
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PUBLIC = "the cat sat on the mat, then the other cat sat on the other mat. naïve café — 1234\n" * 20
BPE = BpeTokenizer.train([PUBLIC], vocab=280)
TOKENIZERS: list[ByteTokenizer | BpeTokenizer] = [ByteTokenizer(), BPE]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte", "bpe"])
@given(text=st.text())
def test_any_text_decodes_to_itself_and_its_bytes_are_counted(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text
    assert tokenizer.text_bytes(tokens) == len(text.encode())


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte", "bpe"])
def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer: ByteTokenizer | BpeTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "tokenizer.json"
    tokenizer.save(file)
    loaded = load_tokenizer(file)
    assert loaded.digest == tokenizer.digest
    assert loaded.vocab == tokenizer.vocab
    assert type(loaded) is type(tokenizer)
    theirs = tokenizers.Tokenizer.from_file(str(file))  # others read the very same file
    assert theirs.encode(PUBLIC).ids == tokenizer.encode(PUBLIC).tolist()
    assert json.loads(theirs.to_str()) == json.loads(file.read_text())
    padded = load_tokenizer(file, vocab=tokenizer.vocab + 8)
    assert (padded.vocab, padded.encode(PUBLIC).tolist()) == (tokenizer.vocab + 8, tokenizer.encode(PUBLIC).tolist())
    with pytest.raises(InputError, match="vocab must be at least"):
        load_tokenizer(file, vocab=5)
    assert loaded.encode(PUBLIC).tolist() == tokenizer.encode(PUBLIC).tolist()


def test_golden_digests() -> None:
    assert ByteTokenizer().digest == "0519761a52ee71c026295ccf242df7b13297a4dd96d28f9a7ab10b05fd91430a"
    assert BPE.digest == "8ed79e2443165e8066a1048873834ecbff4a8fb462734f9908d6ef0fcdb37ce8"


def test_training_learns_frequent_pairs_and_shortens_text() -> None:
    assert BPE.vocab == 280
    assert BPE.encode(PUBLIC).size < 0.4 * len(PUBLIC.encode())


def test_training_depends_on_the_public_text_alone() -> None:
    assert BpeTokenizer.train(iter([PUBLIC]), vocab=280).digest == BPE.digest
    assert BpeTokenizer.train([PUBLIC.replace("cat", "dog")], vocab=280).digest != BPE.digest


def test_half_of_a_character_decodes_to_a_mark_and_counts_as_one_byte() -> None:
    half = ByteTokenizer().encode("é")[:1]
    assert ByteTokenizer().decode(half) == "\ufffd"
    assert ByteTokenizer().text_bytes(half) == 1


def test_documents_become_one_stream_with_separators() -> None:
    stream = encode_documents([Document("a", "x"), Document("b", "y")], ByteTokenizer())
    assert ByteTokenizer().decode(stream) == "x\n\ny\n\n"
    assert encode_documents([], ByteTokenizer()).size == 0


def test_bits_per_byte_does_not_depend_on_how_text_is_cut() -> None:
    # The same total of nats on the same text, once over bytes and once over BPE tokens.
    total = 1000.0
    cut = [(tokenizer, tokenizer.encode(PUBLIC)) for tokenizer in TOKENIZERS]
    first, second = (bits_per_byte(total / tokens.size, tokens, tokenizer) for tokenizer, tokens in cut)
    assert first == pytest.approx(second) == pytest.approx(total / np.log(2) / len(PUBLIC.encode()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BpeTokenizer.train([PUBLIC], vocab=255), "vocab must be at least 256.*got 255"),
        (
            lambda: BpeTokenizer.train(["ab"], vocab=280),
            r"vocab=280 is more than the text has merges for \(257\)",
        ),
        (lambda: BpeTokenizer([b"a"], []), "each of the 256 bytes"),
        (lambda: BpeTokenizer([bytes([i]) for i in range(256)], [(b"a", b"b")]), "merge b'a'"),
        (lambda: BPE.decode(np.array([280])), r"0\.\.279, got 280"),
        (lambda: check_token_ids(np.array([3, -1]), 5), r"0\.\.4, got -1"),
        (lambda: check_token_ids(np.array([0.5]), 5), "integers, got an array of float64"),
        (lambda: ByteTokenizer().encode("a\ud800"), "character 1"),
        (lambda: BPE.encode("a\ud800"), "character 1"),
        (lambda: bits_per_byte(1.0, np.empty(0, np.int32), BPE), "at least one byte"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        json.dumps({"version": "1.0"}).encode(),
        json.dumps({"version": "1.0", "model": 3}).encode(),
        json.dumps({"version": "1.0", "model": {"type": "BPE"}}).encode(),
        ByteTokenizer().library_json().replace('"A": 65', '"A": 66').encode(),
        ByteTokenizer().library_json().replace('"A": 65', '"A": "65"').encode(),
        ByteTokenizer().library_json().replace('"A": 65, ', "").encode(),
        BPE.library_json().replace('"merges": [[', '"merges": [[1], [').encode(),
        BPE.library_json().replace('"merges": [["', '"merges": [["zz').encode(),
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load_tokenizer(file)


def test_what_the_library_cannot_encode_is_refused_on_every_way() -> None:
    """A Unigram whose unknown token has no id: each text with a letter that is no token."""
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -2.0]], "byte_fallback": False}
    tokenizer = PretrainedTokenizer(json.dumps({"model": model, "added_tokens": []}))
    assert tokenizer.encode("ab").tolist() == tokenizer.encode_batch(["ab"])[0].tolist() == [0, 1]
    assert tokenizer.encode_with_offsets(["ab"])[0][0].tolist() == [0, 1]
    calls: list[Callable[[], object]] = [
        lambda: tokenizer.encode("abc"),
        lambda: tokenizer.encode_batch(["ab", "abc"]),
        lambda: tokenizer.encode_with_offsets(["ab", "abc"]),
    ]
    for call in calls:
        with pytest.raises(InputError, match="unk_id"):
            call()
    with pytest.raises(InputError, match=r"^text must be what UTF-8 can hold"):
        tokenizer.encode_batch(["a\ud800"])
