"""Documents that stay in their files: an index of a text says what there is, and a text is read when it is needed.

A small text is read into memory. Of a larger one the documents are counted and measured once. Their sizes are kept in
the cache, with the digest of each file, so that a file is read again only if it has changed. In memory is what columns
of numbers say: a document takes some tens of bytes, however long it is.

A file has changed if its size, its times or its inode are others. One that was written in the last seconds is read
again the next time, since a change within the clock's resolution would not be seen.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, overload

import numpy as np

from fpld.data import readers
from fpld.data.documents import Document, DocumentColumns
from fpld.data.fetch import cache_folder, sha256_file
from fpld.data.hub import hub_hint, text_folder
from fpld.data.readers import COMPRESSED, content_suffix, holds_chats, read_parts, text_files
from fpld.errors import InputError, StorageError
from fpld.progress import ByteProgress
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.storage.files import storage_error

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from fpld.data.readers import TextPart
    from fpld.types import Array, Arrays

MAX_IN_MEMORY_BYTES = 8_000_000
"""Bytes of a text that is read into memory; the documents of a larger one stay in their files."""
TEXT_CACHE = "texts"
"""The folder of indexes and tokens, in a cache or a site's folder."""
_FORMAT = "fpld-text-index-1"
_SETTLED_SECONDS = 2.0  # since the last write of a file, for its times to be trusted
_COMPRESSION = 4  # times that a compressed text is longer, as a first guess
_ITERATED = 1 << 14  # documents that are made objects at once

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class StoredFile:
    """A file of texts: where it is, what it was when it was read, and its documents, of which long ones have parts.

    `numbers` are the places of the parts' documents in the file, `sizes` the bytes of the parts.
    """

    path: Path
    name: str
    label: str
    field: str
    digest: str
    signature: str
    numbers: Array
    sizes: Array

    @property
    def key(self) -> str:
        """Return the digest of what the texts follow from: the file's content, how it is read and what is read."""
        kind = "".join(self.path.suffixes[-2:]).lower()
        options = [self.digest, kind, self.field, *_part_lengths()]
        return hashlib.sha256(json.dumps(options).encode()).hexdigest()

    @property
    def chat(self) -> bool:
        """Return whether the documents are conversations."""
        return holds_chats(self.path, self.field)

    def parts(self) -> Iterator[TextPart]:
        """Read the parts; raise InputError if the file is no longer what it was."""
        self.check()
        yield from read_parts(self.path, self.field)
        self.check()

    def check(self) -> None:
        """Raise InputError if the file has changed since it was measured."""
        if file_signature(self.path) != self.signature:
            raise InputError(f"{self.path} has changed since this run began to read it: start again")


