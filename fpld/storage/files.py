"""Atomic writes, and reads whose errors say what to do."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import stat
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fpld.errors import FpldError, InputError, StorageError, exhausted_resource
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


TEMPORARY_PREFIX = ".fpld-"
"""The prefix of the names of half-written files and of folders that are being deleted."""
HALF_WRITTEN = ".half-written"
"""The suffix of half-written files: `remove_half_written` deletes no others."""
# What `write_atomic` and `keep_copy` write: the final name, the letters of `mkstemp`. A user's own .fpld-notes is none.
_HALF_WRITTEN_NAME = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}.+\.\w+{re.escape(HALF_WRITTEN)}", re.ASCII)
# A key of more parts than any table has: the time that tomllib takes goes with the square of their number.
_LONG_KEY = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}""",
)


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the whole new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f"{TEMPORARY_PREFIX}{path.name}.", suffix=HALF_WRITTEN
        )
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise storage_error(path, error) from error


def keep_copy(path: Path, previous: Path) -> None:
    """Replace the file `previous` by a second name of the file `path`, which stays in its place all the time."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{previous.name}.kept{HALF_WRITTEN}")
    try:
        temporary.unlink(missing_ok=True)
        try:
            temporary.hardlink_to(path)
        except OSError:  # a file system without hard links
            write_atomic(temporary, path.read_bytes())
        temporary.replace(previous)
        _sync_folder(path.parent)
    except OSError as error:
        raise storage_error(previous, error) from error


def remove_half_written(folder: Path) -> None:
    """Delete the files of interrupted writes in a folder, except in subfolders that hold another run."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not (Path(place) / name / "lock").exists()]
        for name in files:
            leftover = Path(place) / name
            if _HALF_WRITTEN_NAME.fullmatch(name) and leftover.is_file() and not leftover.is_symlink():
                leftover.unlink()


def write_shared(path: Path, content: str) -> None:
    """Write a text for other users to read, atomically and with the permissions that the umask gives."""
    write_shared_bytes(path, content.encode())


def write_shared_bytes(path: Path, content: bytes) -> None:
    """Write a file for other users to read, as `write_shared` does."""
    write_atomic(path, content)
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the columns of the first one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return the error for a failed write: its cause, and that earlier files are intact."""
    resource = exhausted_resource(error)
    if resource is not None:
        return StorageError(f"{path}: {resource.what}; what was written before is intact: {resource.remedy}")
    return StorageError(f"{path} cannot be written ({error.strerror or error}); what was written before is intact")


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it is durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def canonical_json(value: Any) -> bytes:
    """Serialise `value` as canonical JSON: sorted keys, ASCII, no blanks."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def open_binary(path: Path) -> BinaryIO:
    """Open a file to read it; raise InputError with the reason if it cannot be. A device is not: it may have no end."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise InputError(f"{path} is a device: give the path of a file")
        return path.open("rb")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: give the path of an existing file or folder") from None
    except OSError as error:
        raise _unreadable(path, error) from error


def read_bytes(path: Path) -> bytes:
    """Read a file; raise InputError with the reason if it cannot be read."""
    with open_binary(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> FpldError:
    if exhausted_resource(error) is not None:  # of this machine, and nothing is wrong with the file
        return storage_error(path, error)
    return InputError(f"{path} cannot be read ({error.strerror}): check its type and permissions")


def read_utf8(path: Path) -> str:
    """Read a file as UTF-8, without a byte order mark at its start."""
    return as_utf8(read_bytes(path), path)


def as_utf8(content: bytes, path: Path) -> str:
    """Return the content of a file as text; raise InputError with the place of what is no UTF-8."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} must be UTF-8, but byte {error.start} is 0x{content[error.start]:02x} ({error.reason}): "
            "convert the file to UTF-8, or leave it out"
        ) from None


def parse_toml_tables(text: str) -> dict[str, Any]:
    r"""Parse TOML; raise InputError for what is none, and for nesting that would take the parser very long.

    >>> parse_toml_tables("[a]\nb = 1")
    {'a': {'b': 1}}
    """
    too_deep = "must be TOML of tables that are not nested so deep"
    if _LONG_KEY.search(text):
        raise InputError(too_deep)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(too_deep) from None
    except ValueError as error:  # of TOML, or of a number with thousands of digits
        raise InputError(f"must be TOML: {printable(error)}") from None


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError for what is none, and for nesting that is too deep for the parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """Read one JSON object, whose `format` must be `kind`."""
    try:
        value = parse_json(read_utf8(path))
    except ValueError as error:
        raise InputError(f"{path} must hold JSON of format {kind!r}: {error}") from None
    if not isinstance(value, dict) or value.get("format") != kind:
        actual = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise InputError(f"{path} must hold a JSON object of format {kind!r}, got {actual!r}")
    return value


def flat_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested tables by their dotted keys; an array's tables go by their names.

    >>> flat_keys({"run": {"rounds": 3}, "nodes": [{"name": "north", "bits": 2.0}]})
    {'run.rounds': 3, 'nodes[north].name': 'north', 'nodes[north].bits': 2.0}
    """
    values: dict[str, Any] = {}

    def walk(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{key}.{name}" if key else name, inner)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, inner in enumerate(value):
                walk(f"{key}[{inner.get('name', i)}]", inner)
        else:
            values[key] = value

    walk("", tables)
    return values
