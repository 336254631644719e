"""The tokenizer of a pretrained model: what its `tokenizer.json` says, kept whole.

The vocabulary was fixed before any private text was seen, so it tells nothing about the nodes.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.data.tokenize import check_tokens, tokenizers_library, utf8
from fpld.errors import InputError
from fpld.storage.files import canonical_json, write_atomic

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray


class PretrainedTokenizer:
    """Encode with a tokenizer of the `tokenizers` library, given as its JSON; adds no special token."""

    def __init__(self, serial: str, *, vocab: int | None = None) -> None:
        """Take the JSON text; `vocab` is the V of the model, which may be larger than the tokenizer's own."""
        try:
            self._backend = tokenizers_library().Tokenizer.from_str(serial)
        except Exception as error:  # the library raises nothing more specific
            raise InputError(f"a tokenizer must be JSON of the tokenizers library, but {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        own = int(self._backend.get_vocab_size())
        self.vocab = own if vocab is None else vocab
        if self.vocab < own:
            raise InputError(f"vocab must be at least the tokenizer's {own}, got {vocab}")

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 over the tokens and their ids, the merges and V."""
        model = json.loads(self._backend.to_str())["model"]
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])]
        serial = {"vocab": self.vocab, "tokens": self._backend.get_vocab(), "merges": merges}
        return hashlib.sha256(canonical_json(serial)).hexdigest()

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the token ids of `text`."""
        utf8(text)
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: NDArray[np.integer[Any]]) -> str:
        """Return the text of token ids."""
        ids = check_tokens(tokens, self.vocab).ravel().tolist()
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Return the bytes of the decoded text; a character that is cut counts as its replacement mark."""
        return len(self.decode(tokens).encode())

    def library_json(self) -> str:
        """Return the tokenizer as the JSON of the `tokenizers` library."""
        return str(self._backend.to_str())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as the JSON of the `tokenizers` library; V, if it is larger, is not in it."""
        write_atomic(Path(path), self.library_json().encode())


def same_tokens(one: str, other: str) -> bool:
    """Return whether two tokenizers of the library, as JSON, cut every text alike into the same ids.

    Compared is their content: tokens and ids, merges, added tokens, and what is done to a text before it is cut.
    """
    return _content(one) == _content(other)


def _content(serial: str) -> dict[str, Any]:
    value = json.loads(serial)
    model = value["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]
    added = sorted((token["id"], token["content"]) for token in value.get("added_tokens") or [])
    kept = {name: value.get(name) for name in ("normalizer", "pre_tokenizer")}
    return {"kind": model.get("type"), "vocab": model.get("vocab"), "merges": merges, "added": added, **kept}
