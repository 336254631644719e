"""Tokenizers: bytes, a byte-level BPE that is trained on public text, or that of a pretrained model.

The vocabulary shapes what every node sends, so it must not depend on private text. A BPE is trained on the text that
the probe set comes from; the vocabulary of a pretrained model was fixed before. Both ends compare `digest` before they
compare logits. Files have the format of the `tokenizers` library. Those of bytes and BPE are read and written without
the library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fpld.data.documents import cut_at_lines
from fpld.data.encoding import END_OF_TEXT, batch_ids, token_type, utf8
from fpld.errors import FpldError, InputError, MissingExtraError
from fpld.storage.files import canonical_json, read_utf8, write_atomic

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray


FORMAT = "fpld-tokenizer-1"
_CHAT_KEY = "chat_template"  # beside what the library writes
_END_KEY = "end_of_text"  # likewise
_PIECE_CHARACTERS = 1 << 16  # of a long text that several threads encode


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Return V, the number of token ids."""

    @property
    def digest(self) -> str:
        """Return the SHA-256 (hex) of the canonical serialisation: equal digests mean equal tokens."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the token ids of `text`."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the token ids of each text, as `encode` gives them, in integers of `token_type`."""

    def decode(self, tokens: NDArray[np.integer[Any]]) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Return the number of bytes of text that the tokens stand for."""

    def library_json(self) -> str:
        """Return the tokenizer as the JSON of the `tokenizers` library, which other programs read."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer to a file that `load_tokenizer` reads."""


class _LibraryTokenizer(ABC):
    """The digest of a tokenizer, and its file in the format of the `tokenizers` library."""

    end_of_text: int | None = None
    """The token that ends each document (`fpld.data.encoding.END_OF_TEXT`); without one an empty line does."""

    @abstractmethod
    def library_json(self) -> str:
        """Return the tokenizer as the JSON of the `tokenizers` library."""

    @abstractmethod
    def _serial(self) -> dict[str, Any]:
        """Return the canonical serialisation."""

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the canonical serialisation."""
        return hashlib.sha256(canonical_json(self._serial() | self._end_serial())).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as the JSON of the `tokenizers` library; beside it, that it has an end-of-text token."""
        serial = self.library_json()
        if self.end_of_text is not None:
            serial = json.dumps({**json.loads(serial), **self._end_serial()})
        write_atomic(Path(path), serial.encode())

    def _end_serial(self) -> dict[str, Any]:
        return {} if self.end_of_text is None else {_END_KEY: True}


