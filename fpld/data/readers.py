"""Read documents from files and folders: plain text, JSON, CSV, Parquet, and datasets as Hugging Face saves them.

A folder is walked in sorted order, so that every machine sees the same documents in the same order. The label of a
document is the first folder below the one that is read: a natural split uses it.

=====================  ========================================================================================
suffix                 what is in it
=====================  ========================================================================================
.txt .text .md .rst    one text
.jsonl .ndjson         a JSON object a line, with the text in a field
.json                  one such object, or an array of them
.csv .tsv              a header, and a text a row
.parquet               a table with a column of texts
.arrow                 the same, as `datasets` saves it
.gz .zst               any of these but the tables, compressed
=====================  ========================================================================================
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.data.documents import Document
from fpld.errors import InputError, MissingExtraError
from fpld.storage.files import as_utf8, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Reader = Callable[[Path, str], Iterator[tuple[str, str]]]

COMPRESSED = frozenset({".gz", ".zst"})
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
_TABLES = frozenset({".parquet", ".arrow"})  # compressed inside, if at all
# Files about a dataset beside its data, in a folder that `datasets` saved or a hub keeps.
_METADATA_FILES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_CARDS = frozenset({"README.md", "README.txt", "LICENSE.txt", "LICENSE.md"})
_MAX_NAMED = 5  # skipped files that a line of the log names

log = logging.getLogger(__name__)


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


def read_texts(file: Path, field: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file, each with its place in it: empty for a file that is one text, else as `:7`.

    A file of any other suffix is one text.
    """
    return READERS.get(content_suffix(file), _plain)(file, field)


def _content(file: Path) -> str:
    """Read a file, decompressed, as UTF-8."""
    compression = file.suffix.lower()
    try:
        if compression == ".gz":
            return as_utf8(gzip.decompress(read_bytes(file)), file)
        if compression == ".zst":
            with pyarrow_library("a .zst file").input_stream(str(file), compression="zstd") as stream:
                return as_utf8(stream.read(), file)
    except (OSError, EOFError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} must be a whole {compression} file: {error}") from None
    return as_utf8(read_bytes(file), file)


def _plain(file: Path, _field: str) -> Iterator[tuple[str, str]]:
    yield "", _content(file)


def _json_lines(file: Path, field: str) -> Iterator[tuple[str, str]]:
    # split, not splitlines: a line separator of Unicode may stand inside a JSON string.
    for number, line in enumerate(_content(file).split("\n"), start=1):
        if line.strip():
            place = f":{number}"
            yield place, _text(_parsed(line, f"{file}{place}", "one JSON object"), field, f"{file}{place}")


def _json(file: Path, field: str) -> Iterator[tuple[str, str]]:
    value = _parsed(_content(file), str(file), "JSON")
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield f":{number}", _text(row, field, f"{file}:{number}")


def _csv(file: Path, field: str) -> Iterator[tuple[str, str]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # its own limit is shorter than a document
    rows = csv.DictReader(
        io.StringIO(_content(file), newline=""), delimiter="\t" if content_suffix(file) == ".tsv" else ","
    )
    try:
        for number, row in enumerate(rows, start=1):
            yield f":{number}", _text({key: value or "" for key, value in row.items()}, field, f"{file}, row {number}")
    except csv.Error as error:
        raise InputError(f"{file} must be CSV with a header: {error}") from None


def _parquet(file: Path, field: str) -> Iterator[tuple[str, str]]:
    pyarrow_library("Parquet")
    from pyarrow import parquet

    return _columns(file, field, lambda: _batches(parquet.ParquetFile(file), file, field))


def _batches(table: Any, file: Path, field: str) -> Iterable[Any]:
    _has(field, table.schema_arrow.names, file)
    return table.iter_batches(columns=[field])  # type: ignore[no-any-return]


def _arrow(file: Path, field: str) -> Iterator[tuple[str, str]]:
    pyarrow_library("a folder of datasets")
    from pyarrow import ipc

    def batches() -> Iterable[Any]:
        with file.open("rb") as stream:
            reader = ipc.open_stream(stream)
            _has(field, reader.schema.names, file)
            yield from (batch.select([field]) for batch in reader)

    return _columns(file, field, batches)


def _columns(file: Path, field: str, batches: Callable[[], Iterable[Any]]) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        for batch in batches():
            for value in batch.column(0).to_pylist():
                number += 1
                if value is not None:
                    yield f":{number}", _text({field: value}, field, f"{file}, row {number}")
    except (OSError, pyarrow_library("a table").ArrowException) as error:
        raise InputError(f"{file} must be a whole table: {str(error).partition(chr(10))[0]}") from None


def _has(field: str, names: list[str], file: Path) -> None:
    if field not in names:
        raise InputError(f"{file} has no field {field!r} for the text: its fields are {sorted(names)}")


def _parsed(text: str, place: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{place} must be {what}: {error}") from None


def _text(row: Any, field: str, place: str) -> str:
    if not isinstance(row, dict):
        raise InputError(f"{place} must be a JSON object, got {type(row).__name__}")
    if field not in row:
        raise InputError(f"{place} has no field {field!r} for the text: its fields are {sorted(map(str, row))}")
    value = row[field]
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


def read_documents(path: str | os.PathLike[str], *, field: str = "text") -> list[Document]:
    """Read all documents at `path`: a file, or a folder of files; files that are skipped are named in the log.

    Parameters
    ----------
    path
        A file of a suffix above (one of any other suffix is one text), or a folder that is walked recursively, such as
        one saved by `datasets` or kept by a hub. Hidden files and links to folders are passed over.
    field
        The field or column of records that holds the text.

    Returns
    -------
    list of Document
        The documents that are not empty, in the order of their paths and places.
    """
    root = Path(path)
    if not root.exists():
        raise InputError(f"{root} does not exist: give the path of an existing file or folder")
    files = _chosen(root) if root.is_dir() else [root]
    documents: list[Document] = []
    for file in files:
        documents.extend(_read_file(file, root, field))
    if not documents:
        raise InputError(f"{root} holds only empty documents: give text of at least one character")
    return documents


def _chosen(root: Path) -> list[Path]:
    """Return the files of a folder that hold text, in order; name the others."""
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


def _read_file(file: Path, root: Path, field: str) -> Iterator[Document]:
    relative = file.relative_to(root) if file != root else Path(file.name)
    label = relative.parts[0] if len(relative.parts) > 1 else ""
    for place, text in read_texts(file, field):
        if text.strip():
            yield Document(f"{relative.as_posix()}{place}", text, label)
