"""Students: language models behind one contract, so that the protocol does not know which it trains.

`NGram` needs NumPy only, other kinds need PyTorch. All are imported when they are first used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import registry
from fpld.errors import InputError
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.storage.files import parse_json
from fpld.students.heldout import divergence
from fpld.target import Target

if TYPE_CHECKING:
    from fpld.students.base import Student
    from fpld.students.ngram import NGram, NGramConfig

_LAZY_NAMES = {"Student": "base", "NGram": "ngram", "NGramConfig": "ngram"}  # and the modules that define them


def student_class(kind: str) -> "type[Student]":
    """Return the class of a kind of student by name.

    >>> student_class("ngram").__name__
    'NGram'
    """
    return registry.students.get(kind)


def load(path: str | Path) -> "Student":
    """Read a student of any kind from a file that `save` wrote."""
    kind = read_arrays(path)[1].get("kind", "")
    try:
        cls = student_class(kind)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return cls.load(path)


def read_model_path(path: str | Path) -> str | None:
    """Return the pretrained model, a path or a name, that the student in a file is made of; None if it needs none."""
    config = read_arrays(path)[1].get("config", "{}")
    try:
        named = parse_json(config).get("path")
    except (ValueError, AttributeError):
        raise InputError(f"{path}: must hold a student with its configuration") from None
    return None if named is None else str(named)


def read_vocab(path: str | Path) -> int:
    """Return V of the student in a file without making the student."""
    try:
        vocab = parse_json(read_arrays(path)[1].get("config", "{}")).get("vocab")
    except (ValueError, AttributeError):
        vocab = None
    if type(vocab) is not int or vocab < 1:
        raise InputError(f"{path}: must hold a student with its configuration")
    return vocab


def read_state(path: str | Path) -> dict[str, np.ndarray]:
    """Return the parameters in a student's file without making the student, which may be large."""
    return read_arrays(path)[0]


def write_state(path: str | Path, state: dict[str, np.ndarray], *, like: str | Path, **metadata: str) -> None:
    """Write a student with these parameters, of the kind and configuration of the one in the file `like`."""
    write_arrays(path, state, {**read_arrays(like)[1], **metadata})


def __getattr__(name: str) -> Any:
    if name in _LAZY_NAMES:
        return getattr(import_module(f"fpld.students.{_LAZY_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "NGram",
    "NGramConfig",
    "Student",
    "Target",
    "divergence",
    "load",
    "read_model_path",
    "read_state",
    "read_vocab",
    "student_class",
    "write_state",
]
