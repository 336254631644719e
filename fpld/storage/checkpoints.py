"""Checkpoints: arrays and a JSON object, with the id of their run and a digest over everything.

The checkpoint before the newest is kept beside it. If the newest one is damaged or of another run, a warning is logged
and the previous one is used.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from fpld.errors import InputError
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.storage.files import keep_copy

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.types import Arrays

log = logging.getLogger(__name__)


def previous_file(path: Path) -> Path:
    """Return the path of the checkpoint before the newest one.

    >>> from pathlib import Path
    >>> previous_file(Path("state.safetensors")).name
    'state-previous.safetensors'
    """
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def write_checkpoint(path: Path, arrays: Arrays, meta: dict[str, Any], *, run: str) -> None:
    """Write a checkpoint of a run; the one that is there becomes the previous one."""
    if path.exists():
        keep_copy(path, previous_file(path))
    write_arrays(path, arrays, {"meta": json.dumps(meta), "run": run})


def read_checkpoint(path: Path, *, run: str | None) -> tuple[Arrays, dict[str, Any]]:
    """Read one checkpoint; raise InputError if it is damaged, or of another run than `run` (None: of any)."""
    arrays, metadata = read_arrays(path, sealed=True)
    if run is not None and metadata.get("run") != run:
        raise InputError(f"{path} is of another run ({metadata.get('run')}), this is {run}")
    # The digest matched, so this is what `write_checkpoint` wrote.
    meta: dict[str, Any] = json.loads(metadata["meta"])
    return arrays, meta


def load_checkpoint(path: Path, *, run: str | None) -> tuple[Arrays, dict[str, Any]] | None:
    """Return the newest sound checkpoint, None if there never was one; log a warning if it is the previous one."""
    older = previous_file(path)
    if not path.exists() and not older.exists():
        return None
    try:
        return read_checkpoint(path, run=run)
    except InputError as error:
        try:
            checkpoint = read_checkpoint(older, run=run)
        except InputError:
            raise InputError(f"{error}; there is no sound file before it either: start the run anew") from None
        log.warning("%s; going on from the one before it, %s", error, older.name)
        # The sound one takes the place of the damaged one, which the next write would otherwise keep instead of it.
        keep_copy(older, path)
        return checkpoint
