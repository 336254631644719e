"""The text of a node: held out and tokenized at the node."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fpld import data
from fpld.data.chat import ChatTokenizer, are_chats, encode_chats
from fpld.data.documents import document_groups
from fpld.data.encoding import encode_each, separator
from fpld.data.fetch import cache_folder
from fpld.data.stored import TEXT_CACHE, StoredDocument
from fpld.data.token_cache import EncodedDocuments, TokenCache
from fpld.data.token_stream import is_stream, text_arrays
from fpld.errors import InputError
from fpld.seeds import derive_seed
from fpld.students.heldout import HeldoutText

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.data import Document, TextUse, Tokenizer
    from fpld.node.spec import NodeSpec
    from fpld.types import Array, Arrays, Tokens


LIMIT_KEY = "data.limit"


@dataclass(frozen=True, eq=False, slots=True)
class NodeText:
    """The tokens of a node's training and held-out text, and the bytes of text that each stands for.

    `lengths` are the tokens of each training document; documents that belong together have equal `groups`. Held-out
    text is in tokens of the federation's student. Of conversations `answers` are the training tokens that are learnt,
    and `heldout_bytes` those of the answers.
    """

    train: Tokens
    lengths: Array
    groups: Array
    heldout: HeldoutText
    train_bytes: int
    heldout_bytes: int
    use: TextUse
    answers: Tokens | None = None

    @property
    def arrays(self) -> Arrays:
        """Return the arrays of the file with a node's training text."""
        return {**text_arrays(self.train, self.answers), "lengths": self.lengths, "groups": self.groups}


@dataclass(frozen=True, slots=True)
class SplitText:
    """The documents of a node that are used: to train on, and held out; `single`: they are parts of one document."""

    train: Sequence[Document]
    heldout: Sequence[Document]
    use: TextUse
    single: bool


def split_text(part: NodeSpec, documents: Sequence[Document], limited_by: str = LIMIT_KEY) -> SplitText:
    """Sample a node's documents where its part has a limit, and hold some of them out.

    `limited_by` is the key that set the limit, for those who read what was left out.
    """
    sample = data.sample_documents(documents, part.limit, seed=derive_seed(part.seed, "sample", part.index))
    train, held = data.hold_out(sample, fraction=part.heldout, seed=derive_seed(part.seed, "hold", part.index))
    size = data.total_size(documents)
    use = data.TextUse(part.name, len(documents), size, data.total_size(sample), data.total_size(held), limited_by)
    return SplitText(train, held, use, len(sample) == 1)


def node_text(
    part: NodeSpec,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    limited_by: str = LIMIT_KEY,
    cache: Path | None = None,
    *,
    shared: Tokenizer | None = None,
) -> NodeText:
    """Sample, hold out and tokenize a node's documents, as its part asks for.

    Without a `cache` the tokens of a text in memory are an array; those of any other are in the user's cache. `shared`
    is the tokenizer of the federation's student, if the node's model has another one.
    """
    shared = tokenizer if shared is None else shared
    try:
        split = split_text(part, documents, limited_by)
    except InputError as error:
        raise InputError(f"node {part.name!r}: {error}") from None
    train = split.train
    try:
        _check_tokenizers(train, tokenizer, shared)
        encoded = encode_text(train, tokenizer, cache)
        heldout_tokens = count_tokens(split.heldout, tokenizer, cache)
        held = heldout_text(_first_documents(split.heldout, 8 * part.heldout_tokens), shared, part.heldout_tokens)
    except InputError as error:
        raise InputError(f"node {part.name!r}: {error}") from None
    tokens = encoded.tokens
    for what, side in (("training", tokens), ("held-out", held.tokens)):
        if len(side) <= part.length:
            raise InputError(
                f"node {part.name!r}: its {what} text has {len(side)} tokens, fewer than one context of "
                f"{part.length}: give it more text"
            )
    # The parts of a single document belong together.
    groups = np.zeros(len(train), np.int64) if split.single else document_groups(train)
    train_bytes = data.total_size(train) + len(separator(tokenizer)) * len(train)
    if not is_stream(tokens):
        train_bytes = tokenizer.text_bytes(tokens)
    heldout_bytes = shared.text_bytes(held.counted)
    use = replace(split.use, tokens=len(tokens) + heldout_tokens, heldout_tokens=heldout_tokens)
    return NodeText(tokens, encoded.lengths, groups, held, train_bytes, heldout_bytes, use, encoded.answers)


def _check_tokenizers(documents: Sequence[Document], tokenizer: Tokenizer, shared: Tokenizer) -> None:
    if shared is not tokenizer and are_chats(documents):
        raise InputError(
            "conversations (messages) need one tokenizer for all models: leave the node's own out, or write the "
            "conversations as text"
        )


def encode_text(documents: Sequence[Document], tokenizer: Tokenizer, cache: Path | None = None) -> EncodedDocuments:
    """Return the tokens of documents: an array if all are in memory and no `cache` is named, else from the cache."""
    if are_chats(documents):
        encoded = _encode(documents, ChatTokenizer(tokenizer), cache)
        return encoded._replace(answers=_encode(documents, ChatTokenizer(tokenizer, answers=True), cache).tokens)
    return _encode(documents, tokenizer, cache)


def count_tokens(documents: Sequence[Document], tokenizer: Tokenizer, cache: Path | None = None) -> int:
    """Return how many tokens documents have; those of texts in files stay in the cache."""
    reader = ChatTokenizer(tokenizer) if are_chats(documents) else tokenizer
    return int(_encode(documents, reader, cache).lengths.sum())


def _encode(
    documents: Sequence[Document], tokenizer: Tokenizer | ChatTokenizer, cache: Path | None
) -> EncodedDocuments:
    if cache is not None or any(isinstance(document, StoredDocument) for document in documents):
        return TokenCache(cache or cache_folder() / TEXT_CACHE, tokenizer).encode(documents)
    end = separator(tokenizer)
    each = list(encode_each((document.text + end for document in documents), tokenizer))
    lengths = np.array([len(tokens) for tokens in each], np.int64)
    return EncodedDocuments(np.concatenate(each).astype(np.int32, copy=False), lengths)


def heldout_text(documents: Sequence[Document], tokenizer: Tokenizer, most: int | None = None) -> HeldoutText:
    """Return documents as a text to evaluate on, of at most so many tokens; of conversations the answers count."""
    if not are_chats(documents):
        return HeldoutText(data.encode_documents(documents, tokenizer)[:most])
    chats = encode_chats([json.loads(document.text) for document in documents], tokenizer)
    tokens = np.concatenate([chat.tokens for chat in chats]).astype(np.int32)[:most]
    answers = np.concatenate([chat.learnt for chat in chats]).astype(np.uint8)[:most]
    if not answers[1:].any():
        raise InputError("the held-out conversations have no answer within the tokens that are evaluated: give more")
    return HeldoutText(tokens, answers=answers)


def _first_documents(documents: Sequence[Document], most: int) -> list[Document]:
    """Take documents from the start until they hold `most` bytes; at least one, or the start of a long one."""
    kept: list[Document] = []
    size = 0
    for document in documents:
        if kept and size >= most:
            break
        kept.append(document.start(most) if isinstance(document, StoredDocument) and document.long else document)
        size += document.size
    return kept
