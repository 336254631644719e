"""Students: language models behind one contract, so that the protocol does not know which it trains.

`NGram` needs NumPy only. `fpld.students.transformer` needs PyTorch, and is imported only when asked for.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fpld.arrays import read_arrays, write_arrays
from fpld.errors import InputError
from fpld.students.base import Progress, Student
from fpld.students.ngram import NGram, NGramConfig


def _transformer() -> type[Student]:
    from fpld.students.transformer import Transformer  # PyTorch: loaded only for who uses it

    return Transformer


def _huggingface() -> type[Student]:
    from fpld.students.huggingface import HuggingFace  # transformers: loaded only for who uses it

    return HuggingFace


KINDS: dict[str, Callable[[], type[Student]]] = {
    "ngram": lambda: NGram,
    "transformer": _transformer,
    "huggingface": _huggingface,
}
"""Each kind of student, by its name in model files and configurations, and how to import its class."""


def register(kind: str, load_class: Callable[[], type[Student]]) -> None:
    """Add a kind of student of your own for this process; `load_class` imports and gives its class."""
    if kind in KINDS:
        raise InputError(f"student kind {kind!r} exists already: choose another name")
    KINDS[kind] = load_class


def student_class(kind: str) -> type[Student]:
    """Return the class of a kind of student by name.

    >>> student_class("ngram").__name__
    'NGram'
    """
    if kind not in KINDS:
        raise InputError(f"kind must be one of {sorted(KINDS)}, got {kind!r}")
    return KINDS[kind]()


def load(path: str | Path) -> Student:
    """Read a student of any kind from a file that `save` wrote."""
    kind = read_arrays(path)[1].get("kind", "")
    if kind not in KINDS:
        raise InputError(f"{path}: kind must be one of {sorted(KINDS)}, got {kind!r}")
    return student_class(kind).load(path)


def read_state(path: str | Path) -> dict[str, np.ndarray]:
    """Give the parameters in a student's file without making the student, which may be large."""
    return read_arrays(path)[0]


def write_state(path: str | Path, state: dict[str, np.ndarray], *, like: str | Path) -> None:
    """Write a student with these parameters, of the kind and configuration of the one in the file `like`."""
    write_arrays(path, state, read_arrays(like)[1])


__all__ = [
    "KINDS",
    "NGram",
    "NGramConfig",
    "Progress",
    "Student",
    "load",
    "read_state",
    "register",
    "student_class",
    "write_state",
]