class StoredDocument(Document):
    """A document, or some parts of a long one, in a file: parts `first` to `stop`."""

    __slots__ = ("_name", "_size", "file", "first", "stop")

    def __init__(self, file: StoredFile, first: int, stop: int, size: int, name: str | None = None) -> None:
        for slot, value in (("file", file), ("first", first), ("stop", stop), ("_size", size), ("_name", name)):
            object.__setattr__(self, slot, value)

    file: StoredFile
    first: int
    stop: int
    _size: int
    _name: str | None

    @property
    def name(self) -> str:
        """Return the path below the folder that was read, and the place in the file."""
        if self._name is not None:
            return self._name
        number = int(self.file.numbers[self.first])
        return f"{self.file.name}:{number}" if number else self.file.name

    @property
    def text(self) -> str:
        """Read the text."""
        return "".join(document_texts([self]))

    @property
    def label(self) -> str:
        """Return the first folder of the path."""
        return self.file.label

    @property
    def group(self) -> str:
        """Return no group."""
        return ""

    @property
    def chat(self) -> bool:
        """Return whether the text is a conversation."""
        return self.file.chat

    @property
    def size(self) -> int:
        """Return the length of the text in bytes of UTF-8."""
        return self._size

    @property
    def blank(self) -> bool:
        """Return whether the text has nothing but white space: no such document is in an index."""
        return False

    @property
    def long(self) -> bool:
        """Return whether the document is in several parts."""
        return self.stop - self.first > 1

    def start(self, most: int) -> Document:
        """Return the parts that fit `most` bytes; of a document in one part, the start of its text."""
        stop = self.first + int(np.searchsorted(self._part_ends(), most, "right"))
        if stop > self.first:
            return self._range(self.first, stop, self._name)
        text = next(part for number, part in enumerate(self.file.parts()) if number == self.first).text
        return Document(self.name, text, self.label, chat=self.chat).start(most)

    def split(self, most: int) -> tuple[Document, Document]:
        """Return the start and the rest: whole parts, both sides with one at least, where there are several."""
        if self.stop - self.first == 1:
            return self._in_memory().split(most)
        count = int(np.searchsorted(self._part_ends(), most, "right"))
        middle = self.first + min(max(count, 1), self.stop - self.first - 1)
        return self._range(self.first, middle, self._name), self._range(middle, self.stop, self._name)

    def cut(self, parts: int) -> list[Document]:
        """Return the document in at most `parts` of about the same length."""
        if self.stop - self.first == 1:
            return self._in_memory().cut(parts)
        ends = self._part_ends()
        wanted = np.arange(1, parts) * self.size // parts
        places = np.unique([0, *(np.searchsorted(ends, wanted) + 1).tolist(), len(ends)])
        ranges = pairwise((self.first + places).tolist())
        return [self._range(first, stop, f"{self.name}#{index}") for index, (first, stop) in enumerate(ranges, 1)]

    def _in_memory(self) -> Document:
        return Document(self.name, self.text, self.label, chat=self.chat)

    def _part_ends(self) -> Array:
        return np.cumsum(self.file.sizes[self.first : self.stop])

    def _range(self, first: int, stop: int, name: str | None) -> StoredDocument:
        return StoredDocument(self.file, first, stop, int(self.file.sizes[first:stop].sum()), name or self.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return (self.name, self.label, self.group, self.text) == (other.name, other.label, other.group, other.text)

    def __hash__(self) -> int:
        return hash((self.name, self._size))

    def __repr__(self) -> str:
        return f"StoredDocument({self.name!r}, {self._size} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredDocument, (self.file, self.first, self.stop, self._size, self._name)


class FileDocuments(NamedTuple):
    """Documents of one file: their places in the list of all, and the parts from and up to which they go."""

    file: StoredFile
    places: Array
    firsts: Array
    stops: Array

    def parts(self) -> Array:
        """Return the numbers of all parts, in the order of the documents."""
        counts = self.stops - self.firsts
        ends = np.cumsum(counts, dtype=np.int64)
        return np.asarray(np.repeat(self.firsts - (ends - counts), counts) + np.arange(ends[-1]))


class StoredDocuments(DocumentColumns):
    """Documents in files, as columns: number of the file, first part, end of the parts, and bytes.

    Those in `others` are in memory, such as the start of one that was cut; their columns count for nothing else than
    their place in the order.
    """

    def __init__(
        self, files: Sequence[StoredFile], columns: Sequence[Array], others: Mapping[int, Document] | None = None
    ) -> None:
        self._files = files
        self._owners, self._firsts, self._stops, self._sizes = columns
        self._others = dict(others or {})

    @classmethod
    def of_files(cls, files: Sequence[StoredFile]) -> Self:
        """Return all documents of some files, in their order."""
        owners: list[Array] = [np.empty(0, np.int32)]
        firsts: list[Array] = [np.empty(0, np.int32)]
        stops: list[Array] = [np.empty(0, np.int32)]
        sizes: list[Array] = [np.empty(0, np.int64)]
        for owner, file in enumerate(files):
            if not len(file.numbers):
                continue
            starts = np.concatenate([[0], np.flatnonzero(np.diff(file.numbers)) + 1]).astype(np.int32)
            owners.append(np.full(len(starts), owner, np.int32))
            firsts.append(starts)
            stops.append(np.append(starts[1:], len(file.numbers)).astype(np.int32))
            sizes.append(np.add.reduceat(file.sizes, starts))
        return cls(files, [np.concatenate(parts) for parts in (owners, firsts, stops, sizes)])

    def __len__(self) -> int:
        return len(self._owners)

    @overload
    def __getitem__(self, place: int) -> Document: ...
    @overload
    def __getitem__(self, place: slice) -> StoredDocuments: ...
    def __getitem__(self, place: int | slice) -> Document | StoredDocuments:
        """Return a document, or those of a slice."""
        if isinstance(place, slice):
            return self.pick(np.arange(*place.indices(len(self))), {})
        place = range(len(self))[place]
        if place in self._others:
            return self._others[place]
        first, stop, size = (int(column[place]) for column in (self._firsts, self._stops, self._sizes))
        return StoredDocument(self._files[self._owners[place]], first, stop, size)

    def __iter__(self) -> Iterator[Document]:
        columns = (self._owners, self._firsts, self._stops, self._sizes)
        for begin in range(0, len(self), _ITERATED):
            rows = zip(*(column[begin : begin + _ITERATED].tolist() for column in columns), strict=True)
            for place, (owner, first, stop, size) in enumerate(rows, begin):
                other = self._others.get(place)
                yield StoredDocument(self._files[owner], first, stop, size) if other is None else other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StoredDocuments({len(self)} in {len(self._files)} files, {int(self._sizes.sum())} bytes)"

    @property
    def sizes(self) -> Array:
        """Return the bytes of each document."""
        return self._sizes

    @property
    def ranks(self) -> Array:
        """Return the places that the documents had if they were sorted by the names of their files and in these."""
        names = sorted(range(len(self._files)), key=lambda number: self._files[number].name)
        of_file = np.empty(len(names), np.int32)
        of_file[names] = np.arange(len(names))
        ranks = np.empty(len(self), np.int64)
        ranks[np.lexsort((self._firsts, of_file[self._owners]))] = np.arange(len(self))
        return ranks

    @property
    def kinds(self) -> set[bool]:
        """Return which values `chat` has."""
        return {self._files[owner].chat for owner in np.unique(self._owners).tolist()}

    def pick(self, places: Array, changed: Mapping[int, Document]) -> StoredDocuments:
        """Return the documents at some places, in that order; those in `changed` instead of what is there."""
        columns = [column[places] for column in (self._owners, self._firsts, self._stops, self._sizes)]
        others: dict[int, Document] = {}
        for place, document in (self._others | dict(changed)).items():
            for new in np.flatnonzero(places == place).tolist():
                if isinstance(document, StoredDocument):
                    columns[1][new] = document.first
                    columns[2][new] = document.stop
                else:
                    others[new] = document
                columns[3][new] = document.size
        return StoredDocuments(self._files, columns, others)

    def others(self) -> dict[int, Document]:
        """Return the documents that are in memory, by their places."""
        return self._others

    def by_file(self) -> Iterator[FileDocuments]:
        """Yield the documents that are in files, file by file."""
        inside = np.ones(len(self), bool)
        inside[list(self._others)] = False
        places = np.flatnonzero(inside)
        places = places[np.argsort(self._owners[places], kind="stable")]
        bounds = np.flatnonzero(np.diff(self._owners[places])) + 1
        for some in np.split(places, bounds) if len(places) else []:
            file = self._files[self._owners[some[0]]]
            yield FileDocuments(file, some, self._firsts[some], self._stops[some])


def document_texts(documents: Iterable[Document]) -> Iterator[str]:
    """Yield the texts of documents in their order; those of one file in one pass, a long document in parts."""
    waiting: list[StoredDocument] = []
    for document in documents:
        if waiting and not (isinstance(document, StoredDocument) and _follows(waiting[-1], document)):
            yield from _read_texts(waiting)
            waiting = []
        if isinstance(document, StoredDocument):
            waiting.append(document)
        else:
            yield document.text
    yield from _read_texts(waiting)


def _follows(one: StoredDocument, other: StoredDocument) -> bool:
    return one.file is other.file and one.stop <= other.first


def _read_texts(documents: Sequence[StoredDocument]) -> Iterator[str]:
    if not documents:
        return
    remaining = iter(documents)
    document = next(remaining)
    for number, part in enumerate(documents[0].file.parts()):
        if number >= document.first:
            yield part.text
        if number + 1 == document.stop:
            following = next(remaining, None)
            if following is None:
                return
            document = following


def read_documents(
    path: str | os.PathLike[str], *, field: str = "text", cache: str | os.PathLike[str] | None = None
) -> Sequence[Document]:
    """Read all documents at `path`: a file, or a folder of files; files that are skipped are named in the log.

    Parameters
    ----------
    path
        A file of a suffix that `fpld.data.readers` lists (one of any other suffix is one text), or a folder that is
        walked recursively, such as one saved by `datasets`, or a name of a hub (`fpld.data.hub`). Hidden files and
        links to folders are passed over.
    field
        The field or column of records that holds the text. One named `messages` holds conversations
        (`fpld.data.chat`).
    cache
        The folder for the index of a text that is not read into memory; by default `texts` in the package's cache.

    Returns
    -------
    sequence of Document
        The documents that are not empty, in the order of their paths and places.
    """
    root = text_folder(path)
    if not root.exists():
        hint = hub_hint(str(path), "dataset")
        raise InputError(f"{root.absolute()} does not exist: give the path of an existing file or folder{hint}")
    files = text_files(root) if root.is_dir() else [root]
    documents: Sequence[Document] | None = _in_memory(root, files, field)
    if documents is None:
        folder = _default_cache() if cache is None else Path(cache)
        documents = StoredDocuments.of_files(_index(root, files, field, folder))
    if not documents:
        raise InputError(f"{root} holds only empty documents: give text of at least one character")
    return documents


def _in_memory(root: Path, files: Sequence[Path], field: str) -> list[Document] | None:
    """Return the documents with their texts; None if these are too many bytes."""
    guess = sum(_COMPRESSION ** _is_packed(file) * file.stat().st_size for file in files if file.exists())
    if guess > MAX_IN_MEMORY_BYTES:
        return None
    documents: list[Document] = []
    size = 0
    for file in files:
        name, label = _place(file, root)
        parts: list[str] = []
        for part in read_parts(file, field):
            parts.append(part.text)
            size += len(part.text)
            if size > MAX_IN_MEMORY_BYTES:  # compressed more than usual
                return None
            if part.last:
                number = f":{part.number}" if part.number else ""
                chat = holds_chats(file, field)
                documents.append(Document(f"{name}{number}", "".join(parts), label, chat=chat))
                parts = []
    return documents


def _is_packed(file: Path) -> bool:
    return file.suffix.lower() in COMPRESSED or content_suffix(file) in (".parquet", ".arrow")


def _place(file: Path, root: Path) -> tuple[str, str]:
    """Return a file's name below the folder that is read, and its label."""
    relative = file.relative_to(root) if file != root else Path(file.name)
    return relative.as_posix(), relative.parts[0] if len(relative.parts) > 1 else ""


def file_signature(path: Path) -> str:
    """Return what tells whether a file has changed, without reading it; empty where it is not there."""
    try:
        entry = path.stat()
    except OSError:
        return ""
    return f"{entry.st_ino} {entry.st_size} {entry.st_mtime_ns} {entry.st_ctime_ns}"


def is_measured(path: str | os.PathLike[str], *, field: str = "text") -> bool:
    """Return whether the cache has the sizes of all documents of a text, so that `read_documents` reads no file."""
    root = text_folder(path)
    files = text_files(root) if root.is_dir() else [root]
    cached = {
        file.name: file.signature for file in _read_index(_index_path(root, field, _default_cache()), root, field)
    }
    return all(cached.get(_place(file, root)[0]) == file_signature(file) for file in files)


def _default_cache() -> Path:
    return cache_folder() / TEXT_CACHE


def _index_path(root: Path, field: str, cache: Path) -> Path:
    options = [str(root.resolve()), field, *_part_lengths()]
    name = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:32]
    return cache / "indexes" / f"{name}.safetensors"


