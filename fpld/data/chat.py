"""Conversations: records with `messages`, of which a model reads all and learns the answers alone.

A record has a list of messages, each with a `role` and a `content`; those of the role `assistant` are the answers:

    {"messages": [{"role": "user", "content": "How far is the lake?"}, {"role": "assistant", "content": "Two miles."}]}

Until it is tokenized, a conversation is the JSON of that list: so it is sampled, held out and kept as any other text.
Then a *template* writes it as text, and says which characters are answers. A token is learnt if any of its characters
is one: local training and the held-out loss count these tokens, and no others.

- A pretrained model's tokenizer has a template of its own, in Jinja. It is rendered by transformers, in its sandbox. An
  answer begins where the template's prompt for it ends, and ends with the mark that the template puts behind it. Where
  a template has `{% generation %}`, that says which text is an answer.
- The tokenizers of bytes and of a trained BPE have the plain template of `write_plainly`.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.data.documents import document_kinds
from fpld.data.encoding import END_OF_TEXT
from fpld.data.label_space import token_strings
from fpld.data.tokenizers import PretrainedTokenizer
from fpld.errors import InputError, MissingExtraError
from fpld.storage.files import canonical_json
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fpld.data.documents import Document
    from fpld.data.tokenizers import ChatTemplate, Tokenizer

_ANSWER_ROLE = "assistant"
_PREFIX_ADVICE = "give the tokenizer a template with {% generation %}, or cut the records after their first answer"

Message = dict[str, str]


class WrittenChat(NamedTuple):
    """A conversation as text, and which characters of it are answers: pairs of first and end."""

    text: str
    answers: list[tuple[int, int]]


class EncodedChat(NamedTuple):
    """The tokens [n] of a conversation, and which of them are learnt [n]."""

    tokens: NDArray[Any]
    learnt: NDArray[np.bool_]


def write_plainly(messages: Sequence[Message]) -> WrittenChat:
    r"""Write a conversation by the plain template: a line with the role, the content, and an empty line.

    An answer ends with its empty line, so that a model learns to end one.

    >>> write_plainly([{"role": "user", "content": "Far?"}, {"role": "assistant", "content": "No."}])
    WrittenChat(text='user:\nFar?\n\nassistant:\nNo.\n\n', answers=[(23, 28)])
    """
    text = ""
    answers = []
    for message in messages:
        text += f"{message['role']}:\n"
        start = len(text)
        text += f"{message['content']}\n\n"
        if message["role"] == _ANSWER_ROLE:
            answers.append((start, len(text)))
    return WrittenChat(text, answers)


def write_by_template(messages: Sequence[Message], template: ChatTemplate) -> WrittenChat:
    """Write a conversation by the template of a model's tokenizer.

    Raises
    ------
    InputError
        If the template refuses the conversation, or does not show where an answer begins.
    """
    utilities = _template_library()
    marked = "generation" in template.source and bool(utilities.re.search(r"\{%-?\s*generation", template.source))

    def write(some: Sequence[Message], *, prompt: bool = False) -> tuple[str, list[list[tuple[int, int]]]]:
        try:
            written, spans = utilities.render_jinja_template(
                conversations=[list(some)],
                chat_template=template.source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **template.special_tokens,
            )
        except Exception as error:  # templates raise all kinds of exceptions
            first = printable(str(error).strip().partition("\n")[0])
            raise InputError(
                f"the tokenizer's chat template refuses a conversation of {len(messages)} messages: {first}"
            ) from None
        return written[0], spans

    whole, spans = write(messages)
    if marked:
        return WrittenChat(whole, [(first, stop) for first, stop in spans[0] if stop > first])
    answers = []
    for index, message in enumerate(messages):
        if message["role"] == _ANSWER_ROLE:
            before = write(messages[:index], prompt=True)[0]
            after = whole if index == len(messages) - 1 else write(messages[: index + 1])[0]
            if not (after.startswith(before) and whole.startswith(after)):
                raise InputError(
                    "the tokenizer's chat template writes a message otherwise once another one follows, so where an "
                    f"answer begins cannot be told: {_PREFIX_ADVICE}"
                )
            answers.append((len(before), len(after)))
    return WrittenChat(whole, answers)


def _template_library() -> Any:
    # As everywhere before transformers is imported: nothing is looked up on a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return importlib.import_module("transformers.utils.chat_template_utils")
    except ImportError:
        raise MissingExtraError("The chat template of a tokenizer", "huggingface") from None


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """A tokenizer of conversations, for the cache of tokens: either their tokens, or which of these are learnt.

    With `answers` it gives 0 for a token that is only read, and 1 for one that is learnt.
    """

    tokenizer: Tokenizer
    answers: bool = False

    @property
    def vocab(self) -> int:
        """Return V, or 2."""
        return 2 if self.answers else self.tokenizer.vocab

    def library_json(self) -> str:
        """Return what the result follows from: the tokenizer, its end-of-text token and the template."""
        template = template_of(self.tokenizer)
        parts = [
            self.answers,
            None if template is None else template.serial(),
            self.tokenizer.library_json(),
            getattr(self.tokenizer, "end_of_text", None),  # is not in the library's JSON
        ]
        return canonical_json(parts).decode()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of conversations, or which of them are learnt."""
        encoded = encode_chats([json.loads(text) for text in texts], self.tokenizer)
        return [chat.learnt.astype(np.uint8) if self.answers else chat.tokens for chat in encoded]


