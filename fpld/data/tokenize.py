"""Tokenizers: bytes, or a byte-level BPE that is trained on public text only.

The vocabulary shapes what every node sends, so it must not depend on private text: train a BPE on the text
that the probe set comes from. Both ends compare `digest` before they compare logits. Files have the format of the
`tokenizers` library, which is not needed to read and write them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from fpld.errors import InputError, MissingExtraError
from fpld.storage.files import canonical_json, read_utf8, write_atomic

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from fpld.data.documents import Document

FORMAT = "fpld-tokenizer-1"
SEPARATOR = "\n\n"  # after each document of a stream


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

    def decode(self, tokens: NDArray[np.integer[Any]]) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Return the number of bytes of text that the tokens stand for."""

    def library_json(self) -> str:
        """Return the tokenizer as the JSON of the `tokenizers` library, which other programs read."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer to a file that `load_tokenizer` reads."""


class ByteTokenizer:
    """Take each byte of UTF-8 as a token: V = 256, nothing to train.

    >>> ByteTokenizer().encode("né").tolist()
    [110, 195, 169]
    """

    vocab = 256

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the canonical serialisation."""
        return hashlib.sha256(canonical_json(self._serial())).hexdigest()

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the bytes of `text`."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode(self, tokens: NDArray[np.integer[Any]]) -> str:
        """Return the text of bytes."""
        return check_tokens(tokens, self.vocab).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Return the number of tokens: each is one byte."""
        return int(np.asarray(tokens).size)

    def library_json(self) -> str:
        """Return the tokenizer as a byte-level BPE without merges."""
        return _library_json([bytes([byte]) for byte in range(256)], [])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as the JSON of the `tokenizers` library."""
        write_atomic(Path(path), self.library_json().encode())

    def _serial(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "byte"}


class BpeTokenizer:
    """Merge frequent pairs of bytes: any text can be encoded, and decodes to itself.

    `tokens` are the byte strings of the ids, `merges` the pairs in the order of their training.
    """

    def __init__(self, tokens: Sequence[bytes], merges: Sequence[tuple[bytes, bytes]]) -> None:
        self._tokens = tuple(tokens)
        self._merges = tuple(merges)
        self._check()
        self._lengths = np.array([len(token) for token in self._tokens], np.int64)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab: int) -> BpeTokenizer:
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
        return cls._from_library(model)

    @classmethod
    def _from_library(cls, model: Any) -> BpeTokenizer:
        serial = json.loads(model.to_str())["model"]
        vocab: dict[str, int] = serial["vocab"]
        names = sorted(vocab, key=vocab.__getitem__)
        # Merges are pairs of strings, or in older releases of the library one string with a blank between.
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in serial["merges"])
        return cls(
            [_from_printable(name) for name in names],
            [(_from_printable(left), _from_printable(right)) for left, right in pairs],
        )

    @property
    def vocab(self) -> int:
        """Return V, the number of token ids."""
        return len(self._tokens)

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the canonical serialisation."""
        return hashlib.sha256(canonical_json(self._serial())).hexdigest()

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the token ids of `text`."""
        utf8(text)
        # The fast call leaves out offsets, which are not needed here: a quarter less time.
        return np.array(self._library.encode_batch_fast([text])[0].ids, np.int32)

    def decode(self, tokens: NDArray[np.integer[Any]]) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        ids = check_tokens(tokens, self.vocab)
        return b"".join(self._tokens[token] for token in ids.ravel().tolist()).decode("utf-8", "replace")

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Return the number of bytes of text that the tokens stand for."""
        return int(self._lengths[check_tokens(tokens, self.vocab)].sum())

    def library_json(self) -> str:
        """Return the tokenizer as the JSON of the `tokenizers` library."""
        return _library_json(self._tokens, self._merges)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as the JSON of the `tokenizers` library."""
        write_atomic(Path(path), self.library_json().encode())

    def _serial(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": "bpe",
            "tokens": [token.hex() for token in self._tokens],
            "merges": [[left.hex(), right.hex()] for left, right in self._merges],
        }

    def _check(self) -> None:
        known = set(self._tokens)
        if len(known) != len(self._tokens) or not known.issuperset(bytes([byte]) for byte in range(256)):
            raise InputError("a BPE tokenizer must hold each of the 256 bytes, and no token twice")
        for left, right in self._merges:
            if not {left, right, left + right} <= known:
                raise InputError(f"the merge {left!r} + {right!r} must lead from tokens to a token")

    @functools.cached_property
    def _library(self) -> Any:
        return tokenizers_library().Tokenizer.from_str(self.library_json())


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


def _parse(value: dict[str, Any], vocab: int | None) -> Tokenizer | None:
    """Return the tokenizer of `_library_json`; None if this is another one of the library's."""
    model = dict(value["model"])
    ids, pairs = model.pop("vocab", None), model.pop("merges", None)
    frame = {name: part for name, part in value.items() if name != "model"}
    if frame != _FRAME or model != _MODEL or vocab not in (None, len(ids)):
        return None
    names = sorted(ids, key=ids.__getitem__)
    if [ids[name] for name in names] != list(range(len(names))):
        raise InputError("ids must be 0, 1, 2, ...")
    tokens = [_from_printable(name) for name in names]
    merges = [(_from_printable(left), _from_printable(right)) for left, right in pairs]
    if not merges and tokens == [bytes([byte]) for byte in range(256)]:
        return ByteTokenizer()
    return BpeTokenizer(tokens, merges)


def load_tokenizer(path: str | os.PathLike[str], *, vocab: int | None = None) -> Tokenizer:
    """Read a tokenizer that `save` wrote; `vocab` is the V of a model that has more tokens than its tokenizer."""
    file = Path(path)
    try:
        value = json.loads(read_utf8(file))
        found = _parse(value, vocab)
        if found is None:
            from fpld.data.pretrained import PretrainedTokenizer  # it builds on this module

            found = PretrainedTokenizer(json.dumps(value), vocab=vocab)
    except (InputError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{file} must hold a whole tokenizer of the tokenizers library, but {error}") from None
    return found


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return one stream of tokens: each document, followed by an empty line."""
    parts = [tokenizer.encode(document.text + SEPARATOR) for document in documents]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


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


def check_tokens(tokens: NDArray[np.integer[Any]], vocab: int) -> NDArray[np.integer[Any]]:
    """Return `tokens` as an array; raise InputError for an id outside the vocabulary."""
    array = np.asarray(tokens)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"tokens must be integers, got an array of {array.dtype}")
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= vocab:
            raise InputError(
                f"tokens must lie in 0..{vocab - 1}, got {low if low < 0 else high}: "
                "were they made by another tokenizer?"
            )
    return array


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8; raise InputError for half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text must be what UTF-8 can hold, but character {error.start} is half of a surrogate pair"
        ) from None


@functools.cache
def _alphabet() -> tuple[dict[int, str], dict[str, int]]:
    """Return the printable character that byte-level BPE writes for each byte, and its inverse.

    Printable Latin-1 bytes stand for themselves; the others follow from U+0100 on, in order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    to = {byte: chr(byte) for byte in own} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return to, {character: byte for byte, character in to.items()}


def _printable(token: bytes) -> str:
    to, _ = _alphabet()
    return "".join(to[byte] for byte in token)


def _from_printable(name: str) -> bytes:
    _, back = _alphabet()
    return bytes(back[character] for character in name)


def tokenizers_library() -> Any:
    """Import the tokenizers library; raise MissingExtraError without it."""
    try:
        import tokenizers
    except ImportError:
        raise MissingExtraError("A byte-level BPE", "text") from None
    return tokenizers
