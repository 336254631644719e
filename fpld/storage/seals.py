"""Digests of the files that a run makes once and reads again when it is resumed.

`seals.json` holds the SHA-256 of each by its name. A file that is damaged, or of another run, is found before it is
used. One without a seal is of a start that was cut off: it is made anew.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

from fpld.errors import InputError
from fpld.storage.files import read_bytes

if TYPE_CHECKING:
    from fpld.storage.folder import RunFolder

SEALS = "seals.json"
_one = threading.Lock()  # several threads of a run write rows of their own


def seal(store: RunFolder, *names: str) -> None:
    """Write down the digests of files that were just written."""
    with _one:
        store.write_json(SEALS, _read(store) | {name: _digest(store, name) for name in names})


def is_sealed(store: RunFolder, name: str) -> bool:
    """Return whether a file was written to its end; one that is not as it was then raises InputError."""
    with _one:
        said = _read(store).get(name)
    if said is None:
        return False
    if not store.has(name) or _digest(store, name) != said:
        raise InputError(f"{store.path / name} is damaged, or not the file of this run: start the run anew")
    return True


def check_seals(store: RunFolder) -> None:
    """Check all files that were sealed."""
    for name in _read(store):
        is_sealed(store, name)


def _read(store: RunFolder) -> dict[str, str]:
    if not store.has(SEALS):
        return {}
    found = store.read_json(SEALS)
    if not isinstance(found, dict) or not all(isinstance(said, str) for said in found.values()):
        raise InputError(f"{store.path / SEALS} is damaged: start the run anew")
    return found


def _digest(store: RunFolder, name: str) -> str:
    return hashlib.sha256(read_bytes(store.path / name)).hexdigest()
