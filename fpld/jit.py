"""Compile a kernel with numba where it is installed; without it the same function runs as plain Python, slowly.

A kernel is written so that both give the same integers: it keeps to int64 arithmetic that does not overflow.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

try:
    import numba
except ImportError:
    COMPILED = False
    warnings.warn("numba is not installed: kernels run as plain Python; pip install 'fpld[fast]'", stacklevel=2)
else:
    COMPILED = True


def kernel(function: F) -> F:
    """Compile on first use and keep the result in numba's cache."""
    if not COMPILED:
        return function
    compiled: Any = numba.njit(cache=True, nogil=True)(function)
    result: F = compiled
    return result
