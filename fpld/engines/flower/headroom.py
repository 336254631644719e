"""Whether a process has memory and file handles left to go on.

Python waits for ever for a thread that finds no memory when it begins. So who starts threads looks first.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from fpld.errors import ran_out
from fpld.federation.status import STATUS
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

ROOM = 64 << 20  # bytes that a process must be able to get: the arena of a new thread, by the C library
_PAUSE = 5.0


def check_room() -> None:
    """Raise `MemoryError` if there is no room; what is asked for is given back untouched."""
    try:
        mmap.mmap(-1, ROOM).close()
    except OSError:
        raise MemoryError from None


def note_lack() -> None:
    """Write down on standard error what this process lacks, if anything: errors of Flower's do not always say it."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
        check_room()
    except MemoryError:
        sys.stderr.write(f"{os.strerror(errno.ENOMEM)}\n")
    except OSError as error:
        sys.stderr.write(f"{error}\n")


def watch_room(out: Path) -> None:
    """End this process, with a word in the run's status, as soon as it has no room left."""
    threading.Thread(target=_watch, args=(out,), daemon=True, name="headroom").start()


def _watch(out: Path) -> None:
    while True:
        time.sleep(_PAUSE)
        try:
            check_room()
        except MemoryError as error:
            found = ran_out(error)
            said = "" if found is None else f"{found.what}: {found.remedy}"
            try:
                sys.stderr.write(f"ERROR: {said}\n")
                RunFolder(out).write_json(STATUS, {"state": "failed", "error": said, "time": time.time()})
            finally:
                os._exit(1)
