"""Encode many texts: batches in parallel, on the threads of the `tokenizers` library.

The library has as many threads as there are cores, or as `RAYON_NUM_THREADS` says, and one with
`TOKENIZERS_PARALLELISM=false`. No token depends on it.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from fpld.data.chat import ChatTokenizer
    from fpld.data.documents import Document
    from fpld.data.tokenizers import Tokenizer

SEPARATOR = "\n\n"  # after each document of a stream
END_OF_TEXT = "\x03"  # in its place, if the tokenizer has a token for it: "end of text" of ASCII, one byte of UTF-8
_BATCH_CHARACTERS = 1 << 21  # of texts that are encoded at once: the library takes 35 bytes of memory for each


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8; raise InputError for half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text must be what UTF-8 can hold, but character {error.start} is half of a surrogate pair"
        ) from None


def separator(tokenizer: Tokenizer | ChatTokenizer) -> str:
    """Return what follows each document of a stream: an empty line, or the end-of-text token of the tokenizer."""
    return SEPARATOR if getattr(tokenizer, "end_of_text", None) is None else END_OF_TEXT


def token_type(vocab: int) -> np.dtype[Any]:
    """Return the smallest type of integers for token ids below V.

    >>> [str(token_type(vocab)) for vocab in (256, 1024, 128256)]
    ['uint8', 'uint16', 'uint32']
    """
    return np.min_scalar_type(max(vocab - 1, 0))


def batch_ids(library: Any, texts: Sequence[str], vocab: int) -> list[NDArray[Any]]:
    """Return the ids that a tokenizer of the library gives each text, without special tokens."""
    for text in texts:
        utf8(text)
    kind = token_type(vocab)
    encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
    # An iterator over the list is twice as fast as an array of it.
    return [np.fromiter(encoding.ids, kind, len(encoding)) for encoding in encodings]


def encode_each(texts: Iterable[str], tokenizer: Tokenizer | ChatTokenizer) -> Iterator[NDArray[Any]]:
    """Yield the token ids of each text, in integers of `token_type`; batches of texts are encoded in parallel.

    While the ids of one batch become arrays, the library encodes the next one.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="tokenize") as pool:
        running: deque[Future[list[NDArray[Any]]]] = deque()
        for batch in _batches(texts):
            running.append(pool.submit(tokenizer.encode_batch, batch))
            if len(running) > 2:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return one stream of tokens: each document, followed by `separator`."""
    end = separator(tokenizer)
    parts = list(encode_each((document.text + end for document in documents), tokenizer))
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.empty(0, np.int32)
