"""Errors: what the caller did wrong, and what a peer did wrong, are different types.

Everything that fpld raises on purpose derives from `FpldError`. A message names the argument, what it must be and what
it was, so that the reader knows what to change. `exhausted_resource` recognizes that memory, disk space, file handles
or threads ran out, whichever library raised the error.
"""

import errno
import os
import re
from typing import NamedTuple


class FpldError(Exception):
    """Base of all errors that fpld raises on purpose."""


class InputError(FpldError, ValueError):
    """The caller passed something that cannot be used: a local mistake, before anything was sent."""


class ParameterError(InputError):
    """A parameter has a value that cannot be used: `key` is its name, `problem` what it must be."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(key, problem)
        self.key = key
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.key} {self.problem}"


class BudgetError(InputError):
    """A bit budget that cannot be met or that a codec cannot work with."""


class DisclosureError(BudgetError):
    """A task asks for what may not leave a site. The message has no other words than of `may_send`: it may leave."""


class MismatchError(InputError):
    """A run has another probe set or tokenizer than a site insists on. Both digests are of public files: may leave."""

    def __init__(self, what: str, run: str, site: str) -> None:
        self.run = run
        self.site = site
        super().__init__(
            f"{what}: the run's is {run}, node.toml insists on {site}; `fpld aggregator status RUN` and "
            "`fpld check node.toml` show them"
        )


class SizeError(InputError):
    """A message that would be larger than the network's engine carries: nothing was sent."""

    def __init__(self, what: str, size: int, most: int, cure: str) -> None:
        self.size = size
        self.most = most
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
    """An optional dependency is not installed; the message names the extra or the package that brings it."""

    def __init__(self, feature: str, extra: str = "", *, package: str = "") -> None:
        wanted = package or f"'fpld[{extra}]'"
        super().__init__(f"{feature} needs an optional dependency: pip install {wanted}")


class ProtocolError(FpldError):
    """A message that is not legal in the current phase: refused, and nothing has changed."""


class QuorumError(FpldError):
    """Too few nodes answered for a round to be closed."""


class ExhaustedResource(NamedTuple):
    """A resource of the machine that ran out, and what to do about it."""

    what: str
    remedy: str


DISK_SPACE = ExhaustedResource("no space left on the disk", "free some space")
_MEMORY = ExhaustedResource(
    "memory ran out", "free some memory, or choose a smaller student, fewer probe contexts or a smaller batch"
)
_FILE_HANDLES = ExhaustedResource(
    "no file handles are left", "raise the limit (ulimit -n, or LimitNOFILE= of the service), or end what holds them"
)
_THREADS = ExhaustedResource(
    "no thread can be started", "free some memory, or raise the limit on processes (ulimit -u)"
)
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory|not enough memory|bad_alloc", re.IGNORECASE)
_BY_NUMBER = {
    errno.ENOSPC: DISK_SPACE,
    errno.EDQUOT: DISK_SPACE,
    errno.EMFILE: _FILE_HANDLES,
    errno.ENFILE: _FILE_HANDLES,
    errno.ENOMEM: _MEMORY,
}


def exhausted_resource(error: BaseException | None) -> ExhaustedResource | None:
    """Return the resource that ran out, if an error or one of its causes says so.

    >>> exhausted_resource(MemoryError()).what
    'memory ran out'
    """
    while error is not None:
        if isinstance(error, MemoryError):
            return _MEMORY
        # PyTorch says it in words, of the CPU and of a GPU.
        if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
            return _MEMORY
        if isinstance(error, OSError) and error.errno in _BY_NUMBER:
            return _BY_NUMBER[error.errno]
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return _THREADS
        # A shared library that cannot be loaded is an ImportError with the system's message.
        if isinstance(error, ImportError) and (resource := exhausted_resource_in_log(str(error))) is not None:
            return resource
        error = error.__cause__ or error.__context__
    return None


def exhausted_resource_in_log(text: str) -> ExhaustedResource | None:
    """Return the resource that ran out by a program's log, for one that could not write down why it ended.

    >>> exhausted_resource_in_log("OSError: [Errno 24] Too many open files").what
    'no file handles are left'
    """
    for number, resource in _BY_NUMBER.items():
        if f"[Errno {number}]" in text or os.strerror(number) in text:
            return resource
    return None
