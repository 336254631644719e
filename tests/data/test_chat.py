"""Conversations: read from every kind of record, written by a template, and learnt by their answers alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.data import BpeTokenizer, ByteTokenizer, Document, load_tokenizer, read_documents, stored
from fpld.data.chat import encode_chats, write_plainly
from fpld.data.token_stream import AnsweredText, open_text
from fpld.errors import InputError
from fpld.node.text import encode_text, heldout_text
from fpld.node.training import train_on_texts
from fpld.storage.arrays import write_arrays
from fpld.students import NGram, NGramConfig
from fpld.students.heldout import heldout_arrays, read_heldout
from tests.tiny_llama import make_llama

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.data.chat import Message
    from fpld.types import Tokens

WORDS = ["snow", "ice", "wind", "cold", "wolf", "bear", "frost", "lake", "north", "naïve", "café", "中"]
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversation(seed: int, turns: int = 1) -> list[Message]:
    rng = np.random.default_rng(seed)
    contents = [" ".join(rng.choice(WORDS, 6)) for _ in range(2 * turns)]
    roles = ["user", "assistant"] * turns
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


CHATS = [conversation(number, 1 + number % 2) for number in range(12)]


def write_chats(file: Path, chats: list[Any]) -> Path:
    file.write_text("".join(json.dumps({"messages": chat, "id": 1}) + "\n" for chat in chats))
    return file


def instruct_model(path: Path, template: str = CHATML) -> Path:
    """A tiny Llama with a tokenizer that has marks of turns and a template."""
    import transformers

    make_llama(path, 300, text=" ".join(WORDS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def answers_of(tokenizer: Any, chat: list[Message]) -> str:
    """Return the text of the tokens that are learnt."""
    (encoded,) = encode_chats([chat], tokenizer)
    text: str = tokenizer.decode(encoded.tokens[encoded.learnt])
    return text


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_conversations_are_read_from_records(kind: str, tmp_path: Path) -> None:
    rows = [{"messages": chat, "id": number} for number, chat in enumerate(CHATS)]
    file = tmp_path / f"chats.{kind}"
    if kind == "jsonl":
        write_chats(file, CHATS)
    elif kind == "json":
        file.write_text(json.dumps(rows))
    else:
        pa = pytest.importorskip("pyarrow")
        table = pa.Table.from_pylist(rows)
        if kind == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, file)
        else:
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    documents = read_documents(file, field="messages")
    assert all(document.chat for document in documents)
    assert [json.loads(document.text) for document in documents] == CHATS


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("text", "must be a list of a question and an answer"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "one must be of the role 'assistant'"),
        ([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], "and not the first"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], "a content that are strings"),
        ([{"role": "user", "content": "a"}, ["assistant", "b"]], "a content that are strings"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(messages: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as refused:
        read_documents(write_chats(tmp_path / "chats.jsonl", [CHATS[0], messages]), field="messages")
    assert "chats.jsonl:2" in str(refused.value)


def test_the_field_is_named_where_it_was_forgotten(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="for conversations set the field to 'messages'"):
        read_documents(write_chats(tmp_path / "chats.jsonl", CHATS))


def test_a_conversation_is_never_cut(tmp_path: Path) -> None:
    (document, *_) = read_documents(write_chats(tmp_path / "chats.jsonl", CHATS), field="messages")
    assert document.start(document.size) == document
    assert document.start(document.size - 1).blank
    assert document.cut(5) == [document]
    with pytest.raises(InputError, match="conversations \\(messages\\) alone or plain text alone"):
        encode_text([document, Document("notes", "snow")], ByteTokenizer())


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BpeTokenizer.train([" ".join(WORDS) * 9], vocab=280)])
def test_built_in_tokenizers_learn_the_answers_of_the_plain_template(tokenizer: Any) -> None:
    for chat in CHATS:
        contents = [message["content"] for message in chat if message["role"] == "assistant"]
        assert answers_of(tokenizer, chat) == "".join(f"{content}\n\n" for content in contents)
        (encoded,) = encode_chats([chat], tokenizer)
        assert np.array_equal(encoded.tokens, tokenizer.encode(write_plainly(chat).text))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefix", "generation"])
def test_a_template_gives_the_tokens_of_transformers_and_its_mask(template: str, tmp_path: Path) -> None:
    """The mask is compared with the one that transformers makes by `{% generation %}`, whatever template is used."""
    transformers = pytest.importorskip("transformers")
    pretrained = pytest.importorskip("fpld.students.pretrained")
    folder = instruct_model(tmp_path / "model", template)
    pretrained.HuggingFaceTokenizer(folder, vocab=310).save(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", vocab=310)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for chat in CHATS:
        (encoded,) = encode_chats([chat], tokenizer)
        expected = theirs.apply_chat_template(
            chat, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
        )
        assert encoded.tokens.tolist() == expected["input_ids"]
        contents = [message["content"] for message in chat if message["role"] == "assistant"]
        assert answers_of(tokenizer, chat) == "".join(f"{content}<|im_end|>\n" for content in contents)
        assert encoded.learnt.astype(int).tolist() == expected["assistant_masks"]
    assert tokenizer.encode("<s>snow").tolist() == theirs.encode("<s>snow", add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('only one turn') }}", "refuses a conversation of 2 messages: only one turn"),
        ("{{ messages | length }}{{ messages[0].content }}", "written? otherwise|otherwise once another one follows"),
        ("{{ 'x'.__class__.__mro__[1].__subclasses__() }}", "refuses a conversation"),  # out of the sandbox
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str | None, message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pretrained = pytest.importorskip("fpld.students.pretrained")
    tokenizer = pretrained.HuggingFaceTokenizer(instruct_model(tmp_path / "model", template or ""))
    if template is None:
        tokenizer.chat = None
    with pytest.raises(InputError, match=message):
        encode_chats([CHATS[0]], tokenizer)


def test_a_large_text_gives_the_tokens_and_answers_of_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is kept in the cache beside the tokens, and both come back through the file of a node's text."""
    file = write_chats(tmp_path / "chats.jsonl", CHATS)
    held = encode_text(read_documents(file, field="messages"), ByteTokenizer())
    monkeypatch.setattr(stored, "MAX_IN_MEMORY_BYTES", 100)
    documents = read_documents(file, field="messages", cache=tmp_path / "cache")
    assert all(isinstance(document, stored.StoredDocument) and document.chat for document in documents)
    for _ in range(2):  # the second time from the cache
        kept = encode_text(documents, ByteTokenizer(), tmp_path / "cache")
        assert np.array_equal(np.asarray(kept.tokens), held.tokens)
        assert np.array_equal(np.asarray(kept.answers), np.asarray(held.answers))
        assert np.array_equal(kept.lengths, held.lengths)
    part = make_text(tmp_path / "text.safetensors", kept.tokens, kept.answers)
    places = np.arange(len(held.tokens))
    expected = AnsweredText(held.tokens, np.asarray(held.answers))[places]
    assert np.array_equal(open_text(part).lesson[places], expected)
    assert (expected < 0).any()
    assert (expected >= 0).any()


