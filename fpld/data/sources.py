"""Read documents from text files, folders and JSON lines.

A folder is walked in sorted order, so that every machine sees the same documents in the same order; the
label of a document is the first folder below the given one, which is what a natural split uses.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.data.documents import Document
from fpld.errors import InputError
from fpld.storage.files import read_utf8

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})


def read_documents(path: str | os.PathLike[str], *, field: str = "text") -> list[Document]:
    """Read all documents at `path`: a text file, a file of JSON lines, or a folder of both.

    Args:
        path: A file (any suffix; `.jsonl` and `.ndjson` are JSON lines) or a folder, walked recursively
            for these, `.txt`, `.text`, `.md` and `.rst`. Hidden files and links to folders are passed over.
        field: The field of a JSON line that holds the text.

    Returns
    -------
        The documents with any text in them, in sorted order of their paths and lines.

    """
    root = Path(path)
    if not root.exists():
        raise InputError(f"{root} does not exist: give the path of an existing file or folder")
    if root.is_dir():
        files = list(_walk(root))
        if not files:
            suffixes = ", ".join(sorted(TEXT_SUFFIXES | LINES_SUFFIXES))
            raise InputError(f"the folder {root} holds no text: it needs at least one file of {suffixes}")
    else:
        files = [root]
    documents: list[Document] = []
    for file in files:
        documents.extend(_read_file(file, root, field))
    if not documents:
        raise InputError(f"{root} holds only empty documents: give text of at least one character")
    return documents


def _walk(root: Path) -> Iterator[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.extend(
            Path(folder, name)
            for name in names
            if not name.startswith(".") and Path(name).suffix.lower() in TEXT_SUFFIXES | LINES_SUFFIXES
        )
    # The parts, not the string: the order must not depend on the separator of the operating system.
    yield from sorted(found, key=lambda file: file.parts)


def _read_file(file: Path, root: Path, field: str) -> Iterator[Document]:
    relative = file.relative_to(root) if file != root else Path(file.name)
    label = relative.parts[0] if len(relative.parts) > 1 else ""
    text = read_utf8(file)
    if file.suffix.lower() in LINES_SUFFIXES:
        yield from _read_lines(text, file, relative.as_posix(), label, field)
    elif text.strip():
        yield Document(relative.as_posix(), text, label)


def _read_lines(content: str, file: Path, name: str, label: str, field: str) -> Iterator[Document]:
    # split, not splitlines: a line separator of Unicode may stand inside a JSON string.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"{place} must be one JSON object: {error}") from None
        text = _text(row, field, place)
        if text.strip():
            yield Document(f"{name}:{number}", text, label)


def _text(row: Any, field: str, place: str) -> str:
    if not isinstance(row, dict):
        raise InputError(f"{place} must be a JSON object, got {type(row).__name__}")
    if field not in row:
        raise InputError(f"{place} has no field {field!r} for the text: its fields are {sorted(row)}")
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
