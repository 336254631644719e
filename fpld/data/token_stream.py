"""Token streams of any length, read from files, and the file that says what a node's text consists of.

A stream is a list of segments, each a range of tokens in a pack of the cache. It has a length, and it is indexed by
arrays of places, as training draws its windows. Nothing else of it is in memory, so a step costs as much as with a text
of any other length. Files are read, not mapped: the pages of a mapped file stay in the memory of a process once they
have been touched, until all of the file is there.

The file with a node's text has arrays: `tokens`, or `segments` with the packs that they are in; `lengths`, the tokens
of each document; `groups`, equal for documents that belong together. Of conversations it also has which tokens are
learnt, 0 or 1, as a text of its own: `answers.tokens`, or `answers.segments`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy as np

from fpld.errors import InputError
from fpld.storage.arrays import read_arrays
from fpld.storage.files import storage_error
from fpld.validation import check_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fpld.types import Array, Arrays, Tokens

_BLOCK_TOKENS = 1 << 18  # of a stream, read at once: what is computed of them stays in the cache of a core
_ANSWERS = "answers."  # before the names of the arrays that say which tokens are learnt
_MAX_DRAWS = 10_000  # of a place, until one is found that is learnt
_MAX_OPEN_PACKS = 128  # of a stream: a process has a thousand file handles, or fewer


class TokenPack(NamedTuple):
    """A file of tokens: its path, the type of its integers, and how many there are."""

    path: Path
    kind: str
    tokens: int

    def check(self) -> None:
        """Raise InputError if the file is not there, or not whole."""
        wanted = self.tokens * np.dtype(self.kind).itemsize
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise InputError(
                f"{self.path}, with tokens of the text, cannot be read ({error.strerror}): start the run again"
            ) from None
        if size != wanted:
            raise InputError(
                f"{self.path}, with tokens of the text, must have {wanted} bytes, not {size}: delete its folder, and "
                "start the run again"
            )


class _OpenPack:
    """A pack of which ranges are read, by a handle that forks may share."""

    _handle = -1

    def __init__(self, pack: TokenPack) -> None:
        pack.check()
        self._path = pack.path
        self._kind = np.dtype(pack.kind)
        try:
            self._handle = os.open(pack.path, os.O_RDONLY)
        except OSError as error:
            raise storage_error(pack.path, error) from error
        if hasattr(os, "posix_fadvise"):
            # Windows are drawn at random: what stands behind them is not read.
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def read(self, first: int, stop: int) -> Array:
        """Read a range of tokens; raise InputError if the file has become shorter."""
        width = self._kind.itemsize
        wanted = (stop - first) * width
        try:
            data = os.pread(self._handle, wanted, first * width)
        except OSError as error:
            raise InputError(f"{self._path}, with tokens of the text, cannot be read ({error.strerror})") from None
        if len(data) != wanted:
            raise InputError(f"{self._path}, with tokens of the text, has become shorter: start the run again")
        return np.frombuffer(data, self._kind)


@dataclass(frozen=True, eq=False, slots=True)
class Segments:
    """Ranges of tokens, in their order: the number of the pack, the first token in it, and how many."""

    packs: Array
    starts: Array
    counts: Array

    def merged(self) -> Segments:
        """Return the same tokens, with ranges that follow each other in a pack as one."""
        if not len(self.packs):
            return self
        follows = (self.packs[1:] == self.packs[:-1]) & (self.starts[1:] == self.starts[:-1] + self.counts[:-1])
        first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
        return Segments(self.packs[first], self.starts[first], np.add.reduceat(self.counts, first))


class TokenStream:
    """A text of tokens in packs of the cache, read only where it is indexed.

    >>> stream = TokenStream.empty(256)
    >>> len(stream), stream.dtype
    (0, dtype('int32'))
    """

    ndim = 1
    dtype = np.dtype(np.int32)

    def __init__(self, packs: Sequence[TokenPack], segments: Segments, vocab: int) -> None:
        self._packs = list(packs)
        self._segments = segments
        self._open: dict[int, _OpenPack] = {}
        self._ends = np.cumsum(segments.counts)
        self._origins = segments.starts - (self._ends - segments.counts)  # of a token's place in its pack
        self.vocab = vocab

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the names of the files, not their handles."""
        return type(self), (self._packs, self._segments, self.vocab)

    @classmethod
    def empty(cls, vocab: int) -> Self:
        """Return a stream of no tokens."""
        none = np.empty(0, np.int64)
        return cls([], Segments(none, none, none), vocab)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return len(self)

    @property
    def shape(self) -> tuple[int]:
        """Return the number of tokens, as the shape of an array."""
        return (len(self),)

    def __getitem__(self, places: Any) -> Any:
        """Return the tokens at places, an array of any shape or a slice, as int32."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        array = np.asarray(places)
        tokens = self._at(np.where(array < 0, array + len(self), array).ravel()).reshape(array.shape)
        return tokens if array.ndim else int(tokens)

    def _at(self, places: Array) -> Tokens:
        if len(places) and (places.min() < 0 or places.max() >= len(self)):
            raise IndexError(f"positions must lie in 0..{len(self) - 1}")
        segments = np.searchsorted(self._ends, places, "right")
        packs = self._segments.packs[segments]
        offsets = places + self._origins[segments]
        tokens = np.empty(len(places), np.int32)
        if not len(places):
            return tokens
        # Tokens that follow each other, as those of a window do, are read at once. A place that is repeated, as the
        # padding of windows is, belongs to the range before it.
        steps = np.diff(offsets)
        breaks = (steps != 1) & (steps != 0) | (np.diff(packs) != 0)
        for start, stop in pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(places)]):
            inside = offsets[start:stop]
            first = int(inside[0])
            part = self._pack(int(packs[start])).read(first, int(inside[-1]) + 1)
            tokens[start:stop] = part if len(part) == len(inside) else part[inside - first]
        if int(tokens.max()) >= self.vocab or int(tokens.min()) < 0:
            raise InputError(
                f"{self._packs[int(packs[0])].path.parent} is damaged: it has a token beyond the vocabulary of "
                f"{self.vocab}; delete the folder, and start the run again"
            )
        return tokens

    def _pack(self, number: int) -> _OpenPack:
        if number not in self._open:
            if len(self._open) >= _MAX_OPEN_PACKS:
                self._open.clear()
            self._open[number] = _OpenPack(self._packs[number])
        return self._open[number]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all tokens, in memory."""
        return self[:].astype(np.int32 if dtype is None else dtype, copy=False)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[int]:
        for block in self.blocks():
            yield from block.tolist()

    def blocks(self, overlap: int = 0) -> Iterator[Tokens]:
        """Yield the tokens in order, in blocks, each with the last `overlap` tokens of the one before."""
        for start in range(0, max(len(self) - overlap, 1), _BLOCK_TOKENS):
            yield self[start : start + _BLOCK_TOKENS + overlap]

    def check(self) -> None:
        """Raise InputError if a pack of the stream is not there, or not whole."""
        for number in np.unique(self._segments.packs).tolist():
            self._packs[number].check()

    def checked(self, vocab: int, least: int, name: str) -> TokenStream:
        """Return the stream, or raise InputError if it is of another vocabulary, or has fewer tokens than `least`."""
        if vocab < self.vocab:
            raise InputError(
                f"{name} must hold token ids of 0 to {vocab - 1}, and the text's vocabulary is {self.vocab}"
            )
        if len(self) < least:
            raise InputError(f"{name} must hold at least {least} tokens, a window and one more, got {len(self)}")
        return self

    def arrays(self) -> Arrays:
        """Return the stream as arrays of a file, without the tokens."""
        columns = (self._segments.packs, self._segments.starts, self._segments.counts)
        rows = [[str(pack.path), pack.kind, pack.tokens] for pack in self._packs]
        listed = json.dumps({"vocab": self.vocab, "packs": rows}).encode()
        return {"segments": np.stack(columns).astype(np.int64), "packs": np.frombuffer(listed, np.uint8)}

    @classmethod
    def parse(cls, arrays: Arrays) -> Self:
        """Return the stream of a file's arrays."""
        listed = json.loads(arrays["packs"].tobytes())
        packs = [TokenPack(Path(path), kind, count) for path, kind, count in listed["packs"]]
        return cls(packs, Segments(*arrays["segments"]), listed["vocab"])


