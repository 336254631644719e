"""Texts inside files, by the files' suffixes: plain text, JSON, JSON lines, CSV, Parquet, Arrow; packed or not.

=====================  ========================================================================================
suffix                 what is in it
=====================  ========================================================================================
.txt .text .md .rst    one text
.jsonl .ndjson         a JSON object a line, with the text in a field
.json                  one such object, or an array of them
.csv .tsv              a header, and a text a row
.parquet               a table with a column of texts
.arrow                 the same, as `datasets` saves it
.gz .zst               any of these but the tables, packed
=====================  ========================================================================================
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from typing import TYPE_CHECKING, Any

from fpld.errors import InputError, MissingExtraError
from fpld.storage.files import as_utf8, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    Reader = Callable[["Path", str], Iterator[tuple[str, str]]]

PACKED = frozenset({".gz", ".zst"})
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})


def suffix(file: Path) -> str:
    """Return the suffix that says what is in a file, without that of the packing.

    >>> from pathlib import Path
    >>> suffix(Path("notes.JSONL.gz"))
    '.jsonl'
    """
    ends = [end.lower() for end in file.suffixes]
    while ends and ends[-1] in PACKED:
        ends.pop()
    return ends[-1] if ends else ""


def read_texts(file: Path, field: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file, each with its place in it: empty for a file that is one text, else as `:7`.

    A file of any other suffix is one text.
    """
    return READERS.get(suffix(file), _plain)(file, field)


def _content(file: Path) -> str:
    """Read a file, unpacked, as UTF-8."""
    packed = file.suffix.lower()
    try:
        if packed == ".gz":
            return as_utf8(gzip.decompress(read_bytes(file)), file)
        if packed == ".zst":
            with arrow("a .zst file").input_stream(str(file), compression="zstd") as stream:
                return as_utf8(stream.read(), file)
    except (OSError, EOFError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} must be a whole {packed} file: {error}") from None
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
    rows = csv.DictReader(io.StringIO(_content(file), newline=""), delimiter="\t" if suffix(file) == ".tsv" else ",")
    try:
        for number, row in enumerate(rows, start=1):
            yield f":{number}", _text({key: value or "" for key, value in row.items()}, field, f"{file}, row {number}")
    except csv.Error as error:
        raise InputError(f"{file} must be CSV with a header: {error}") from None


def _parquet(file: Path, field: str) -> Iterator[tuple[str, str]]:
    arrow("Parquet")
    from pyarrow import parquet

    return _columns(file, field, lambda: _batches(parquet.ParquetFile(file), file, field))


def _batches(table: Any, file: Path, field: str) -> Iterable[Any]:
    _has(field, table.schema_arrow.names, file)
    return table.iter_batches(columns=[field])  # type: ignore[no-any-return]


def _arrow(file: Path, field: str) -> Iterator[tuple[str, str]]:
    arrow("a folder of datasets")
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
    except (OSError, arrow("a table").ArrowException) as error:
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


def arrow(what: str) -> Any:
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
