"""Compile kernels with numba where it is installed, and run them as plain Python where it is not.

Three decorators make a kernel of a function; its result is the same with numba and without:

- `kernel` compiles a function for the types of its arguments at the first call.
- `borrowing_kernel` does so without reference counts, for functions that allocate nothing and pass arrays on.
- `inlined` copies a function into the kernels that call it.

Compiled kernels release the interpreter lock, so that threads run side by side. Compiled code is cached beside the
module; if that folder cannot be written, in the user's cache folder; otherwise not at all. `NUMBA_CACHE_DIR` names
another folder. All kernels take up to a minute to compile, once a machine: lines of the log say so while it lasts, and
`fpld warm` compiles them ahead. A kernel may take named tuples of arrays and numbers: each adds about 1.5 µs to a call
from Python.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

F = TypeVar("F", bound="Callable[..., object]")
log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 5.0  # between two lines of the log while kernels are compiled


def kernel(function: F) -> F:
    """Compile a function at its first call."""
    return _compiled(function)


def borrowing_kernel(function: F) -> F:
    """Compile a function that allocates no array, without counting references to those that it is passed.

    Where small functions pass arrays to each other, counting takes several times as long as all the rest.
    """
    return _compiled(function, _nrt=False)


def _compiled(function: F, **options: Any) -> F:
    if not numba_available():
        return function
    from numba import njit

    try:
        compiled = njit(cache=True, nogil=True, **options)(function)
        _tolerate_stale_index(compiled._cache)
    except RuntimeError:  # numba found no folder for its cache
        compiled = njit(nogil=True, **options)(function)
    compilations.watch(compiled._cache)
    return cast("F", compiled)


class Compilations:
    """Count the kernels that this process compiles, and log that it takes a while."""

    def __init__(self) -> None:
        self.count = 0
        self._started = 0.0
        self._logged = 0.0

    def watch(self, cache: Any) -> None:
        """Let a kernel's cache tell when it does not have a kernel, and when the kernel has been compiled."""
        load = cache.load_overload
        save = cache.save_overload

        def load_overload(signature: Any, target: Any) -> Any:
            result = load(signature, target)
            if result is None:
                self._begin()
            return result

        def save_overload(signature: Any, data: Any) -> Any:
            self._end()
            return save(signature, data)

        cache.load_overload = load_overload
        cache.save_overload = save_overload

    def _begin(self) -> None:
        if self._started == 0.0:
            self._started = self._logged = monotonic()
            log.info("compiling kernels, once on this machine: up to a minute; `fpld warm` does it ahead")

    def _end(self) -> None:
        self.count += 1
        now = monotonic()
        if now - self._logged >= _INTERVAL_SECONDS:
            self._logged = now
            log.info("compiling kernels: %d so far, %.0f s", self.count, now - self._started)


compilations = Compilations()
"""Of this process."""


def _tolerate_stale_index(cache: Any) -> None:
    """Let a kernel's cache drop an index that cannot be read, instead of raising an error.

    An index names the classes of named tuples that a kernel was compiled for. One of another version of the package may
    name a class that this version does not have, and numba reads the index before it compares versions.
    """
    load = cache.load_overload

    def load_overload(signature: Any, target: Any) -> Any:
        try:
            return load(signature, target)
        except (AttributeError, ImportError):
            cache.flush()
            return None

    cache.load_overload = load_overload


def in_cache(module: ModuleType) -> bool:
    """Return whether a kernel of a module was compiled by an earlier process, whose cache this one can read."""
    caches = [getattr(value, "_cache", None) for value in vars(module).values()]
    files = [getattr(cache, "_cache_file", None) for cache in caches]
    try:
        return any(file._load_index() for file in files if file is not None)
    except (AttributeError, ImportError):  # an index of another version of the package, or of numba
        return False


def inlined(function: F) -> F:
    """Copy a function into the kernels that call it: a call that passes arrays costs more than most of them do."""
    if not numba_available():
        return function
    from numba import njit

    return cast("F", njit(inline="always")(function))


@cache
def numba_available() -> bool:
    """Return whether numba is installed; if not, log one warning that NumPy serves in its place."""
    installed = find_spec("numba") is not None
    if not installed:
        logging.getLogger("fpld").warning(
            "numba is missing: plain Python and NumPy serve, slower; pip install 'fpld[fast]'"
        )
    return installed