@dataclass(frozen=True, eq=False, slots=True)
class StoredText:
    """The text of a file: its tokens, where its documents end, and which tokens are learnt, if the file says it."""

    tokens: Tokens
    lengths: Array | None
    groups: Array | None
    answers: Tokens | None = None

    @property
    def lesson(self) -> Tokens:
        """Return what a model is trained on: the tokens, some of them perhaps only to be read."""
        return self.tokens if self.answers is None else cast("Tokens", AnsweredText(self.tokens, self.answers))


def open_text(path: Path) -> StoredText:
    """Open a file of tokens: an array in memory, or a stream that behaves like one."""
    arrays = read_arrays(path)[0]
    tokens = _tokens(arrays)
    if tokens is None:
        raise InputError(f"{path} must hold the tokens of a text: start the run again")
    answers = {name.removeprefix(_ANSWERS): array for name, array in arrays.items() if name.startswith(_ANSWERS)}
    return StoredText(tokens, arrays.get("lengths"), arrays.get("groups"), _tokens(answers))


def _tokens(arrays: Arrays) -> Tokens | None:
    return cast("Tokens", TokenStream.parse(arrays)) if "segments" in arrays else arrays.get("tokens")


def has_tokens(path: Path) -> bool:
    """Return whether the tokens that a file names are there, and whole as far as their sizes tell."""
    try:
        text = open_text(path)
        parts: list[Any] = [text.tokens, text.answers]
        for part in parts:
            if isinstance(part, TokenStream):
                part.check()
    except InputError:
        return False
    return True