def _index(root: Path, files: Sequence[Path], field: str, cache: Path) -> list[StoredFile]:
    """Return the files with their documents, by the cache for those that have not changed since."""
    path = _index_path(root, field, cache)
    cached = {file.name: file for file in _read_index(path, root, field)}
    progress = ByteProgress(f"reading {root}", sum(file.stat().st_size for file in files))
    indexed: list[StoredFile] = []
    for file in files:
        previous = cached.get(_place(file, root)[0])
        signature = file_signature(file)
        if previous is None or previous.signature != signature:
            previous = _measure(file, root, field, signature)
        indexed.append(previous)
        progress.add(file.stat().st_size)
    if [file.signature for file in indexed] != [file.signature for file in cached.values()]:
        try:
            _write_index(path, indexed)
        except StorageError as error:  # it only saves time
            log.warning("%s: the text is measured again the next time", error)
    return indexed


def _part_lengths() -> list[int]:
    """Return what decides where long documents are cut."""
    return [readers.MAX_WHOLE_CHARACTERS, readers.PART_CHARACTERS]


def _measure(file: Path, root: Path, field: str, signature: str) -> StoredFile:
    """Read a file, and measure its documents."""
    name, label = _place(file, root)
    numbers = array("q")  # a list would take eight times as much for each document
    sizes = array("q")
    for part in read_parts(file, field):
        numbers.append(part.number)
        sizes.append(len(part.text.encode()))
    columns = (np.frombuffer(column, np.int64) for column in (numbers, sizes))
    stored = StoredFile(file, name, label, field, sha256_file(file), signature, *columns)
    stored.check()
    return stored


