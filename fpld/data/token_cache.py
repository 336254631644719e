"""The cache of tokens: a text is tokenized once, by whoever needs it first, and its files are read by all.

The folder of a tokenizer holds packs. A pack is two files: the tokens, as integers of the smallest type that holds the
vocabulary, and an index that says which parts of which files they are. Files are named by their digests and by how they
are read. So a file that has changed is another file, and is tokenized alone.

    tokens/TOKENIZER/000001.u16           the tokens of some millions of words
    tokens/TOKENIZER/000001.safetensors   what they are: written last, so that a pack without it is none

A pack is written under a temporary name, flushed to disk and renamed. Work that is cut off loses the pack that was
being written, and what is there is used the next time. Two processes that prepare a text take turns, and the second
finds what the first has made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from array import array
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Self, cast

import numpy as np
from filelock import FileLock, Timeout

from fpld.data.encoding import encode_each, separator, token_type
from fpld.data.stored import FileDocuments, StoredDocument, StoredDocuments, make_private
from fpld.data.token_stream import Segments, TokenPack, TokenStream
from fpld.errors import InputError
from fpld.progress import ByteProgress
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.storage.files import HALF_WRITTEN, TEMPORARY_PREFIX, canonical_json, remove_half_written, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fpld.data.chat import ChatTokenizer
    from fpld.data.documents import Document
    from fpld.data.stored import StoredFile
    from fpld.data.tokenizers import Tokenizer
    from fpld.types import Array, Arrays, Tokens

_FORMAT = "fpld-tokens-1"
_PACK_TOKENS = 1 << 25
"""Tokens of a pack: as many are lost at most when the work is cut off."""
_INDEX = ".safetensors"

log = logging.getLogger(__name__)


class EncodedDocuments(NamedTuple):
    """The tokens of documents one after the other, and how many each has; of conversations, which tokens are learnt."""

    tokens: Tokens
    lengths: Array
    answers: Tokens | None = None


@dataclass(frozen=True, eq=False, slots=True)
class _Source:
    """Parts of one file, or documents that are in memory: which are wanted, their bytes, and how to read them."""

    key: str
    wanted: Array
    sizes: Array
    read: Callable[[Array], Iterator[tuple[int, str]]]
    check: Callable[[], None] = lambda: None


class _Entries:
    """What the packs of a tokenizer have: for the key of a source, part numbers with their pack and place in it."""

    def __init__(self) -> None:
        self.packs: list[TokenPack] = []
        self._columns: defaultdict[str, list[Array]] = defaultdict(list)
        self._sorted: dict[str, Array] = {}

    def add(self, pack: TokenPack, keys: Sequence[tuple[str, int]], parts: Array, counts: Array) -> None:
        """Add a pack, by the number of parts of each key, in the order of the tokens."""
        starts = np.cumsum(counts) - counts
        number = len(self.packs)
        self.packs.append(pack)
        first = 0
        for key, count in keys:
            rows = slice(first, first + count)
            first += count
            column = np.stack([parts[rows], np.full(count, number), starts[rows], counts[rows]])
            self._columns[key].append(column.astype(np.int64))
            self._sorted.pop(key, None)

    def rows(self, key: str) -> Array:
        """Return [4, n] part numbers in order, packs, starts and counts."""
        if key not in self._sorted:
            columns = np.concatenate([np.empty((4, 0), np.int64), *self._columns[key]], axis=1)
            self._sorted[key] = columns[:, np.argsort(columns[0], kind="stable")]
            self._columns[key] = [self._sorted[key]]
        return self._sorted[key]

    def missing(self, key: str, wanted: Array) -> Array:
        """Return the parts that are in no pack."""
        return np.setdiff1d(wanted, self.rows(key)[0], assume_unique=False)

    def find(self, key: str, wanted: Array) -> Array:
        """Return [3, n] packs, starts and counts of parts that are all there."""
        rows = self.rows(key)
        return np.asarray(rows[1:, np.searchsorted(rows[0], wanted)])


class TokenCache:
    """The tokens of texts in a folder, for one tokenizer.

    Parameters
    ----------
    folder
        The folder of all indexes and tokens of texts; it is made, for its owner alone.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer | ChatTokenizer) -> None:
        self.root = folder
        self._tokenizer = tokenizer
        self._separator = separator(tokenizer)
        options = [_FORMAT, self._separator, tokenizer.vocab, tokenizer.library_json()]
        self._folder = folder / "tokens" / hashlib.sha256(canonical_json(options)).hexdigest()[:32]

    def encode(self, documents: Sequence[Document]) -> EncodedDocuments:
        """Return the tokens of documents, each followed by `separator`; what is not in the cache is made.

        Raises
        ------
        StorageError
            If the cache cannot be written. What it had before is intact.
        """
        make_private(self.root)
        make_private(self._folder)
        files = _by_file(documents)
        memory = dict(sorted(_in_memory(documents).items()))
        sources = _sources(files, self._separator)
        key = ""
        if memory:
            source = _memory_source(list(memory.values()), self._separator)
            key = source.key
            sources.append(source)
        with self._lock():
            entries = self._read()
            missing = [replace(source, wanted=entries.missing(source.key, source.wanted)) for source in sources]
            missing = [source for source in missing if len(source.wanted)]
            if missing:
                self._write(missing, entries)
        located = [_Located.of_file(each, entries) for each in files]
        if memory:
            located.append(_Located(np.array(list(memory)), entries.find(key, np.arange(len(memory)))))
        return _joined(located, entries, self._tokenizer.vocab)

    def _lock(self) -> FileLock:
        lock = FileLock(self._folder / "lock")
        try:
            lock.acquire(timeout=0)
            lock.release()
        except Timeout:
            log.info("another process tokenizes text for %s: waiting for it", self.root)
        except OSError as error:
            raise storage_error(self._folder, error) from error
        return lock

    def _read(self) -> _Entries:
        """Read the indexes of the packs; what a killed process left half-written is removed."""
        remove_half_written(self._folder)
        entries = _Entries()
        for path in sorted(self._folder.glob(f"*{_INDEX}")):
            try:
                arrays, metadata = read_arrays(path, sealed=True)
                pack = TokenPack(path.with_suffix(metadata["suffix"]), metadata["type"], int(arrays["counts"].sum()))
                pack.check()
            except (InputError, OSError, KeyError, TypeError) as error:
                log.warning("%s: its texts are tokenized again", error)
                path.unlink(missing_ok=True)
                continue
            entries.add(pack, json.loads(arrays["keys"].tobytes()), arrays["parts"], arrays["counts"])
        used = {pack.path for pack in entries.packs}
        for path in self._folder.glob("*.u*"):
            if path not in used:
                path.unlink(missing_ok=True)
        return entries

    def _write(self, sources: Sequence[_Source], entries: _Entries) -> None:
        total = sum(int(source.sizes[source.wanted].sum()) for source in sources)
        log.info("tokenizing %.1f MB of text; the tokens are kept in %s", total / 1e6, self.root)
        progress = ByteProgress("tokenizing", total)
        encoding: deque[tuple[_Source, int]] = deque()  # what the encoder has taken, and not given back yet

        def texts() -> Iterator[str]:
            for source in sources:
                for number, text in source.read(source.wanted):
                    encoding.append((source, number))
                    yield text

        writer = _PackWriter(self._folder, self._tokenizer.vocab, entries)
        try:
            for tokens in encode_each(texts(), self._tokenizer):
                source, number = encoding.popleft()
                writer.add(source, number, tokens)
                progress.add(int(source.sizes[number]))
            writer.close()
        finally:
            writer.discard()


