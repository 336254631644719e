"""Read texts from files and folders as a stream: plain text, JSON, CSV, Parquet, datasets as Hugging Face saves them.

A folder is walked in sorted order, so that every machine sees the same documents in the same order. No more than one
document is in memory, and of a long one (`MAX_WHOLE_CHARACTERS`) a part. A `.json` file is read as a whole.

=====================  ========================================================================================
suffix                 what is in it
=====================  ========================================================================================
.txt .text .md .rst    one text
.jsonl .ndjson         a JSON object a line, with the text in a field
.json                  one such object, or an array of them
.csv .tsv              a header, and a text a row
.parquet               a table with a column of texts
.arrow                 the same, as `datasets` saves it
.gz .xz .bz2 .zst      any of these but the tables, compressed
=====================  ========================================================================================

A field named `messages` has no text but a conversation: a list of messages, each with a role and a content. It is read
as the JSON of that list (`fpld.data.chat`).
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import logging
import lzma
import os
import sys
import zlib
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from fpld.data.documents import cut_place
from fpld.errors import InputError, MissingExtraError
from fpld.storage.files import open_binary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Chunks = Iterable[str]
    Reader = Callable[[Path, str], Iterator[tuple[int, Chunks]]]

COMPRESSED = frozenset({".gz", ".xz", ".bz2", ".zst"})
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
MAX_WHOLE_CHARACTERS = 4_000_000
"""The most characters of a document that are in memory at once; a longer one comes in parts."""
PART_CHARACTERS = 1_000_000
_TABLES = frozenset({".parquet", ".arrow"})  # compressed inside, if at all
# Files about a dataset beside its data, in a folder that `datasets` saved or a hub keeps.
_METADATA_FILES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_CARDS = frozenset({"README.md", "README.txt", "LICENSE.txt", "LICENSE.md"})
_MAX_NAMED = 5  # skipped files that a line of the log names
_BLOCK_BYTES = 1 << 20  # of a file, read at once
_TABLE_ROWS = 256  # of a table, read at once
_BOM = "\ufeff"
MESSAGES = "messages"
"""The field of records that holds conversations."""

log = logging.getLogger(__name__)


class TextPart(NamedTuple):
    """A document of a file, or a part of a long one.

    `number` is the document's place in the file, counted from 1; 0 where the file is one text. `last`: nothing of the
    document follows.
    """

    number: int
    text: str
    last: bool


def content_suffix(file: Path) -> str:
    """Return the suffix that says what is in a file, without that of the compression.

    >>> from pathlib import Path
    >>> content_suffix(Path("notes.JSONL.gz"))
    '.jsonl'
    """
    ends = [end.lower() for end in file.suffixes]
    while ends and ends[-1] in COMPRESSED:
        ends.pop()
    return ends[-1] if ends else ""


def holds_chats(file: Path, field: str) -> bool:
    """Return whether what is read of a file by this field are conversations.

    >>> from pathlib import Path
    >>> holds_chats(Path("chat.jsonl"), "messages"), holds_chats(Path("notes.txt"), "messages")
    (True, False)
    """
    return field == MESSAGES and content_suffix(file) in READERS.keys() - TEXT_SUFFIXES


def read_parts(file: Path, field: str) -> Iterator[TextPart]:
    """Yield the documents of a file that are not blank, a long one in parts.

    A file of a suffix that is not in the table is one text.
    """
    for number, chunks in READERS.get(content_suffix(file), _plain)(file, field):
        yield from _parts(number, chunks)


def _parts(number: int, chunks: Chunks) -> Iterator[TextPart]:
    """Join the chunks of a document; cut it if it is long."""
    start: list[str] = []
    length = 0
    remaining = iter(chunks)
    for chunk in remaining:
        start.append(chunk)
        length += len(chunk)
        if length > MAX_WHOLE_CHARACTERS:
            break
    text = "".join(start)
    if length <= MAX_WHOLE_CHARACTERS:
        if text.strip():
            yield TextPart(number, text, True)
        return
    del start
    rest = ""
    for chunk in chain([text], remaining):
        rest += chunk
        place = 0
        while len(rest) - place > 2 * PART_CHARACTERS:
            stop = cut_place(rest, place + PART_CHARACTERS, place + 2 * PART_CHARACTERS)
            yield TextPart(number, rest[place:stop], False)
            place = stop
        rest = rest[place:]
    yield TextPart(number, rest, True)


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed; a file that is no whole one of its kind is an InputError."""
    compression = file.suffix.lower()
    with open_binary(file) as stream:
        if compression not in COMPRESSED:
            yield stream
            return
        try:
            yield _decompressed(stream, file, compression)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{file} must be a whole {compression} file: {error}") from None


