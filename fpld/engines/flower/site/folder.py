"""The folder of a site: one process takes part from it, and a file says which.

The tokens of the site's private text are there too: one copy that all runs share, and how it is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock, Timeout

from fpld.errors import InputError
from fpld.storage.files import parse_json, storage_error, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_FILE = "node.lock"
PRESENCE_FILE = "node.json"
CONTACT_FILE = "contact"  # in the folder `flower`; its time is that of the last contact with the SuperLink
TEXT = "text.safetensors"
HELDOUT = "heldout.safetensors"
OWN_HELDOUT = "heldout-own.safetensors"  # the same text in the tokens of the site's own model, if it has others


@contextlib.contextmanager
def site_lock(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of a site's folder; refuse a second process of this site. The lock ends with the process."""
    lock = FileLock(folder / LOCK_FILE, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        holder = read_presence(folder)
        who = f" as process {holder['process']}, since {holder['since']}" if holder else ""
        raise InputError(
            f"{name} takes part already, from this folder{who}: a node is started once; stop the other one first"
        ) from None
    except OSError as error:
        raise storage_error(folder / LOCK_FILE, error) from error
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        presence = {"process": os.getpid(), "since": since, "instance": secrets.token_hex(16)}
        write_atomic(folder / PRESENCE_FILE, json.dumps(presence).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / PRESENCE_FILE).unlink()
        lock.release()


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the site's lock."""
    if not (folder / LOCK_FILE).exists():
        return False
    lock = FileLock(folder / LOCK_FILE, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    lock.release()
    return False


def read_presence(folder: Path) -> dict[str, Any] | None:
    """Return process, start and instance of the process that holds a site's lock; None if that is not written down."""
    try:
        presence = parse_json((folder / PRESENCE_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    complete = isinstance(presence, dict) and {"process", "since", "instance"} <= set(presence)
    return presence if complete else None


class ClearedTexts(NamedTuple):
    """What `fpld node clear` removed: the folder of tokens, its bytes, and in how many runs held-out tokens were."""

    folder: str
    bytes: int
    runs: int


def clear_site(path: Path) -> ClearedTexts:
    """Remove the tokens of a site's text, of all runs; models, answers and the ledger stay.

    A run that goes on prepares the text again.

    Raises
    ------
    InputError
        If the site takes part in a federation at the moment.
    """
    # Only here: a SuperNode needs the lock alone.
    from fpld.data.stored import TEXT_CACHE
    from fpld.data.token_cache import clear_texts
    from fpld.engines.flower.site.config import NodeFile

    file = NodeFile.read(path)
    folder = path.resolve().parent
    runs = 0
    with site_lock(folder, file.name):
        size = clear_texts(folder / TEXT_CACHE)
        for run in folder.glob("runs/*"):
            files = [run / name for name in (HELDOUT, OWN_HELDOUT, TEXT) if (run / name).exists()]
            runs += bool(files)
            size += sum(each.stat().st_size for each in files)
            try:
                for each in files:
                    each.unlink()
            except OSError as error:
                raise storage_error(run, error) from error
    return ClearedTexts(str(folder / TEXT_CACHE), size, runs)