class ByteTokenizer(_LibraryTokenizer):
    """Take each byte of UTF-8 as a token: V = 256, nothing to train.

    >>> ByteTokenizer().encode("né").tolist()
    [110, 195, 169]
    """

    vocab = 256

    def __init__(self, *, end_of_text: bool = False) -> None:
        self.end_of_text = ord(END_OF_TEXT) if end_of_text else None

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the bytes of `text`."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the bytes of each text."""
        return [np.frombuffer(utf8(text), np.uint8) for text in texts]

    def decode(self, tokens: NDArray[np.integer[Any]]) -> str:
        """Return the text of bytes."""
        return check_token_ids(tokens, self.vocab).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Return the number of tokens: each is one byte."""
        return int(np.asarray(tokens).size)

    def library_json(self) -> str:
        """Return the tokenizer as a byte-level BPE without merges."""
        return _library_json([bytes([byte]) for byte in range(256)], [])

    def _serial(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "byte"}


class BpeTokenizer(_LibraryTokenizer):
    """Merge frequent pairs of bytes: any text can be encoded, and decodes to itself.

    `tokens` are the byte strings of the ids, `merges` the pairs in the order of their training. With `end_of_text` the
    character U+0003 ends each document: its byte is a token already, and nothing may be merged with it.
    """

    def __init__(
        self, tokens: Sequence[bytes], merges: Sequence[tuple[bytes, bytes]], *, end_of_text: bool = False
    ) -> None:
        self._tokens = tuple(tokens)
        self._merges = tuple(merges)
        self._check()
        if end_of_text:
            self.end_of_text = self._tokens.index(utf8(END_OF_TEXT))
            if any(utf8(END_OF_TEXT) in left + right for left, right in self._merges):
                raise InputError(
                    "the public text has the character U+0003, which [tokenizer] end_of_text puts after each document: "
                    "remove it from the text, or leave end_of_text out"
                )
        self._lengths = np.array([len(token) for token in self._tokens], np.int64)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab: int, end_of_text: bool = False) -> BpeTokenizer:
        """Learn `vocab` tokens from public texts: the 256 bytes and the most frequent merges.

        The result depends on the texts and on nothing else: no seed, no number of threads.
        """
        if vocab < 256:
            raise InputError(f"vocab must be at least 256, one token for each byte; got {vocab}")
        library = tokenizers_library()
        model = library.Tokenizer(library.models.BPE())
        model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        if model.get_vocab_size() < vocab:
            raise InputError(
                f"vocab={vocab} is more than the text has merges for ({model.get_vocab_size()}): "
                "give more public text, or a smaller vocabulary"
            )
        return cls._from_library(model, end_of_text)

    @classmethod
    def _from_library(cls, model: Any, end_of_text: bool) -> BpeTokenizer:
        serial = json.loads(model.to_str())["model"]
        vocab: dict[str, int] = serial["vocab"]
        names = sorted(vocab, key=vocab.__getitem__)
        # Merges are pairs of strings, or in older releases of the library one string with a blank between.
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in serial["merges"])
        return cls(
            [from_printable(name) for name in names],
            [(from_printable(left), from_printable(right)) for left, right in pairs],
            end_of_text=end_of_text,
        )

    @property
    def vocab(self) -> int:
        """Return V, the number of token ids."""
        return len(self._tokens)

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """Return the bytes of each token."""
        return self._tokens

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the token ids of `text`."""
        utf8(text)
        # The fast call computes no offsets, which saves a quarter of the time.
        return np.array(self._library.encode_batch_fast([text])[0].ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the token ids of each text, encoded in parallel.

        Long texts are cut where a byte-level BPE splits them into words anyway, so that threads share them.
        """
        pieces: list[str] = []
        counts: list[int] = []
        for text in texts:
            before = len(pieces)
            pieces += cut_at_lines(text, _PIECE_CHARACTERS)
            counts.append(len(pieces) - before)
        arrays = iter(batch_ids(self._library, pieces, self.vocab))
        return [np.concatenate(list(islice(arrays, count))) for count in counts]

    def decode(self, tokens: NDArray[np.integer[Any]]) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        ids = check_token_ids(tokens, self.vocab)
        return b"".join(self._tokens[token] for token in ids.ravel().tolist()).decode("utf-8", "replace")

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Return the number of bytes of text that the tokens stand for."""
        return int(self._lengths[check_token_ids(tokens, self.vocab)].sum())

    def library_json(self) -> str:
        """Return the tokenizer as the JSON of the `tokenizers` library."""
        return _library_json(self._tokens, self._merges)

    def _serial(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": "bpe",
            "tokens": [token.hex() for token in self._tokens],
            "merges": [[left.hex(), right.hex()] for left, right in self._merges],
        }

    def _check(self) -> None:
        tokens = set(self._tokens)
        if len(tokens) != len(self._tokens) or not tokens.issuperset(bytes([byte]) for byte in range(256)):
            raise InputError("a BPE tokenizer must hold each of the 256 bytes, and no token twice")
        for left, right in self._merges:
            if not {left, right, left + right} <= tokens:
                raise InputError(f"the merge {left!r} + {right!r} must lead from tokens to a token")

    @functools.cached_property
    def _library(self) -> Any:
        return tokenizers_library().Tokenizer.from_str(self.library_json())


class ChatTemplate(NamedTuple):
    """How a model's tokenizer writes conversations (`fpld.data.chat`): a template in Jinja, and the tokens it names."""

    source: str
    special_tokens: dict[str, str]

    def serial(self) -> dict[str, Any]:
        """Return the template as JSON."""
        return {"template": self.source, "special_tokens": self.special_tokens}

    @classmethod
    def parse(cls, value: Any) -> ChatTemplate:
        """Read what `serial` made; raise InputError for anything else."""
        match value:
            case {"template": str(source), "special_tokens": dict(tokens)} if all(
                isinstance(token, str) for pair in tokens.items() for token in pair
            ):
                return cls(source, tokens)
        raise InputError("its chat template must be text, with special tokens by name")


@contextmanager
def _refused_by_library() -> Iterator[None]:
    """Raise InputError for what the `tokenizers` library does not like; a panic in its Rust code is no Exception."""
    try:
        yield
    except FpldError:
        raise
    except BaseException as error:  # the library raises nothing more specific
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"the tokenizers library refuses this tokenizer, or a text for it: {error}") from None


