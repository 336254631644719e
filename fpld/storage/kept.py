"""States that must survive: arrays and a JSON object with their run's id and a digest over everything.

The file before the newest is kept beside it. A newest one that is damaged, or of another run, is said to be so, and the
one before is used.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from fpld.errors import InputError
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.storage.files import keep

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.storage.folder import Arrays

log = logging.getLogger(__name__)


def previous(path: Path) -> Path:
    """Name the file that was written before the newest one.

    >>> from pathlib import Path
    >>> previous(Path("state.safetensors")).name
    'state-previous.safetensors'
    """
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def write_kept(path: Path, arrays: Arrays, meta: dict[str, Any], *, run: str) -> None:
    """Write a state of a run; the one that was there is kept as the previous one."""
    if path.exists():
        keep(path, previous(path))
    write_arrays(path, arrays, {"meta": json.dumps(meta), "run": run})


def read_kept(path: Path, *, run: str | None) -> tuple[Arrays, dict[str, Any]]:
    """Read one such file; damage anywhere in it, and a file of another run (None: whichever), are an error."""
    arrays, said = read_arrays(path, sealed=True)
    if run is not None and said.get("run") != run:
        raise InputError(f"{path} is of another run ({said.get('run')}), this is {run}")
    meta: dict[str, Any] = json.loads(said["meta"])  # sound, since the digest is
    return arrays, meta


def recall_kept(path: Path, *, run: str | None) -> tuple[Arrays, dict[str, Any]] | None:
    """Return the newest state that is sound, None if there never was one; who uses an older one says so."""
    older = previous(path)
    if not path.exists() and not older.exists():
        return None
    try:
        return read_kept(path, run=run)
    except InputError as error:
        try:
            found = read_kept(older, run=run)
        except InputError:
            raise InputError(f"{error}; there is no sound file before it either: start the run anew") from None
        log.warning("%s; going on from the one before it, %s", error, older.name)
        keep(older, path)  # or else the next state would take the place of the sound one, and keep the damaged one
        return found