class _PackWriter:
    """Write tokens to packs: each under a temporary name, and its index last."""

    def __init__(self, folder: Path, vocab: int, entries: _Entries) -> None:
        self._folder = folder
        self._kind = token_type(vocab).newbyteorder("<")
        self._entries = entries
        self._suffix = f".u{8 * self._kind.itemsize}"
        self._number = max((int(pack.path.stem) for pack in entries.packs), default=0)
        self._start()

    def _start(self) -> None:
        self._file: IO[bytes] | None = None
        self._sources: list[tuple[_Source, int]] = []  # with the number of their parts, in the order of the tokens
        self._parts = array("q")
        self._counts = array("q")
        self._size = 0

    def add(self, source: _Source, number: int, tokens: Array) -> None:
        """Write the tokens of a part."""
        try:
            if self._file is None:
                handle, name = tempfile.mkstemp(
                    dir=self._folder, prefix=f"{TEMPORARY_PREFIX}pack.", suffix=HALF_WRITTEN
                )
                self._temporary = Path(name)
                self._file = os.fdopen(handle, "wb")
            self._file.write(tokens.astype(self._kind, copy=False).tobytes())
        except OSError as error:
            raise storage_error(self._folder, error) from error
        if self._sources and self._sources[-1][0] is source:
            self._sources[-1] = (source, self._sources[-1][1] + 1)
        else:
            self._sources.append((source, 1))
        self._parts.append(number)
        self._counts.append(len(tokens))
        self._size += len(tokens)
        if self._size >= _PACK_TOKENS:
            self.close()

    def close(self) -> None:
        """End the pack: its tokens are flushed to disk before the index says that they are there."""
        if self._file is None:
            return
        for source, _ in self._sources:
            source.check()
        self._number += 1
        path = self._folder / f"{self._number:06d}{self._suffix}"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(path)
        except OSError as error:
            raise storage_error(path, error) from error
        keys = [(source.key, count) for source, count in self._sources]
        arrays: Arrays = {
            "keys": np.frombuffer(json.dumps(keys).encode(), np.uint8),
            "parts": np.frombuffer(self._parts, np.int64),
            "counts": np.frombuffer(self._counts, np.int64),
        }
        write_arrays(path.with_suffix(_INDEX), arrays, {"type": self._kind.str, "suffix": self._suffix})
        pack = TokenPack(path, self._kind.str, self._size)
        self._entries.add(pack, keys, arrays["parts"], arrays["counts"])
        self._start()

    def discard(self) -> None:
        """Delete a pack that was not ended."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)
            self._start()


def _by_file(documents: Sequence[Document]) -> list[FileDocuments]:
    """Return the documents that are in files, file by file."""
    if isinstance(documents, StoredDocuments):
        return list(documents.by_file())
    files: dict[int, list[tuple[int, StoredDocument]]] = {}
    for place, document in enumerate(documents):
        if isinstance(document, StoredDocument):
            files.setdefault(id(document.file), []).append((place, document))
    return [
        FileDocuments(
            rows[0][1].file,
            np.array([place for place, _ in rows]),
            np.array([document.first for _, document in rows]),
            np.array([document.stop for _, document in rows]),
        )
        for rows in files.values()
    ]


def _in_memory(documents: Sequence[Document]) -> dict[int, Document]:
    """Return the documents that are in memory, by their places."""
    if isinstance(documents, StoredDocuments):
        return documents.others()
    every = enumerate(documents)
    return {place: document for place, document in every if not isinstance(document, StoredDocument)}


def _sources(files: Sequence[FileDocuments], end: str) -> list[_Source]:
    """Return what is wanted of each file; files of the same content are one."""
    sources: dict[str, _Source] = {}
    for each in files:
        key = each.file.key
        wanted = each.parts() if key not in sources else np.concatenate([sources[key].wanted, each.parts()])
        read = partial(_file_parts, each.file, end)
        sources[key] = _Source(key, np.unique(wanted), each.file.sizes, read, each.file.check)
    return list(sources.values())


def _file_parts(file: StoredFile, end: str, wanted: Array) -> Iterator[tuple[int, str]]:
    chosen = np.zeros(len(file.numbers), bool)
    chosen[wanted] = True
    for number, part in enumerate(file.parts()):
        if chosen[number]:
            yield number, part.text + end if part.last else part.text


def _memory_source(documents: Sequence[Document], end: str) -> _Source:
    """Return documents in memory as one source, named by the digest of their texts."""
    hashed = hashlib.sha256()
    sizes = []
    for document in documents:
        content = document.text.encode()
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
        sizes.append(len(content))

    def read(wanted: Array) -> Iterator[tuple[int, str]]:
        for number in wanted.tolist():
            yield number, documents[number].text + end

    return _Source(hashed.hexdigest(), np.arange(len(documents)), np.array(sizes, np.int64), read)


class _Located(NamedTuple):
    """Where the parts of documents are: the place of each part's document, and [3, n] packs, starts and counts."""

    owners: Array
    rows: Array

    @classmethod
    def of_file(cls, documents: FileDocuments, entries: _Entries) -> Self:
        """Find the documents of a file."""
        counts = documents.stops - documents.firsts
        return cls(np.repeat(documents.places, counts), entries.find(documents.file.key, documents.parts()))


def _joined(located: Sequence[_Located], entries: _Entries, vocab: int) -> EncodedDocuments:
    """Return the tokens in the order of the documents."""
    if not located:
        return EncodedDocuments(cast("Tokens", TokenStream.empty(vocab)), np.empty(0, np.int64))
    owners = np.concatenate([each.owners for each in located])
    rows = np.concatenate([each.rows for each in located], axis=1)
    order = np.argsort(owners, kind="stable")
    if (np.diff(order) != 1).any():  # most texts are in the order of their files, and need no copy
        owners = owners[order]
        rows = rows[:, order]
    segments = Segments(*rows)
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    lengths = np.add.reduceat(segments.counts, first)
    stream = TokenStream(entries.packs, segments.merged(), vocab)
    return EncodedDocuments(cast("Tokens", stream), lengths)


def clear_texts(folder: Path) -> int:
    """Delete the indexes and tokens of all texts in a folder; return how many bytes that freed."""
    size = cached_bytes(folder)
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise storage_error(folder, error) from error
    return size


def cached_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder of texts."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
