"""The spool: accepted frames wait here for the end of a round, in memory, and beyond a limit in a temporary file."""

from __future__ import annotations

import tempfile
import weakref
from mmap import ACCESS_COPY, ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fpld.storage.files import storage_error

if TYPE_CHECKING:
    Buffer = bytes | memoryview

DEFAULT_MEMORY_BYTES = 1 << 28
_ARENA_BYTES = 1 << 20  # small frames are copied into mappings of this size
_LARGE_BYTES = 1 << 18  # the allocator maps frames of this size by themselves


class Spool:
    """Hold one frame for each node, up to `limit` bytes of them in memory.

    The file has no name and goes away with the process. Frames in it are mapped, so the system can reclaim the memory
    in which they are read. Large frames in memory are kept without a copy.

    >>> spool = Spool(limit=4)
    >>> spool.put(0, b"four"); spool.put(1, b"more")
    >>> bytes(spool.get(0)), bytes(spool.get(1)), spool.on_disk
    (b'four', b'more', 4)
    """

    def __init__(self, limit: int = DEFAULT_MEMORY_BYTES) -> None:
        self._limit = limit
        self._frames: dict[int, bytes | memoryview | mmap] = {}
        self._arena = memoryview(b"")  # its free part
        self._file: IO[bytes] | None = None
        self._end = 0
        self.in_memory = 0
        self.on_disk = 0

    def __contains__(self, node: int) -> bool:
        return node in self._frames

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def nodes(self) -> list[int]:
        """List the nodes whose frames are here, in order."""
        return sorted(self._frames)

    def put(self, node: int, data: Buffer) -> None:
        """Keep a node's frame."""
        if self.in_memory + len(data) <= self._limit:
            self._frames[node] = bytes(data) if len(data) >= _LARGE_BYTES else self._copied(data)  # bytes need no copy
            self.in_memory += len(data)
            return
        try:
            self._frames[node] = self._spooled(data)
        except OSError as error:
            raise storage_error(Path(tempfile.gettempdir()) / "fpld-spool", error) from error
        self._end += -(-len(data) // ALLOCATIONGRANULARITY) * ALLOCATIONGRANULARITY
        self.on_disk += len(data)

    def _copied(self, data: Buffer) -> memoryview:
        """Copy a frame to an arena outside the heap, which small frames would fragment."""
        if len(self._arena) < len(data):
            self._arena = memoryview(mmap(-1, _ARENA_BYTES, access=ACCESS_COPY))
        frame = self._arena[: len(data)]
        self._arena = self._arena[len(data) :]
        frame[:] = data
        return frame

    def _spooled(self, data: Buffer) -> mmap:
        """Append a frame to the file, and map it."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="fpld-spool-")  # noqa: SIM115  # closed by `clear`, or below
            weakref.finalize(self, self._file.close)
        self._file.seek(self._end)
        self._file.write(data)
        self._file.flush()
        return mmap(self._file.fileno(), len(data), access=ACCESS_READ, offset=self._end)

    def get(self, node: int) -> memoryview:
        """Return a node's frame, not a copy."""
        return memoryview(self._frames[node])

    def clear(self) -> None:
        """Drop all frames, and the file."""
        self._frames.clear()
        self._arena = memoryview(b"")
        if self._file is not None:
            self._file.close()
        self._file = None
        self._end = 0
        self.in_memory = 0
        self.on_disk = 0
