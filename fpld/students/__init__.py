"""Students: language models behind one contract, so that the protocol does not know which it trains.

`NGram` needs NumPy only. `fpld.students.transformer` needs PyTorch, and is imported only when asked for.
"""

from pathlib import Path

import numpy as np

from fpld import registry
from fpld.errors import InputError
from fpld.rules.target import Target
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.students.base import Student
from fpld.students.ngram import NGram, NGramConfig
from fpld.students.targets import divergence


def student_class(kind: str) -> type[Student]:
    """Return the class of a kind of student by name.

    >>> student_class("ngram").__name__
    'NGram'
    """
    return registry.students.get(kind)


def load(path: str | Path) -> Student:
    """Read a student of any kind from a file that `save` wrote."""
    kind = read_arrays(path)[1].get("kind", "")
    try:
        cls = student_class(kind)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return cls.load(path)


def read_state(path: str | Path) -> dict[str, np.ndarray]:
    """Return the parameters in a student's file without making the student, which may be large."""
    return read_arrays(path)[0]


def write_state(path: str | Path, state: dict[str, np.ndarray], *, like: str | Path, **said: str) -> None:
    """Write a student with these parameters, of the kind and configuration of the one in the file `like`."""
    write_arrays(path, state, {**read_arrays(like)[1], **said})


__all__ = [
    "NGram",
    "NGramConfig",
    "Student",
    "Target",
    "divergence",
    "load",
    "read_state",
    "student_class",
    "write_state",
]