def make_text(path: Path, tokens: Tokens, answers: Tokens | None) -> Path:
    from fpld.data.token_stream import text_arrays

    count = np.array([len(tokens)], np.int64)
    write_arrays(path, {**text_arrays(tokens, answers), "lengths": count, "groups": np.zeros(1, np.int64)}, {})
    return path


QUESTION, ANSWER = 0, 2  # tokens 0 and 1 are those of questions, 2 and 3 those of answers
HALF = 8


def question_and_answer() -> tuple[Tokens, Tokens]:
    """Return a text in which 0 1 0 1 ... is only read and 2 3 2 3 ... is learnt, in turns, and what is learnt of it."""
    tokens = np.tile(np.repeat([0, 2], HALF) + np.tile([0, 1], HALF), 60).astype(np.int32)
    return tokens, (tokens >= 2).astype(np.uint8)


def student(kind: str, at_once: int = 0) -> Any:
    if kind == "ngram":
        return NGram(NGramConfig(vocab=6, order=2, buckets=64, batch=32))
    pytest.importorskip("torch")
    from fpld.students.configs import Compute, TransformerConfig
    from fpld.students.transformer import Transformer

    config = TransformerConfig(vocab=6, layers=1, width=16, heads=2, length=HALF, batch=8, rate=0.02)
    return Transformer(config, seed=0).compute_with(Compute(dtype="float32", at_once=at_once or None))


@pytest.mark.parametrize("kind", ["ngram", "transformer"])
def test_training_learns_answers_and_no_question(kind: str) -> None:
    """A model that has learnt answers expects one even inside a question; on plain text it expects the question."""
    tokens, learnt = question_and_answer()
    inside = np.array([[2, 3, 2, 3], [0, 1, 0, 1]], np.int32)
    for text, following in ((AnsweredText(tokens, learnt), ANSWER), (tokens, QUESTION)):
        model = student(kind)
        model.finetune(text, steps=60, seed=0)
        logits = model.logits(inside).reshape(2, 4, 6)
        assert logits[0, 1].argmax() == ANSWER
        assert logits[1, 1].argmax() == following


