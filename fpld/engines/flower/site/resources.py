"""Limits on memory, time and file handles: a sandbox for a site's work, and checks that a process can go on.

The sandbox is a fork, so all imports are done. This process watches its memory and its time. However the fork ends, the
aggregator gets an answer: a process that runs out of memory must not be a node that stays silent. What the fork has
started ends with it.

Python waits for ever for a thread that finds no memory when it begins. So processes that start threads check first
that there is some (`check_memory`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fpld.errors import ResourceError, exhausted_resource
from fpld.storage.run_folder import STATUS, RunFolder
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

RESERVE_BYTES = 64 << 20  # that a process must be able to get: the C library's arena of a new thread
_WATCH_SECONDS = 5.0
_POLL_SECONDS = 0.5  # between two looks at a sandbox: its memory, its time, and what it has started
_LEAVE_SECONDS = 2.0  # within which what a sandbox has started may clean up and end by itself
_SIZE = struct.Struct("<Q")  # of each part that a sandbox writes
_DONE = b"\x00"
_FAILED = b"\x01"


class _Started(NamedTuple):
    """A process, and when it began: its number alone may be another's by now."""

    process: int
    begun: str


class SandboxError(Exception):
    """An error of the work in a sandbox, redacted."""


def run_sandboxed(
    work: Callable[[], Sequence[bytes]],
    redact: Callable[[Exception], str],
    *,
    memory: int | None = None,
    seconds: float | None = None,
) -> list[bytes]:
    """Run some work in a fork, within limits.

    Parameters
    ----------
    work
        Returns the parts of the result.
    redact
        Returns the text of an error that may leave the fork.
    memory, seconds
        The most bytes of its own that the fork may hold, and its longest time; None for no limit.

    Returns
    -------
    list of bytes
        The parts that `work` returned.

    Raises
    ------
    SandboxError
        If the work raised an error.
    ResourceError
        If the fork exceeded a limit, or was killed.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        os.close(reader)
        _run(writer, work, redact)
    os.close(writer)
    started: list[_Started] = []
    try:
        data = _collect(reader, process, memory, seconds, started)
    except BaseException:
        started[:] = _descendants(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        raise
    finally:
        os.close(reader)
        _, status = os.waitpid(process, 0)
        _end(started)
    return _parse_result(data, status)


def _run(writer: int, work: Callable[[], Sequence[bytes]], redact: Callable[[Exception], str]) -> None:
    """Do the work and write its result into the pipe; never return."""
    code = 0
    try:
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, signal.SIG_DFL)
        try:
            parts = [_DONE, *work()]
        except Exception as error:  # whatever it is, it is reported
            parts = [_FAILED, redact(error).encode()]
        with os.fdopen(writer, "wb") as pipe:
            for part in parts:
                pipe.write(_SIZE.pack(len(part)) + part)
    except BaseException:  # the pipe is broken: nothing can be reported
        code = 1
    finally:
        os._exit(code)


def _collect(reader: int, process: int, memory: int | None, seconds: float | None, started: list[_Started]) -> bytes:
    """Return all that the process writes until it ends; check its limits meanwhile, and keep what it has `started`."""
    end = None if seconds is None else time.monotonic() + seconds
    data = bytearray()
    ended = False
    while True:
        ready, _, _ = select.select([reader], [], [], 0.0 if ended else _POLL_SECONDS)
        if ready:
            piece = os.read(reader, 1 << 20)
            if not piece:
                return bytes(data)
            data += piece
            continue
        if ended:  # the pipe is still open in a process that it has started
            return bytes(data)
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if ended:
            continue
        started[:] = _descendants(process)
        if end is not None and time.monotonic() > end:
            raise ResourceError(f"the work took longer than the {seconds:g} s that its answer is waited for")
        if memory is not None and (taken := tree_bytes(process)) > memory:
            raise ResourceError(
                f"the work took {show_size(taken)} of memory, most_memory in node.toml allows {show_size(memory)}: "
                "allow more, or ask for a smaller student or batch"
            )


def own_bytes(process: int) -> int:
    """Return the resident memory of a process in bytes, without the pages of files; 0 where the system has no /proc.

    The pages of mapped files are the system's cache: they can be dropped at any time, and many processes share them.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return _sum_sizes(status, "RssAnon", "RssShmem")