def _write_index(path: Path, files: Sequence[StoredFile]) -> None:
    """Write the index of a text; a file that was just written is left out, since its times do not tell a change yet."""
    settled = time.time_ns() - round(_SETTLED_SECONDS * 1e9)
    kept = [file for file in files if int(file.signature.split()[2]) < settled]
    rows = [[file.name, file.signature, file.digest, len(file.numbers)] for file in kept]
    empty: list[Array] = [np.empty(0, np.int64)]
    arrays: Arrays = {
        "files": np.frombuffer(json.dumps(rows).encode(), np.uint8),
        "numbers": np.concatenate([*empty, *(file.numbers for file in kept)]),
        "sizes": np.concatenate([*empty, *(file.sizes for file in kept)]),
    }
    make_private(path.parent)
    write_arrays(path, arrays, {"format": _FORMAT})


def _read_index(path: Path, root: Path, field: str) -> Iterator[StoredFile]:
    """Yield the files of an index; none if there is no sound one."""
    if not path.exists():
        return
    try:
        arrays, metadata = read_arrays(path, sealed=True)
    except InputError:
        return
    if metadata.get("format") != _FORMAT:
        return
    first = 0
    for name, signature, digest, count in json.loads(arrays["files"].tobytes()):
        rows = slice(first, first + count)
        first += count
        file = root / name if root.is_dir() else root
        yield StoredFile(
            file, name, _place(file, root)[1], field, digest, signature, arrays["numbers"][rows], arrays["sizes"][rows]
        )


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone may read."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise storage_error(folder, error) from error
