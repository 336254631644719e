"""Checks of arguments, each with one form of message: which argument, what it must be, what it was.

Functions whose names begin with `check_` are for students: their parameters, texts, probe sets and losses.
"""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fpld.types import Array, Floats


_INVISIBLE_BUT_HARMLESS = frozenset("\n\t\u200c\u200d")
MAX_COUNT = 2**63 - 1
MAX_NAME_COMPARED = 80
"""Characters of an unknown name that is compared with the known ones."""
MAX_BATCH = 2**16
"""Windows or contexts in a minibatch at most: a larger one is a slip of the pen, and takes all memory."""


def real(name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf) -> float:
    """Return `value` as a finite float that is at least `least` and greater than `above`."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} must be a number, got {shown(value)}") from None
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
        raise InputError(f"{name} must be an integer, got {shown(value)}")
    if not least <= value <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {shown(value)}")
    return int(value)


def vector(name: str, value: Any, *, size: int | None = None) -> Floats:
    """Return `value` as a one-dimensional float64 array without NaN; infinities may be meant (a cap)."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a sequence of numbers, got {shown(value)}") from None
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


def visible(text: object) -> str:
    r"""Return text for a terminal or a page as its reader sees it: nothing in it moves the cursor or turns the text.

    Control characters, and marks that change the direction of what follows, become U+FFFD. Line ends, tabs and the
    joiners that some scripts need stay.

    >>> visible("a\x1b[2J\tb\n\u202ec") == "a\ufffd[2J\tb\n\ufffdc"
    True
    """
    return "".join(c if c.isprintable() or c in _INVISIBLE_BUT_HARMLESS else _substitute(c) for c in str(text))


def _substitute(character: str) -> str:
    return " " if character.isspace() else "\ufffd"


def shown(value: object, most: int = 80) -> str:
    """Return a value as an error shows it: as Python writes it, in one short printable line.

    >>> shown("a" * 200, most=10), shown(10**5000)
    ("'aaaaaa...", 'an integer of 16610 bits')
    """
    # Python refuses to write out an integer of more digits than `sys.get_int_max_str_digits`.
    if isinstance(value, int) and value.bit_length() > 8 * most:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        value = value[: 4 * most]  # a bound on the work for a very long text
    return printable(repr(value), most)


def shortened_list(names: Sequence[str], most: int = 20) -> str:
    """Return names in one line, only the first of them if there are many.

    >>> shortened_list(["north", "east", "south", "west"], most=3)
    'north, east, south and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is meant by one that does not exist, if one is near: in letters, or in its words.

    >>> closest_name("bits_per_context", ["bits", "context_bits", "uplink"]), closest_name("best", ["optimal"])
    ('context_bits', None)
    """
    if len(name) > MAX_NAME_COMPARED:
        return None
    by_spelling: dict[str, str] = {}
    for other in names:
        by_spelling[other] = other
        by_spelling.setdefault(_sorted_words(other), other)
    for spelling in (name, _sorted_words(name)):
        for match in difflib.get_close_matches(spelling, by_spelling, n=1):
            return by_spelling[match]
    return None


def _sorted_words(name: str) -> str:
    return " ".join(sorted(name.lower().replace("-", "_").split("_")))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return how an error about an unknown name ends: with the closest one there is, or with nothing.

    >>> did_you_mean("sample", ["samples", "uniform"])
    ': did you mean samples?'
    """
    closest = closest_name(name, names)
    return "" if closest is None else f": did you mean {closest}?"


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


def check_count(name: str, value: int, least: int, most: int = MAX_COUNT) -> None:
    """Raise ParameterError unless a value is an integer of at least `least` and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ParameterError(name, f"must be an integer of at least {least}, got {shown(value)}")
    if value > most:
        raise ParameterError(name, f"must be at most {most}, got {shown(value)}")


def check_positive(name: str, value: float) -> None:
    """Raise ParameterError unless a value is a positive finite number."""
    if not 0 < value < math.inf:
        raise ParameterError(name, f"must be a positive number, got {value!r}")


def check_weight(name: str, value: float) -> None:
    """Raise ParameterError unless a value is a finite number of at least 0."""
    if not 0 <= value < math.inf:
        raise ParameterError(name, f"must be a number of at least 0, got {value!r}")


def check_vocab(vocab: int) -> None:
    """Raise ParameterError unless a vocabulary has at least 2 tokens, or 0: its size is not known yet."""
    if vocab != 0:
        check_count("vocab", vocab, 2)


def check_training(steps: int, seed: int, rate: float | None) -> None:
    """Raise ParameterError for a step count, a seed or a learning rate that cannot be used."""
    check_count("steps", steps, 1)
    check_count("seed", seed, 0)
    if rate is not None and not 0 < rate < np.inf:
        raise ParameterError("rate", f"must be a positive number, or None for the student's own, got {rate!r}")


def check_finite(loss: float) -> float:
    """Return the loss of a training; raise InputError if it is not finite, since the student cannot be used then."""
    if not np.isfinite(loss):
        raise InputError(f"rate must be lower: training diverged, with a loss of {loss}; load the last state")
    return loss


def _check_ids(name: str, ids: np.ndarray, vocab: int, ndim: int) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != ndim or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"{name} must be integers with {ndim} dimension(s), got {ids.dtype} with shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        raise InputError(
            f"{name} must hold token ids of 0 to {vocab - 1}, got {ids.min()} to {ids.max()}; "
            "use the tokenizer that this student's vocabulary comes from"
        )
    return ids.astype(np.int32, copy=False)


def check_tokens(tokens: np.ndarray, vocab: int, least: int, *, name: str = "tokens") -> np.ndarray:
    """Return a text as int32 [n], or raise InputError when it is no text of at least `least` tokens."""
    tokens = _check_ids(name, tokens, vocab, 1)
    if len(tokens) < least:
        raise InputError(f"{name} must hold at least {least} tokens, a window and one more, got {len(tokens)}")
    return tokens


def check_sequences(sequences: np.ndarray, vocab: int, longest: int | None) -> np.ndarray:
    """Return a probe set as int32 [S, T], or raise InputError when the student cannot evaluate it."""
    sequences = _check_ids("sequences", sequences, vocab, 2)
    if sequences.size == 0:
        raise InputError(f"sequences must hold at least one context, got shape {sequences.shape}")
    if longest is not None and sequences.shape[1] > longest:
        raise InputError(f"sequences must be at most {longest} tokens long, got {sequences.shape[1]}")
    return sequences
