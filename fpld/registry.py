"""Registries: one for each extension point, with the implementations by name.

An implementation comes from this package, from another package that is installed, or from a script. Those of this
package are listed as entry points, `module:attribute`, and imported on first use. Another package adds an entry point
to the group of the registry, such as `fpld.codecs`; a script calls `register`. A name that is taken is refused.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fpld.errors import InputError
from fpld.validation import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.baselines import Baseline
    from fpld.budget.allocators import Allocator
    from fpld.budget.estimators import Estimator
    from fpld.codecs.base import Codec
    from fpld.data.corpora import Corpus
    from fpld.federation.tracking import Tracker
    from fpld.rules import Rule
    from fpld.students import Student

T = TypeVar("T")


class Registry(Generic[T]):
    """Hold the implementations of one extension point; `group` is its group of entry points."""

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str]) -> None:
        self.kind = kind
        self.group = group
        self._builtin = [EntryPoint(name, value, group) for name, value in builtin.items()]
        self._loaded: dict[str, T] = {}

    def register(self, name: str, item: T) -> None:
        """Add an implementation for this process."""
        if name in self:
            raise InputError(f"{self.kind} {name!r} exists already: choose another name")
        self._loaded[name] = item

    def registered(self) -> dict[str, T]:
        """Return what a script has registered, and no entry point has."""
        entries = {entry.name for entry in self._builtin}
        added = {name: item for name, item in self._loaded.items() if name not in entries}
        return {name: item for name, item in added.items() if name not in self._installed().names} if added else {}

    def names(self) -> list[str]:
        """List the names; nothing is imported."""
        return sorted({*self._loaded, *(entry.name for entry in (*self._builtin, *self._installed()))})

    def __contains__(self, name: str) -> bool:
        """Return whether there is an implementation of this name; other packages are searched last: that takes time."""
        local = name in self._loaded or any(entry.name == name for entry in self._builtin)
        return local or any(entry.name == name for entry in self._installed())

    def check(self, name: str) -> str:
        """Return the name if it exists; raise InputError with all names, and the closest one, if not."""
        if name not in self:
            names = self.names()
            closest = did_you_mean(name, names)
            raise InputError(f"{self.kind} must be one of {', '.join(names)}, got {shown(name)}{closest}")
        return name

    def get(self, name: str) -> T:
        """Return the implementation of this name, and import it on first use."""
        if self.check(name) not in self._loaded:
            self._loaded[name] = next(e for e in (*self._builtin, *self._installed()) if e.name == name).load()
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
        "geometric": "fpld.rules.robust:GEOMETRIC",
        "guarded": "fpld.rules.guarded:GUARDED",
        "fitted": "fpld.rules.fitted:FITTED",
    },
)
allocators: Registry[Allocator] = Registry(
    "allocator",
    "fpld.allocators",
    {
        **{name: f"fpld.budget.allocators:{name}" for name in ("optimal", "uniform", "inverse")},
        "square-root": "fpld.budget.allocators:square_root",
    },
)
estimators: Registry[Estimator] = Registry(
    "estimator",
    "fpld.estimators",
    {
        "none": "fpld.budget.estimators:NONE",
        "second-moment": "fpld.budget.estimators:SECOND_MOMENT",
        "distortion": "fpld.budget.estimators:DISTORTION",
        "curves": "fpld.budget.estimators:CURVES",
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
        **{name: f"fpld.baselines.reference:{name.upper()}" for name in ("alone", "pooled", "float32", "ensemble")},
        "fedavg": "fpld.baselines.fedavg:FEDAVG",
        "fedavg-1bit": "fpld.baselines.fedavg:FEDAVG_1BIT",
        "pooled-all": "fpld.baselines.reference:POOLED_ALL",
        "feddf": "fpld.baselines.feddf:FEDDF",
        "feddf-kbit": "fpld.baselines.feddf:FEDDF_KBIT",
        "feddf-written": "fpld.baselines.feddf:FEDDF_WRITTEN",
        "updates": "fpld.baselines.reference:UPDATES",
        "flora": "fpld.baselines.flora:FLORA",
    },
)
trackers: Registry[type[Tracker]] = Registry(
    "tracker",
    "fpld.trackers",
    {
        "tensorboard": "fpld.federation.trackers:TensorBoard",
        "mlflow": "fpld.federation.trackers:MLflow",
        "wandb": "fpld.federation.trackers:WeightsAndBiases",
    },
)
REGISTRIES: tuple[Registry[Any], ...] = (
    codecs,
    rules,
    allocators,
    estimators,
    students,
    corpora,
    baselines,
    trackers,
)
"""All extension points."""
