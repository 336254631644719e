"""Checks of arguments, each with one form of message: which argument, what it must be, what it was."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.types import Array, Floats


def real(name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf) -> float:
    """Return `value` as a finite float that is at least `least` and greater than `above`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise InputError(f"{name} must be finite, got {number}")
    if number < least:
        raise InputError(f"{name} must be at least {least:g}, got {number:g}")
    if number <= above:
        raise InputError(f"{name} must be greater than {above:g}, got {number:g}")
    return number


def integer(name: str, value: Any, *, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return `value` as an int in `[least, most]`; a float that is a whole number does not pass."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InputError(f"{name} must be an integer, got {value!r}")
    if not least <= value <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {value}")
    return int(value)


def vector(name: str, value: Any, *, size: int | None = None) -> Floats:
    """Return `value` as a one-dimensional float64 array without NaN; infinities may be meant (a cap)."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a sequence of numbers, got {value!r}") from None
    if array.ndim != 1 or array.size == 0:
        raise InputError(f"{name} must be a non-empty sequence of numbers, got shape {array.shape}")
    if size is not None and array.size != size:
        raise InputError(f"{name} must have {size} entries, one for each node, got {array.size}")
    if np.isnan(array).any():
        raise InputError(f"{name}[{int(np.isnan(array).argmax())}] must be a number, got nan")
    return array


def printable(text: object, most: int = 256) -> str:
    r"""Return text from outside as one short line that a terminal, a log or a page may show: no control characters.

    >>> printable("a\x1b[2J\nb"), printable("x" * 300, most=5)
    ('a [2J b', 'xx...')
    """
    raw = str(text)[: 4 * most]  # a bound on the work for a very long text
    line = " ".join("".join(c if c.isprintable() else " " for c in raw).split())
    return line if len(line) <= most else line[: most - 3] + "..."


def shortened_list(names: Sequence[str], most: int = 20) -> str:
    """Return names in one line, only the first of them if there are many.

    >>> shortened_list(["north", "east", "south", "west"], most=3)
    'north, east, south and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def block_range(value: range, contexts: int) -> range:
    """Return `value` if it is a range of contexts with step 1 within 0..contexts."""
    if value.step != 1 or not 0 <= value.start <= value.stop <= contexts:
        raise InputError(f"rows must be a range with step 1 within 0..{contexts}, got {value}")
    return value


def host_array(value: Any) -> Array:
    """Return floating-point numbers as a NumPy array; they may be a torch tensor on any device."""
    if hasattr(value, "detach"):
        value = value.detach()
        # NumPy has no bfloat16. A float32 tensor on the CPU shares its memory with the array.
        if "bfloat16" in str(value.dtype):
            value = value.float()
        value = value.cpu().numpy()
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"logits must be floating-point, got dtype {array.dtype}")
    return array


def logits_array(value: Any, expected: tuple[int, int]) -> Array:
    """Return `value` as a floating-point [m, V] array of the given shape."""
    array = host_array(value)
    if array.shape != expected:
        raise InputError(f"logits must have shape (contexts, vocab) = {expected}, got {array.shape}")
    return array


def logits_block(value: Any, whole: tuple[int, int], start: int) -> Array:
    """Return the contexts from `start` on, of `whole` = (contexts, vocab), as a floating-point array [n, V]."""
    array = host_array(value)
    if array.ndim != 2 or array.shape[1] != whole[1] or start + len(array) > whole[0]:
        raise InputError(
            f"a block of logits must have shape (n, vocab) with vocab = {whole[1]} and n at most {whole[0] - start} at "
            f"context {start}, got {array.shape}"
        )
    return array


def row_count(seen: int, contexts: int) -> None:
    """Raise InputError for blocks of logits that end too early."""
    if seen != contexts:
        raise InputError(f"blocks of logits must hold {contexts} contexts in all, got {seen}")


def finite(array: Array, start: int = 0) -> None:
    """Raise InputError for NaN and infinities, with their place; the array's first row is context `start`."""
    if array.size and not (np.isfinite(array.max()) and np.isfinite(array.min())):  # both pass NaN on
        good = np.isfinite(array)
        row, column = (int(i) for i in np.argwhere(~good)[0])
        raise InputError(f"logits must be finite, got {array[row, column]} at context {start + row}, token {column}")
