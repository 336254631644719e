"""The end-of-text token: after each document, in texts that are generated, and in exported models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld import config, data
from fpld.data.chat import encode_chats
from fpld.data.documents import Document
from fpld.data.encoding import END_OF_TEXT
from fpld.data.token_cache import TokenCache
from fpld.errors import InputError
from fpld.node.text import encode_text
from fpld.students.export import END_NAME, export_tokenizer
from fpld.students.generate import continuation
from fpld.students.ngram import NGram, NGramConfig
from tests.config.test_config import BASE

if TYPE_CHECKING:
    from pathlib import Path

PUBLIC = "the cat sat on the mat. the dog sat on the log. " * 40
TOKENIZERS: list[data.ByteTokenizer | data.BpeTokenizer] = [
    data.ByteTokenizer(end_of_text=True),
    data.BpeTokenizer.train([PUBLIC], vocab=270, end_of_text=True),
]
DOCUMENTS = [Document("a", "the cat"), Document("b", "the log")]
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])


def end_of(tokenizer: data.ByteTokenizer | data.BpeTokenizer) -> int:
    assert tokenizer.end_of_text is not None
    return tokenizer.end_of_text


@each_tokenizer
def test_the_tokenizer_says_it_in_its_digest_and_its_file(
    tokenizer: data.ByteTokenizer | data.BpeTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    read = data.load_tokenizer(tmp_path / "tokenizer.json")
    assert read.digest == tokenizer.digest
    assert getattr(read, "end_of_text", None) == end_of(tokenizer)
    plain = data.ByteTokenizer() if tokenizer.vocab == 256 else data.BpeTokenizer.train([PUBLIC], vocab=270)
    assert plain.digest != tokenizer.digest
    assert plain.library_json() == tokenizer.library_json()


@each_tokenizer
def test_each_document_ends_with_the_token(tokenizer: data.ByteTokenizer | data.BpeTokenizer, tmp_path: Path) -> None:
    end = end_of(tokenizer)
    streams = [
        data.encode_documents(DOCUMENTS, tokenizer),
        np.asarray(encode_text(DOCUMENTS, tokenizer).tokens),
        np.asarray(TokenCache(tmp_path, tokenizer).encode(DOCUMENTS).tokens),
    ]
    for stream in streams:
        assert np.array_equal(stream, streams[0])
        assert np.count_nonzero(stream == end) == 2
        assert stream[-1] == end
    assert tokenizer.decode(streams[0]) == f"the cat{END_OF_TEXT}the log{END_OF_TEXT}"


def test_an_answer_at_the_end_of_a_conversation_learns_the_token() -> None:
    tokenizer = TOKENIZERS[0]
    asked = {"role": "user", "content": "Far?"}
    ended, open_ended = encode_chats([[asked, {"role": "assistant", "content": "No."}], [asked]], tokenizer)
    assert ended.tokens[-1] == end_of(tokenizer)
    assert ended.learnt[-1]
    assert open_ended.tokens[-1] == end_of(tokenizer)
    assert not open_ended.learnt.any()


def test_tokens_of_conversations_with_and_without_it_are_kept_apart(tmp_path: Path) -> None:
    """Either may be kept first."""
    chats = [Document("a", json.dumps([{"role": "assistant", "content": "No."}]), chat=True)]
    for folder, order in (("ended", (True, False)), ("plain", (False, True))):
        for end_of_text in order:
            tokenizer = data.ByteTokenizer(end_of_text=end_of_text)
            text = encode_text(chats, tokenizer, tmp_path / folder)
            again = encode_text(chats, tokenizer)
            assert np.array_equal(np.asarray(text.tokens), np.asarray(again.tokens))
            assert np.array_equal(np.asarray(text.answers), np.asarray(again.answers))
            assert (ord(END_OF_TEXT) in np.asarray(text.tokens)) == end_of_text


def test_a_generated_text_ends_with_the_token() -> None:
    """A chain that always says "ab" and then ends."""
    tokenizer = TOKENIZERS[0]
    student = NGram(NGramConfig(vocab=tokenizer.vocab, order=1))
    stream = data.encode_documents([Document("a", "ab")] * 400, tokenizer)
    student.finetune(stream, steps=300, seed=0)
    assert continuation(student, tokenizer, "", tokens=50, seed=0, temperature=0) == "ab"
    assert continuation(student, tokenizer, "a", tokens=50, seed=0, temperature=0) == "b"


@each_tokenizer
def test_an_exported_tokenizer_names_the_token(
    tokenizer: data.ByteTokenizer | data.BpeTokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": null}')
    export_tokenizer(tokenizer, tmp_path, 32)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert exported.eos_token_id == exported.bos_token_id == end_of(tokenizer)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == end_of(tokenizer)
    text = "the cat, naïve café — 12\n\nă"
    assert exported.encode(text, add_special_tokens=False) == tokenizer.encode(text).tolist()
    assert exported.decode([*exported.encode(text), end_of(tokenizer)], skip_special_tokens=True) == text
    assert exported.encode(END_NAME) == [end_of(tokenizer)]


def test_public_text_with_the_character_is_refused() -> None:
    with pytest.raises(InputError, match=r"U\+0003.*end_of_text"):
        data.BpeTokenizer.train([f"ab{END_OF_TEXT}{END_OF_TEXT}" * 500], vocab=258, end_of_text=True)


def test_the_key_is_left_out_where_it_is_not_given() -> None:
    plain = config.parse_config(BASE, "t")
    ended = config.parse_config(BASE.replace("vocab = 512", "vocab = 512\nend_of_text = true"), "t")
    assert "end_of_text" not in plain.tokenizer.model_dump()
    assert ended.tokenizer.model_dump()["end_of_text"] is True
    assert ended.tokenizer_choice(None).end_of_text
    pretrained = BASE.replace('kind = "bpe"\nvocab = 512', 'kind = "huggingface"\npath = "x"\nend_of_text = true')
    with pytest.raises(InputError, match="a pretrained tokenizer has its own"):
        config.parse_config(pretrained, "t")
