"""Work in a process of its own, so that its end, by lack of memory or whatever else, is an answer and not a silence.

The process is a fork: all imports are done. It has a limit on memory and one on time, which this process watches.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import ResourceError
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SIZE = struct.Struct("<Q")
_LOOK = 0.5  # seconds between two looks at the memory
_DONE, _FAILED = b"\x00", b"\x01"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

Parts = "Sequence[bytes]"


class ApartError(Exception):
    """An error of the work, as the function that conceals errors has put it."""


def apart(
    work: Callable[[], Sequence[bytes]],
    conceal: Callable[[Exception], str],
    *,
    memory: int | None = None,
    seconds: float | None = None,
) -> list[bytes]:
    """Do some work in a fork; return its bytes. What it raises is `ApartError` with what `conceal` makes of it.

    A process that takes more than `memory` bytes or `seconds`, or that is killed, raises `ResourceError`.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        os.close(reader)
        _work(writer, work, conceal)
    os.close(writer)
    try:
        data = _collect(reader, process, memory, seconds)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        raise
    finally:
        os.close(reader)
        _, status = os.waitpid(process, 0)
    return _parsed(data, status)


def _work(writer: int, work: Callable[[], Sequence[bytes]], conceal: Callable[[Exception], str]) -> None:
    """Do the work and write what it gives; never return."""
    code = 0
    try:
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, signal.SIG_DFL)
        try:
            parts = [_DONE, *work()]
        except Exception as error:  # whatever it is, it is said
            parts = [_FAILED, conceal(error).encode()]
        with os.fdopen(writer, "wb") as pipe:
            for part in parts:
                pipe.write(_SIZE.pack(len(part)) + part)
    except BaseException:  # nobody is left to tell
        code = 1
    finally:
        os._exit(code)


def _collect(reader: int, process: int, memory: int | None, seconds: float | None) -> bytes:
    """Return all that the process writes until it ends; watch it meanwhile."""
    end, found = None if seconds is None else time.monotonic() + seconds, bytearray()
    while True:
        ready, _, _ = select.select([reader], [], [], _LOOK)
        if ready:
            piece = os.read(reader, 1 << 20)
            if not piece:
                return bytes(found)
            found += piece
            continue
        if end is not None and time.monotonic() > end:
            raise ResourceError(f"the work took longer than the {seconds:g} s that its answer is waited for")
        taken = resident(process)
        if memory is not None and taken > memory:
            raise ResourceError(
                f"the work took {show_size(taken)} of memory, most_memory in node.toml allows {show_size(memory)}: "
                "allow more, or ask for a smaller student or batch"
            )


def resident(process: int) -> int:
    """Return the bytes of memory that a process holds; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _parsed(data: bytes, status: int) -> list[bytes]:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        more = ": most likely memory ran out; free some, or ask for a smaller student" if name == "SIGKILL" else ""
        raise ResourceError(f"the process that did the work was ended by {name}{more}")
    parts, place = [], 0
    while place + _SIZE.size <= len(data):
        (size,) = _SIZE.unpack_from(data, place)
        place += _SIZE.size
        parts.append(data[place : place + size])
        place += size
    if not parts or place != len(data):
        raise ResourceError("the process that did the work ended without an answer")
    if parts[0] == _FAILED:
        raise ApartError(parts[1].decode())
    return parts[1:]
