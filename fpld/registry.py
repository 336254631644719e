"""Extension points by name: one table for each, of what the package brings, what others install, what a script adds.

All have one form. What comes with the package is named as an entry point is, `module:attribute`, and imported when it
is first asked for. A package from outside joins by an entry point in the group that the table names, such as
`fpld.codecs`; a script joins by `register`. A name has one owner: a second one is refused.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TYPE_CHECKING, Generic, TypeVar

from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.budget.allocators import Allocator
    from fpld.budget.estimators import Estimator
    from fpld.codecs import Codec
    from fpld.data.corpora import Corpus
    from fpld.engines.local.baselines import Baseline
    from fpld.rules import Rule
    from fpld.students import Student

T = TypeVar("T")


class Registry(Generic[T]):
    """Hold the implementations of one extension point; `group` is its group of entry points."""

    def __init__(self, kind: str, group: str, own: Mapping[str, str]) -> None:
        self.kind, self.group = kind, group
        self._own = [EntryPoint(name, value, group) for name, value in own.items()]
        self._loaded: dict[str, T] = {}

    def register(self, name: str, item: T) -> None:
        """Add an implementation for this process."""
        if name in self:
            raise InputError(f"{self.kind} {name!r} exists already: choose another name")
        self._loaded[name] = item

    def names(self) -> list[str]:
        """List what can be asked for; nothing is imported for it."""
        return sorted({*self._loaded, *(entry.name for entry in (*self._own, *self._installed()))})

    def __contains__(self, name: str) -> bool:
        """Return whether this can be asked for; other packages are looked at last, since that takes time."""
        own = name in self._loaded or any(entry.name == name for entry in self._own)
        return own or any(entry.name == name for entry in self._installed())

    def check(self, name: str) -> str:
        """Return the name if it can be asked for; refuse any other, naming those that can."""
        if name not in self:
            raise InputError(f"{self.kind} must be one of {', '.join(self.names())}, got {name!r}")
        return name

    def get(self, name: str) -> T:
        """Return the implementation of this name, importing it if need be."""
        if self.check(name) not in self._loaded:
            self._loaded[name] = next(e for e in (*self._own, *self._installed()) if e.name == name).load()
        return self._loaded[name]

    def _installed(self) -> EntryPoints:
        return entry_points(group=self.group)


codecs: Registry[Codec] = Registry(
    "codec",
    "fpld.codecs",
    {
        "uniform": "fpld.codecs.uniform.codec:UNIFORM",
        "float32": "fpld.codecs.float32:FLOAT32",
        "predictive": "fpld.codecs.predictive.codec:PREDICTIVE",
        "predictive-strict": "fpld.codecs.predictive.codec:PREDICTIVE_STRICT",
        "samples": "fpld.codecs.samples.codec:SAMPLES",
    },
)
rules: Registry[Rule] = Registry(
    "rule",
    "fpld.rules",
    {
        "mean": "fpld.rules.averages:MEAN",
        "precision": "fpld.rules.averages:PRECISION",
        "mixture": "fpld.rules.mixture:MIXTURE",
        "trimmed": "fpld.rules.robust:TRIMMED",
        "median": "fpld.rules.robust:MEDIAN",
        "geometric": "fpld.rules.geometric:GEOMETRIC",
        "guarded": "fpld.rules.guarded:GUARDED",
        "fitted": "fpld.rules.fitted:FITTED",
    },
)
allocators: Registry[Allocator] = Registry(
    "allocator",
    "fpld.allocators",
    {
        **{name: f"fpld.budget.allocators:{name}" for name in ("optimal", "uniform", "inverse")},
        "square-root": "fpld.budget.labels:square_root",
    },
)
estimators: Registry[Estimator] = Registry(
    "estimator",
    "fpld.estimators",
    {
        "none": "fpld.budget.estimators:NONE",
        "second-moment": "fpld.budget.estimators:SECOND_MOMENT",
        "distortion": "fpld.budget.estimators:DISTORTION",
        "curves": "fpld.budget.curves:CURVES",
    },
)
students: Registry[type[Student]] = Registry(
    "student kind",
    "fpld.students",
    {
        "ngram": "fpld.students.ngram:NGram",
        "transformer": "fpld.students.transformer:Transformer",
        "huggingface": "fpld.students.huggingface:HuggingFace",
    },
)
corpora: Registry[Corpus] = Registry(
    "corpus",
    "fpld.corpora",
    {name: f"fpld.data.corpora:{name}" for name in ("sotu", "pubmed", "wikipedia", "enwik8")},
)
baselines: Registry[Baseline] = Registry(
    "baseline",
    "fpld.baselines",
    {
        **{name: f"fpld.engines.local.baselines:{name}" for name in ("alone", "pooled", "float32", "ensemble")},
        "fedavg": "fpld.engines.local.averaging:FEDAVG",
        "fedavg-1bit": "fpld.engines.local.averaging:FEDAVG_1BIT",
        "flora": "fpld.engines.local.stacking:flora",
    },
)
