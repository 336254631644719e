"""Read documents from files and folders: text, JSON, CSV, Parquet, and datasets as Hugging Face saves them.

A folder is walked in sorted order, so that every machine sees the same documents in the same order; the
label of a document is the first folder below the given one, which is what a natural split uses.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.data.documents import Document
from fpld.data.formats import PACKED, READERS, TEXT_SUFFIXES, read_texts, suffix
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

# What stands beside the data in a folder that `datasets` saved, or that a hub keeps: about the text, and not text.
_ABOUT = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_CARDS = frozenset({"README.md", "README.txt", "LICENSE.txt", "LICENSE.md"})
_NAMED = 5  # skipped files that a line names


def read_documents(path: str | os.PathLike[str], *, field: str = "text") -> list[Document]:
    """Read all documents at `path`: a file, or a folder of files; files that are skipped are named in the log.

    Args:
        path: A file of `fpld.data.formats` (one of any other suffix is one text), or a folder, walked recursively for
            these, a folder saved by `datasets` or kept by a hub too. Hidden files and links to folders are passed over.
        field: The field or column of records that holds the text.

    Returns
    -------
        The documents with any text in them, in sorted order of their paths and places.

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
    found = list(_walk(root))
    records = any(suffix(file) not in TEXT_SUFFIXES and _known(file) for file in found)
    taken = [file for file in found if _known(file) and not (records and file.name in _CARDS)]
    if not taken:
        suffixes = ", ".join(sorted(READERS))
        raise InputError(f"the folder {root} holds no text: it needs at least one file of {suffixes}")
    skipped = [file.relative_to(root).as_posix() for file in found if file not in set(taken)]
    if skipped:
        more = "" if len(skipped) <= _NAMED else f" and {len(skipped) - _NAMED} more"
        log.warning("%s: skipped, since they are no text: %s%s", root, ", ".join(skipped[:_NAMED]), more)
    return taken


def _known(file: Path) -> bool:
    tables = {".parquet", ".arrow"}  # packed inside, if they are
    return suffix(file) in READERS and file.name not in _ABOUT and not (
        file.suffix.lower() in PACKED and suffix(file) in tables
    )  # fmt: skip


def _walk(root: Path) -> Iterator[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.extend(Path(folder, name) for name in names if not name.startswith("."))
    # The parts, not the string: the order must not depend on the separator of the operating system.
    yield from sorted(found, key=lambda file: file.parts)


def _read_file(file: Path, root: Path, field: str) -> Iterator[Document]:
    relative = file.relative_to(root) if file != root else Path(file.name)
    label = relative.parts[0] if len(relative.parts) > 1 else ""
    for place, text in read_texts(file, field):
        if text.strip():
            yield Document(f"{relative.as_posix()}{place}", text, label)