def encode_chats(conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer) -> list[EncodedChat]:
    """Tokenize conversations, each by the tokenizer's template."""
    template = template_of(tokenizer)
    written = [
        write_plainly(messages) if template is None else write_by_template(messages, template)
        for messages in conversations
    ]
    if getattr(tokenizer, "end_of_text", None) is not None:
        written = [_ended(chat) for chat in written]
    texts = [chat.text for chat in written]
    if isinstance(tokenizer, PretrainedTokenizer):
        return [
            EncodedChat(tokens, _overlap(starts, ends, chat.answers))
            for (tokens, starts, ends), chat in zip(tokenizer.encode_with_offsets(texts), written, strict=True)
        ]
    lengths = np.array([len(string) for string in token_strings(tokenizer)])
    encoded = []
    for tokens, chat in zip(tokenizer.encode_batch(texts), written, strict=True):
        ends = np.cumsum(lengths[tokens])
        answers = [(len(chat.text[:first].encode()), len(chat.text[:stop].encode())) for first, stop in chat.answers]
        encoded.append(EncodedChat(tokens, _overlap(ends - lengths[tokens], ends, answers)))
    return encoded


def _ended(chat: WrittenChat) -> WrittenChat:
    """Return a conversation with the end-of-text token after it, which an answer at its end learns."""
    whole = len(chat.text)
    answers = [(first, stop + len(END_OF_TEXT) if stop == whole else stop) for first, stop in chat.answers]
    return WrittenChat(chat.text + END_OF_TEXT, answers)


def _overlap(starts: NDArray[Any], ends: NDArray[Any], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which tokens, from `starts` to `ends`, have a part of a span."""
    learnt = np.zeros(len(starts), bool)
    for first, stop in spans:
        learnt |= (starts < stop) & (ends > first)
    return learnt


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template of a tokenizer; None stands for the plain one.

    Raises
    ------
    InputError
        If it is the tokenizer of a pretrained model that has none.
    """
    if not isinstance(tokenizer, PretrainedTokenizer):
        return None
    if tokenizer.chat is None:
        raise InputError(
            "the text has conversations (messages), and the model's tokenizer has no chat template: take a model that "
            "was trained on conversations, put a chat_template.jinja into its folder, or write the conversations as "
            "text yourself"
        )
    return tokenizer.chat


def are_chats(documents: Sequence[Document]) -> bool:
    """Return whether documents are conversations; raise InputError for some of each kind."""
    kinds = document_kinds(documents)
    if len(kinds) > 1:
        raise InputError("a text must have conversations (messages) alone or plain text alone, and has both")
    return True in kinds


def plain_texts(documents: Sequence[Document], texts: Iterator[str]) -> Iterator[str]:
    """Yield texts of documents to learn a tokenizer from: conversations by the plain template."""
    if not are_chats(documents):
        return texts
    return (write_plainly(json.loads(text)).text for text in texts)