def test_the_loss_is_the_mean_over_the_answers_of_a_minibatch_in_parts_too() -> None:
    """A loss by hand: over windows with different numbers of answers, and computed a window at a time."""
    torch = pytest.importorskip("torch")
    tokens, learnt = question_and_answer()
    starts = np.array([0, 3, 5, 11])
    results = []
    for at_once in (4, 1):
        model = student("transformer", at_once)
        model._scaler = torch.amp.GradScaler("cpu", enabled=False)
        loss = model._text_step(AnsweredText(tokens, learnt), starts, 1.0)
        gradients = {name: weight.grad.clone() for name, weight in model._trained().items()}
        results.append((loss, gradients))
    windows = tokens[starts[:, None] + np.arange(HALF + 1)]
    logits = student("transformer").logits(windows[:, :-1]).reshape(4, HALF, 6).astype(np.float64)
    nats = np.log(np.exp(logits).sum(axis=2)) - np.take_along_axis(logits, windows[:, 1:, None], 2)[..., 0]
    assert results[0][0] == pytest.approx(nats[windows[:, 1:] >= 2].mean(), rel=1e-5)
    assert results[0][0] != pytest.approx(nats.mean(), rel=1e-3)
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    for name, gradient in results[0][1].items():
        assert torch.allclose(gradient, results[1][1][name], atol=1e-6)


def test_an_answered_text_of_which_all_is_learnt_trains_as_plain_text() -> None:
    tokens, learnt = question_and_answer()
    for kind in ("ngram", "transformer"):
        one, other = student(kind), student(kind)
        assert one.finetune(tokens, steps=5, seed=3) == other.finetune(
            AnsweredText(tokens, np.ones_like(learnt)), steps=5, seed=3
        )
        assert all(np.array_equal(one.state()[name], other.state()[name]) for name in one.state())


def test_windows_without_an_answer_are_drawn_again_and_a_text_without_one_is_refused() -> None:
    tokens, learnt = question_and_answer()
    rare = np.zeros_like(learnt)
    rare[40:44] = 1
    model = student("ngram")
    assert np.isfinite(model.finetune(AnsweredText(tokens, rare), steps=3, seed=0))
    with pytest.raises(InputError, match="none has a part of an answer"):
        model.finetune(AnsweredText(tokens, np.zeros_like(learnt)), steps=3, seed=0)


def test_the_heldout_loss_is_that_of_the_answers() -> None:
    tokens, learnt = question_and_answer()
    model = student("ngram")
    model.finetune(AnsweredText(tokens, learnt), steps=60, seed=0)
    texts = read_heldout(
        heldout_arrays([heldout_text([Document("a", json.dumps(CHATS[1]), chat=True)], ByteTokenizer())])
    )
    assert len(texts) == 1
    assert ByteTokenizer().decode(texts[0].counted).count("\n\n") == 2
    from fpld.students.heldout import HeldoutText

    counted = HeldoutText(tokens, answers=learnt.astype(np.uint8)).nats(model, HALF)
    nats = model.token_nats(tokens, HALF)
    assert np.array_equal(counted, nats[tokens[1:] >= 2])
    assert counted.mean() < 0.5 * nats.mean()


def test_private_training_counts_answers_alone(tmp_path: Path) -> None:
    """DP-SGD at so little noise that it learns: the windows carry what is learnt."""
    pytest.importorskip("torch")
    tokens, learnt = question_and_answer()
    text = make_text(tmp_path / "text.safetensors", tokens, learnt)
    model = student("transformer")
    windows = open_text(text).lesson[np.arange(2 * (HALF + 1)).reshape(2, -1)]
    loss, gradients = model._of_unit(windows)
    changed = np.where(windows < 0, -1 - (1 - (-1 - windows) % 2), windows)  # other questions: 1 0 1 0
    assert np.array_equal(changed >= 0, windows >= 0)
    assert model._of_unit(changed)[0] != pytest.approx(loss)  # they are read
    plain = model._of_unit(np.where(windows < 0, ~windows, windows))[0]
    assert plain != pytest.approx(loss)  # and not learnt
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    empty, none = model._of_unit(~tokens[None, : HALF + 1])
    assert empty == 0
    assert not any(gradient.any() for gradient in none.values())


def test_a_node_trains_on_the_answers_of_its_text(tmp_path: Path) -> None:
    tokens, learnt = question_and_answer()
    path = make_text(tmp_path / "text.safetensors", tokens, learnt)
    trained, expected = student("ngram"), student("ngram")
    train_on_texts(trained, [path, path], None, steps=5, seed=1, rate=None)
    both = np.concatenate([tokens, tokens]), np.concatenate([learnt, learnt])
    expected.finetune(AnsweredText(*both), steps=5, seed=1)
    assert all(np.array_equal(trained.state()[name], expected.state()[name]) for name in trained.state())