def join_tokens(texts: Sequence[Tokens]) -> Tokens:
    """Return texts one after the other: without a copy of those that are in the cache."""
    if not any(is_stream(text) for text in texts):
        return np.concatenate(texts)
    if len(texts) == 1:
        return texts[0]
    return cast("Tokens", JoinedTokens(texts))


def text_arrays(tokens: Any, answers: Any = None) -> Arrays:
    """Return the arrays of a file with a text: its tokens, or where in the cache they are, and which are learnt."""
    arrays = tokens.arrays() if isinstance(tokens, TokenStream) else {"tokens": np.asarray(tokens)}
    if answers is None:
        return arrays
    return arrays | {_ANSWERS + name: array for name, array in text_arrays(answers).items()}


def is_stream(tokens: object) -> bool:
    """Return whether a text is read only where it is indexed."""
    return isinstance(tokens, (TokenStream, JoinedTokens, AnsweredText))


def check_text(tokens: Any, vocab: int, least: int, *, name: str = "tokens") -> Tokens:
    """Return a text to train on, or raise InputError; the tokens of a stream are checked when they are read."""
    if isinstance(tokens, (TokenStream, JoinedTokens, AnsweredText)):
        return cast("Tokens", tokens.checked(vocab, least, name))
    return check_tokens(tokens, vocab, least, name=name)


class AnsweredText:
    """A text of which a model reads all tokens and learns some: those of the answers in conversations.

    A token t that is only read comes as its complement -1 - t, so that windows carry what is learnt with them, and the
    padding of a window is one more such token.

    >>> text = AnsweredText(np.array([5, 6, 7, 8]), np.array([0, 0, 1, 1]))
    >>> text[np.arange(4)].tolist()
    [-6, -7, 7, 8]
    >>> read_ids(text[np.arange(4)]).tolist()
    [5, 6, 7, 8]
    """

    ndim = 1
    dtype = np.dtype(np.int32)

    def __init__(self, tokens: Tokens, answers: Tokens) -> None:
        if len(tokens) != len(answers):
            raise InputError(f"answers must say of each of the {len(tokens)} tokens whether it is learnt")
        self._tokens = tokens
        self._answers = answers

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, places: Array) -> Tokens:
        """Return the tokens at places, an array of any shape, as int32; those only to be read as complements."""
        tokens = np.asarray(self._tokens[places], np.int32)
        return np.where(np.asarray(self._answers[places], bool), tokens, ~tokens)

    def checked(self, vocab: int, least: int, name: str) -> AnsweredText:
        """Return the text, or raise InputError if it is of another vocabulary, or too short."""
        return AnsweredText(check_text(self._tokens, vocab, least, name=name), self._answers)


def read_ids(tokens: Tokens) -> Tokens:
    """Return the ids of tokens of which some are only read; padding becomes token 0."""
    return np.where(tokens < 0, ~tokens, tokens)


def draw_places(tokens: Any, draw: Callable[[int], Array], count: int, width: int) -> Array:
    """Draw where `count` windows of a text begin; each has a token that is learnt, behind its first one.

    Parameters
    ----------
    draw
        A function that draws so many places.
    width
        Tokens of a window.
    """
    places = draw(count)
    if not _has_answers(tokens):
        return places
    for _ in range(_MAX_DRAWS):
        empty = (tokens[places[:, None] + np.arange(1, width)] < 0).all(axis=1)
        if not empty.any():
            return places
        places[empty] = draw(int(empty.sum()))
    raise InputError(f"of {_MAX_DRAWS} windows of {width} tokens none has a part of an answer: give longer windows")


def _has_answers(tokens: object) -> bool:
    if isinstance(tokens, JoinedTokens):
        return any(isinstance(text, AnsweredText) for text in tokens.texts)
    return isinstance(tokens, AnsweredText)


class JoinedTokens:
    """Several texts one after the other, read only where they are indexed."""

    ndim = 1
    dtype = np.dtype(np.int32)

    def __init__(self, texts: Sequence[Tokens]) -> None:
        self.texts = texts
        self._ends = np.cumsum([len(text) for text in texts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: Array) -> Tokens:
        """Return the tokens at places, an array of any shape, as int32."""
        array = np.asarray(places)
        owners = np.searchsorted(self._ends, array, "right")
        tokens = np.empty(array.shape, np.int32)
        for owner in np.unique(owners).tolist():
            here = owners == owner
            text = self.texts[owner]
            tokens[here] = text[array[here] - (self._ends[owner] - len(text))]
        return tokens

    def checked(self, vocab: int, least: int, name: str) -> JoinedTokens:
        """Return the text, or raise InputError if a part is of another vocabulary, or all are too short."""
        texts = [check_text(text, vocab, 0, name=name) for text in self.texts]
        if len(self) < least:
            raise InputError(f"{name} must hold at least {least} tokens, a window and one more, got {len(self)}")
        return JoinedTokens(texts)