def _decompressed(stream: BinaryIO, file: Path, compression: str) -> BinaryIO:
    if compression == ".gz":
        return cast("BinaryIO", gzip.open(stream))
    if compression == ".xz":
        return cast("BinaryIO", lzma.open(stream))
    if compression == ".bz2":
        return cast("BinaryIO", bz2.open(stream))
    source = pyarrow_library("a .zst file").input_stream(str(file), compression="zstd")
    return cast("BinaryIO", io.BufferedReader(source, _BLOCK_BYTES))


def _plain(file: Path, _field: str) -> Iterator[tuple[int, Chunks]]:
    yield 0, _decoded(file)


def _decoded(file: Path) -> Iterator[str]:
    """Yield a file's text in blocks, without a byte order mark at its start."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    started = False
    with _opened(file) as stream:
        while True:
            block = stream.read(_BLOCK_BYTES)
            before = offset - len(decoder.getstate()[0])  # bytes of a character that the last block cut
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _no_utf8(file, before + error.start, error) from None
            offset += len(block)
            if text and not started:
                text = text.removeprefix(_BOM)
                started = True
            if text:
                yield text
            if not block:
                return


def _no_utf8(file: Path, place: int, error: UnicodeDecodeError) -> InputError:
    return InputError(
        f"{file} must be UTF-8, but byte {place} is 0x{error.object[error.start]:02x} ({error.reason}): "
        "convert the file to UTF-8, or leave it out"
    )


def _json_lines(file: Path, field: str) -> Iterator[tuple[int, Chunks]]:
    # Lines end at a line feed alone: a line separator of Unicode may stand inside a JSON string.
    offset = 0
    with _opened(file) as stream:
        for number, content in enumerate(stream, start=1):
            try:
                line = content.decode()
            except UnicodeDecodeError as error:
                raise _no_utf8(file, offset + error.start, error) from None
            offset += len(content)
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                place = f"{file}:{number}"
                yield number, [_text(_parsed(line, place, "one JSON object"), field, place)]


def _json(file: Path, field: str) -> Iterator[tuple[int, Chunks]]:
    value = _parsed("".join(_decoded(file)), str(file), "JSON")
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield number, [_text(row, field, f"{file}:{number}")]


def _csv(file: Path, field: str) -> Iterator[tuple[int, Chunks]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # its own limit is shorter than a document
    with _opened(file) as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        rows = csv.DictReader(lines, delimiter="\t" if content_suffix(file) == ".tsv" else ",")
        try:
            for number, row in enumerate(rows, start=1):
                place = f"{file}, row {number}"
                yield number, [_text({key: value or "" for key, value in row.items()}, field, place)]
        except csv.Error as error:
            raise InputError(f"{file} must be CSV with a header: {error}") from None
        except UnicodeDecodeError:
            for _ in _decoded(file):  # it says which byte it is
                pass
            raise


def _parquet(file: Path, field: str) -> Iterator[tuple[int, Chunks]]:
    pyarrow_library("Parquet")
    from pyarrow import parquet

    return _columns(
        file,
        field,
        lambda: _batches(parquet.ParquetFile(file, buffer_size=_BLOCK_BYTES, pre_buffer=False), file, field),
    )


def _batches(table: Any, file: Path, field: str) -> Iterable[Any]:
    _has(field, table.schema_arrow.names, file)
    return table.iter_batches(batch_size=_TABLE_ROWS, columns=[field])  # type: ignore[no-any-return]


def _arrow(file: Path, field: str) -> Iterator[tuple[int, Chunks]]:
    pyarrow_library("a folder of datasets")
    from pyarrow import ipc

    def batches() -> Iterable[Any]:
        with file.open("rb") as stream:
            reader = ipc.open_stream(stream)
            _has(field, reader.schema.names, file)
            yield from (batch.select([field]) for batch in reader)

    return _columns(file, field, batches)


def _columns(file: Path, field: str, batches: Callable[[], Iterable[Any]]) -> Iterator[tuple[int, Chunks]]:
    number = 0
    try:
        for batch in batches():
            for value in batch.column(0).to_pylist():
                number += 1
                if value is not None:
                    yield number, [_text({field: value}, field, f"{file}, row {number}")]
    except (OSError, pyarrow_library("a table").ArrowException) as error:
        raise InputError(f"{file} must be a whole table: {str(error).partition(chr(10))[0]}") from None


def _has(field: str, names: list[str], file: Path) -> None:
    if field not in names:
        raise InputError(_no_field(str(file), field, names))


def _no_field(place: str, field: str, names: Iterable[str]) -> str:
    advice = f"; for conversations set the field to {MESSAGES!r}" if MESSAGES in names else ""
    return f"{place} has no field {field!r} for the text: its fields are {sorted(names)}{advice}"


def _parsed(text: str, place: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{place} must be {what}: {error}") from None


def _text(row: Any, field: str, place: str) -> str:
    if not isinstance(row, dict):
        raise InputError(f"{place} must be a JSON object, got {type(row).__name__}")
    if field not in row:
        raise InputError(_no_field(place, field, list(map(str, row))))
    value = row[field]
    if field == MESSAGES:
        value = _conversation(value, place)
    if not isinstance(value, str):
        raise InputError(f"{place}: field {field!r} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{place}: field {field!r} must be text that UTF-8 can hold, but character {error.start} is half "
            "of a surrogate pair: repair the line"
        ) from None
    return value


def _conversation(value: Any, place: str) -> str:
    """Return the messages of a record as JSON, each with its role and its content alone."""
    if not isinstance(value, list) or len(value) < 2:
        raise InputError(f"{place}: {MESSAGES!r} must be a list of a question and an answer at least")
    messages = []
    for message in value:
        match message:
            case {"role": str(role), "content": str(content)}:
                messages.append({"role": role, "content": content})
            case _:
                raise InputError(f"{place}: each of the {MESSAGES!r} must have a role and a content that are strings")
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant" or "assistant" not in roles:
        raise InputError(
            f"{place}: of the {MESSAGES!r} one must be of the role 'assistant', which is an answer, and not the first: "
            f"their roles are {roles[:6]}"
        )
    text = json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_WHOLE_CHARACTERS:
        raise InputError(f"{place}: a conversation must have at most {MAX_WHOLE_CHARACTERS} characters: cut it")
    return text


def pyarrow_library(what: str) -> Any:
    """Import pyarrow; raise MissingExtraError without it."""
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingExtraError(what, "export") from None
    return pa


READERS: dict[str, Reader] = {
    **dict.fromkeys(TEXT_SUFFIXES, _plain),
    **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
    ".json": _json,
    **dict.fromkeys((".csv", ".tsv"), _csv),
    ".parquet": _parquet,
    ".arrow": _arrow,
}


def text_files(root: Path) -> list[Path]:
    """Return the files of a folder that hold text, in the order of their paths; the log names the others."""
    files = _walk(root)
    records = any(content_suffix(file) not in TEXT_SUFFIXES and _readable(file) for file in files)
    taken = [file for file in files if _readable(file) and not (records and file.name in _CARDS)]
    if not taken:
        suffixes = ", ".join(sorted(READERS))
        raise InputError(f"the folder {root} holds no text: it needs at least one file of {suffixes}")
    skipped = [file.relative_to(root).as_posix() for file in files if file not in set(taken)]
    if skipped:
        more = "" if len(skipped) <= _MAX_NAMED else f" and {len(skipped) - _MAX_NAMED} more"
        log.warning("%s: skipped, since they are no text: %s%s", root, ", ".join(skipped[:_MAX_NAMED]), more)
    return taken


def _readable(file: Path) -> bool:
    suffix = content_suffix(file)
    compressed_table = suffix in _TABLES and file.suffix.lower() in COMPRESSED
    return suffix in READERS and file.name not in _METADATA_FILES and not compressed_table


def _walk(root: Path) -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files.extend(Path(folder, name) for name in names if not name.startswith("."))
    # By parts, not as strings: the order must not depend on the separator of the operating system.
    return sorted(files, key=lambda file: file.parts)
