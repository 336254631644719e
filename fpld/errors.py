"""Errors: what the caller did wrong, and what a peer did wrong, are different types.

Everything that fpld raises on purpose derives from `FpldError`. A message names the argument, what it
must be and what it was, so that the reader knows what to change. `ran_out` finds what the machine lacks, whatever
library says so.
"""

import errno
import os
from typing import NamedTuple


class FpldError(Exception):
    """Base of all errors that fpld raises on purpose."""


class InputError(FpldError, ValueError):
    """The caller passed something that cannot be used: a local mistake, before anything was sent."""


class BudgetError(InputError):
    """A bit budget that cannot be met or that a codec cannot work with."""


class SizeError(InputError):
    """A message that would be larger than the network's engine carries: nothing was sent."""

    def __init__(self, what: str, size: int, most: int, cure: str) -> None:
        self.size, self.most = size, most
        super().__init__(
            f"{what} would have {size:,} bytes, at most {most:,} are carried (flower.most_message): {cure}"
        )


class FrameError(FpldError):
    """Bytes from a peer that are not an acceptable frame: never trusted, never partly applied."""


class StorageError(FpldError):
    """A file could not be written; what was there before is intact."""


class ResourceError(FpldError):
    """Memory, time or file handles ran out; the message says what to free."""


class MissingExtraError(FpldError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: pip install 'fpld[{extra}]'")


class ProtocolError(FpldError):
    """A message that does not fit where this end is: refused, and nothing has changed."""


class QuorumError(FpldError):
    """Too few nodes answered for a round to be closed: nothing is averaged in silence."""


class RanOut(NamedTuple):
    """What the machine lacks, and what to do about it."""

    what: str
    remedy: str


SPACE = RanOut("no space left on the disk", "free some space")
_MEMORY = RanOut(
    "memory ran out", "free some memory, or choose a smaller student, fewer probe contexts or a smaller batch"
)
_HANDLES = RanOut(
    "no file handles are left", "raise the limit (ulimit -n, or LimitNOFILE= of the service), or end what holds them"
)
_THREADS = RanOut("no thread can be started", "free some memory, or raise the limit on processes (ulimit -u)")
_BY_NUMBER = {
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EMFILE: _HANDLES,
    errno.ENFILE: _HANDLES,
    errno.ENOMEM: _MEMORY,
}


def ran_out(error: BaseException | None) -> RanOut | None:
    """Return what ran out if an error, or one that it came from, says so.

    >>> ran_out(MemoryError()).what
    'memory ran out'
    """
    while error is not None:
        if isinstance(error, MemoryError):
            return _MEMORY
        if isinstance(error, OSError) and error.errno in _BY_NUMBER:
            return _BY_NUMBER[error.errno]
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return _THREADS
        if isinstance(error, ImportError) and (found := ran_out_by(str(error))) is not None:  # of a shared library
            return found
        error = error.__cause__ or error.__context__
    return None


def ran_out_by(text: str) -> RanOut | None:
    """Return what ran out if a program's log says so, for one that could not even write down why it ended.

    >>> ran_out_by("OSError: [Errno 24] Too many open files").what
    'no file handles are left'
    """
    for number, what in _BY_NUMBER.items():
        if f"[Errno {number}]" in text or os.strerror(number) in text:
            return what
    return None
