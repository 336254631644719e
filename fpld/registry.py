"""Allocators, rules and codecs by name: the package's own, those of installed packages, those of a call.

A package from outside joins by an entry point in the group `fpld.allocators`, `fpld.rules` or `fpld.codecs`; a
script joins by `register`. A name has one owner: a second one is refused.
"""

from __future__ import annotations

from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING, Generic, TypeVar

from fpld import allocate, combine
from fpld.codecs import Float32Codec, PredictiveCodec, UniformCodec
from fpld.errors import InputError

if TYPE_CHECKING:
    from fpld.allocate import Allocator
    from fpld.codecs import Codec
    from fpld.combine import Rule

T = TypeVar("T")


class Registry(Generic[T]):
    """Hold the implementations of one extension point."""

    def __init__(self, kind: str, own: dict[str, T]) -> None:
        self.kind = kind
        self._known = dict(own)

    def register(self, name: str, item: T) -> None:
        """Add an implementation for this process."""
        if name in self.names():
            raise InputError(f"{self.kind} {name!r} exists already: choose another name")
        self._known[name] = item

    def names(self) -> list[str]:
        """List what can be asked for; nothing is imported for it."""
        return sorted({*self._known, *(entry.name for entry in self._entries())})

    def get(self, name: str) -> T:
        """Give the implementation of this name, importing it from the package that offers it if need be."""
        if name not in self._known:
            for entry in self._entries():
                if entry.name == name:
                    self._known[name] = entry.load()
                    break
            else:
                raise InputError(f"{self.kind} must be one of {', '.join(self.names())}, got {name!r}")
        return self._known[name]

    def _entries(self) -> EntryPoints:
        return entry_points(group=f"fpld.{self.kind}s")


allocators: Registry[Allocator] = Registry(
    "allocator", {"optimal": allocate.optimal, "uniform": allocate.uniform, "inverse": allocate.inverse}
)
rules: Registry[Rule] = Registry(
    "rule",
    {
        "mean": combine.mean,
        "precision": combine.precision,
        "trimmed": combine.trimmed,
        "median": combine.median,
        "mixture": combine.mixture,
    },
)
codecs: Registry[Codec] = Registry(
    "codec",
    {
        "uniform": UniformCodec(),
        "float32": Float32Codec(),
        "predictive": PredictiveCodec(),
        "predictive-strict": PredictiveCodec(code=4, strict=True),
    },
)