def tree_bytes(process: int) -> int:
    """Return `own_bytes` of a process and of all that it has started, such as the processes of a training.

    Of a descendant only its share of the memory counts that it has in common with others since its fork.
    """
    return own_bytes(process) + sum(_shared_out_bytes(each.process) for each in _descendants(process))


def _descendants(process: int) -> list[_Started]:
    """Return all that a process has started and that still runs; nothing where the system does not tell."""
    found = []
    waiting = _children(process)
    while waiting:
        child = waiting.pop()
        begun = _begun(child)
        if begun is not None:
            found.append(_Started(child, begun))
        waiting += _children(child)
    return found


def _begun(process: int) -> str | None:
    """Return when a process began, as the system writes it; None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _end(started: Iterable[_Started]) -> None:
    """Wait a little until processes have ended that were started in a sandbox; kill those that still run."""
    end = time.monotonic() + _LEAVE_SECONDS
    left = list(started)
    while left := [each for each in left if _begun(each.process) == each.begun]:
        if time.monotonic() > end:
            for each in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each.process, signal.SIGKILL)
            return
        time.sleep(0.02)


def _children(process: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text(encoding="ascii").split()]
    except OSError:  # it has ended meanwhile, or the kernel does not tell
        return []


def _shared_out_bytes(process: int) -> int:
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return _sum_sizes(rollup, "Pss_Anon", "Pss_Shmem")


def _sum_sizes(text: str, *names: str) -> int:
    """Return the bytes of some lines of a file of /proc, which have kilobytes."""
    sizes = dict(line.partition(":")[::2] for line in text.splitlines())
    return sum(1024 * int(sizes[name].split()[0]) for name in names if name in sizes)


def _parse_result(data: bytes, status: int) -> list[bytes]:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        more = ": most likely memory ran out; free some, or ask for a smaller student" if name == "SIGKILL" else ""
        raise ResourceError(f"the process that did the work was ended by {name}{more}")
    parts = []
    offset = 0
    while offset + _SIZE.size <= len(data):
        (size,) = _SIZE.unpack_from(data, offset)
        offset += _SIZE.size
        parts.append(data[offset : offset + size])
        offset += size
    if not parts or offset != len(data):
        raise ResourceError("the process that did the work ended without an answer")
    if parts[0] == _FAILED:
        raise SandboxError(parts[1].decode())
    return parts[1:]


def check_memory() -> None:
    """Raise `MemoryError` if this process cannot get `RESERVE_BYTES`; they are given back untouched."""
    try:
        mmap.mmap(-1, RESERVE_BYTES).close()
    except OSError:
        raise MemoryError from None


def report_shortage() -> None:
    """Write on standard error what this process has run out of, if anything: Flower's errors do not always say it."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
        check_memory()
    except MemoryError:
        sys.stderr.write(f"{os.strerror(errno.ENOMEM)}\n")
    except OSError as error:
        sys.stderr.write(f"{error}\n")


def watch_memory(out: Path) -> None:
    """End this process, with the reason in the run's status, as soon as it has no memory left."""
    threading.Thread(target=_watch, args=(out,), daemon=True, name="memory").start()


def _watch(out: Path) -> None:
    while True:
        time.sleep(_WATCH_SECONDS)
        try:
            check_memory()
        except MemoryError as error:
            resource = exhausted_resource(error)
            reason = "" if resource is None else f"{resource.what}: {resource.remedy}"
            try:
                sys.stderr.write(f"ERROR: {reason}\n")
                RunFolder(out).write_json(STATUS, {"state": "failed", "error": reason, "time": time.time()})
            finally:
                os._exit(1)
