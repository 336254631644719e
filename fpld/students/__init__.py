"""Students: language models behind one contract, so that the protocol does not know which it trains.

`NGram` needs NumPy only. `fpld.students.transformer` needs PyTorch, and is imported only when asked for.
"""

from collections.abc import Callable
from pathlib import Path

from fpld.arrays import read_arrays
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


__all__ = ["KINDS", "NGram", "NGramConfig", "Progress", "Student", "load", "student_class"]
