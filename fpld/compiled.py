"""Numba where it is needed: one decorator for kernels, with a cache that works where the package cannot be written.

Kernels release the interpreter, so that threads run side by side. Compiled code is kept beside the module, or in the
user's cache folder if that cannot be written, or not at all; `NUMBA_CACHE_DIR` names another place.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")


def kernel(function: F) -> F:
    """Compile a function when it is first called; without numba it runs as it is, slowly and with the same result."""
    return _compiled(function)


def bare(function: F) -> F:
    """Compile a kernel that makes no arrays and does not count references to those that it is given.

    Where small functions hand arrays on to each other, counting takes several times as long as all the rest.
    """
    return _compiled(function, _nrt=False)


def _compiled(function: F, **options: Any) -> F:
    if not available():
        return function
    from numba import njit

    try:
        return cast("F", njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # no folder to keep it in
        return cast("F", njit(nogil=True, **options)(function))


def inlined(function: F) -> F:
    """Make a function a part of the kernels that call it: a call with arrays would cost more than most of them do."""
    if not available():
        return function
    from numba import njit

    return cast("F", njit(inline="always")(function))


@cache
def available() -> bool:
    """Return whether there is numba; if not, say once that NumPy serves in its place."""
    found = find_spec("numba") is not None
    if not found:
        logging.getLogger("fpld").warning(
            "numba is missing: plain Python and NumPy serve, slower; pip install 'fpld[fast]'"
        )
    return found