class PretrainedTokenizer(_LibraryTokenizer):
    """Encode with any tokenizer of the `tokenizers` library; special tokens are not added.

    A V that is larger than the tokenizer's is not saved with it. A chat template is.
    """

    def __init__(self, serial: str, *, vocab: int | None = None, chat: ChatTemplate | None = None) -> None:
        """Read the library's JSON; `vocab` is the V of the model, which may be larger than the tokenizer's."""
        self.chat = chat
        with _refused_by_library():
            self._backend = tokenizers_library().Tokenizer.from_str(serial)
        self._backend.no_truncation()
        self._backend.no_padding()
        least = int(self._backend.get_vocab_size())
        self.vocab = least if vocab is None else vocab
        if self.vocab < least:
            raise InputError(f"vocab must be at least the tokenizer's {least}, got {vocab}")
        # The library counts tokens, whose ids may leave some numbers out.
        largest = max(self._backend.get_vocab().values(), default=0)
        if largest >= self.vocab:
            raise InputError(f"vocab must be more than the tokenizer's largest id, {largest}; it is {self.vocab}")

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the token ids of `text`."""
        utf8(text)
        with _refused_by_library():
            return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the token ids of each text, encoded in parallel."""
        with _refused_by_library():
            return batch_ids(self._backend, texts, self.vocab)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Return for each text its token ids, and the characters from and to which each token goes."""
        checked = [utf8(text).decode() for text in texts]
        with _refused_by_library():
            encodings = self._backend.encode_batch(checked, add_special_tokens=False)
        encoded = []
        for encoding in encodings:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            encoded.append((np.array(encoding.ids, token_type(self.vocab)), offsets[:, 0], offsets[:, 1]))
        return encoded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as the JSON of the `tokenizers` library, with the chat template if there is one."""
        serial = self.library_json()
        if self.chat is not None:
            serial = json.dumps({**json.loads(serial), _CHAT_KEY: self.chat.serial()}, ensure_ascii=False)
        write_atomic(Path(path), serial.encode())

    def decode(self, tokens: NDArray[np.integer[Any]]) -> str:
        """Return the text of token ids."""
        ids = check_token_ids(tokens, self.vocab).ravel().tolist()
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Return the bytes of the decoded text; a character that is cut counts as its replacement mark."""
        return len(self.decode(tokens).encode())

    def library_json(self) -> str:
        """Return the tokenizer as the JSON of the `tokenizers` library."""
        return str(self._backend.to_str())

    def _serial(self) -> dict[str, Any]:
        model = json.loads(self._backend.to_str())["model"]
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])]
        return {"vocab": self.vocab, "tokens": self._backend.get_vocab(), "merges": merges}


def _byte_level(add_prefix_space: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}


# A byte-level BPE as the library writes it, around its tokens and merges.
_FRAME: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": _byte_level(False), "post_processor": None, "decoder": _byte_level(True),
}  # fmt: skip
_MODEL: dict[str, Any] = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip


def _library_json(tokens: Sequence[bytes], merges: Sequence[tuple[bytes, bytes]]) -> str:
    """Return a byte-level BPE as the library writes it."""
    vocab = {_printable(token): index for index, token in enumerate(tokens)}
    pairs = [[_printable(left), _printable(right)] for left, right in merges]
    return json.dumps({**_FRAME, "model": {**_MODEL, "vocab": vocab, "merges": pairs}})


def _parse(value: dict[str, Any], vocab: int | None, end_of_text: bool) -> Tokenizer | None:
    """Return the tokenizer that `_library_json` wrote; None for any other one of the library."""
    model = dict(value["model"])
    ids = model.pop("vocab", None)
    pairs = model.pop("merges", None)
    frame = {name: part for name, part in value.items() if name != "model"}
    if frame != _FRAME or model != _MODEL or vocab not in (None, len(ids)):
        return None
    names = sorted(ids, key=ids.__getitem__)
    if [ids[name] for name in names] != list(range(len(names))):
        raise InputError("ids must be 0, 1, 2, ...")
    tokens = [from_printable(name) for name in names]
    merges = [(from_printable(left), from_printable(right)) for left, right in pairs]
    if not merges and tokens == [bytes([byte]) for byte in range(256)]:
        return ByteTokenizer(end_of_text=end_of_text)
    return BpeTokenizer(tokens, merges, end_of_text=end_of_text)


def load_tokenizer(path: str | os.PathLike[str], *, vocab: int | None = None) -> Tokenizer:
    """Read a tokenizer that `save` wrote; `vocab` is the V of a model that has more tokens than its tokenizer."""
    file = Path(path)
    try:
        value = json.loads(read_utf8(file))
        serial = value.pop(_CHAT_KEY, None)
        end_of_text = value.pop(_END_KEY, False) is True
        chat = None if serial is None else ChatTemplate.parse(serial)
        tokenizer = _parse(value, vocab, end_of_text) or PretrainedTokenizer(json.dumps(value), vocab=vocab, chat=chat)
    except (InputError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{file} must hold a whole tokenizer of the tokenizers library, but {error}") from None
    return tokenizer


def same_tokens(one: str, other: str) -> bool:
    """Return whether two tokenizers, as JSON of the library, turn every text into the same ids.

    Compared are tokens and ids, merges, added tokens, the normalizer and the pre-tokenizer.
    """
    return _content(one) == _content(other)


def _content(serial: str) -> dict[str, Any]:
    value = json.loads(serial)
    model = value["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]
    added = sorted((token["id"], token["content"]) for token in value.get("added_tokens") or [])
    kept = {name: value.get(name) for name in ("normalizer", "pre_tokenizer")}
    return {"kind": model.get("type"), "vocab": model.get("vocab"), "merges": merges, "added": added, **kept}


def bits_per_byte(nats: float, tokens: NDArray[np.integer[Any]], tokenizer: Tokenizer) -> float:
    """Turn a mean loss in nats per token on `tokens` into bits per byte of their text.

    Losses in nats per token compare only models of one vocabulary; bits per byte compare all.

    >>> round(bits_per_byte(math.log(256), np.arange(10), ByteTokenizer()), 6)
    8.0
    """
    size = tokenizer.text_bytes(tokens)
    if size == 0:
        raise InputError("tokens must stand for at least one byte of text, got none")
    return nats * np.asarray(tokens).size / (math.log(2) * size)


def check_token_ids(tokens: NDArray[np.integer[Any]], vocab: int) -> NDArray[np.integer[Any]]:
    """Return `tokens` as an array; raise InputError for an id outside the vocabulary."""
    array = np.asarray(tokens)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"tokens must be integers, got an array of {array.dtype}")
    if array.size:
        low = int(array.min())
        high = int(array.max())
        if low < 0 or high >= vocab:
            raise InputError(
                f"tokens must lie in 0..{vocab - 1}, got {low if low < 0 else high}: "
                "were they made by another tokenizer?"
            )
    return array


@functools.cache
def _alphabet() -> tuple[dict[int, str], dict[str, int]]:
    """Return the printable character that byte-level BPE writes for each byte, and its inverse.

    Printable Latin-1 bytes stand for themselves; the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    to = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return to, {character: byte for byte, character in to.items()}


def _printable(token: bytes) -> str:
    to, _ = _alphabet()
    return "".join(to[byte] for byte in token)


def from_printable(name: str) -> bytes:
    """Return the bytes that a token of a byte-level BPE stands for, from its printable form."""
    _, back = _alphabet()
    return bytes(back[character] for character in name)


def tokenizers_library() -> Any:
    """Import the tokenizers library; raise MissingExtraError without it."""
    try:
        import tokenizers
    except ImportError:
        raise MissingExtraError("A byte-level BPE", "text") from None
    return tokenizers
