"""Who takes part from a site's folder: one process, held by a lock, and written down for who asks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fpld.errors import InputError
from fpld.storage.files import storage_error, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK, PRESENCE = "node.lock", "node.json"
CONTACT = "contact"  # in the folder `flower`: when the SuperLink was reached last


@contextlib.contextmanager
def hold(folder: Path, name: str) -> Iterator[None]:
    """Hold a site's folder: a second process of this site is refused. The lock ends with the process."""
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        said = presence(folder)
        who = f" as process {said['process']}, since {said['since']}" if said else ""
        raise InputError(
            f"{name} takes part already, from this folder{who}: a site is started once; stop the other one first"
        ) from None
    except OSError as error:
        raise storage_error(folder / LOCK, error) from error
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        here = {"process": os.getpid(), "since": since, "instance": secrets.token_hex(16)}
        write_atomic(folder / PRESENCE, json.dumps(here).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / PRESENCE).unlink()
        lock.release()


def presence(folder: Path) -> dict[str, Any] | None:
    """Return who holds a site's folder, if that was written down."""
    try:
        found = json.loads((folder / PRESENCE).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"process", "since", "instance"} <= set(found) else None
