"""A whole configuration: the checks between its tables, and its reading from a TOML file or a preset.

Every error names the key to change.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar, get_args

import numpy as np
from pydantic import Field, ValidationError, model_validator

from fpld import registry
from fpld.config.paths import Place, absolute_paths, show_place
from fpld.config.sections import (
    BaselinesSection,
    BudgetSection,
    CodecSection,
    CombineSection,
    DataSection,
    EngineSection,
    FlowerSection,
    LabelsSection,
    NodeSection,
    PrivacySection,
    ProbeSection,
    RunSection,
    Section,
    SendSection,
    Student,
    TokenizerSection,
    TrainSection,
    WrittenSection,
)
from fpld.errors import InputError
from fpld.registry import codecs
from fpld.storage.files import parse_toml_tables, read_utf8
from fpld.storage.run_folder import CONFIG, VERSIONS
from fpld.students.configs import MIN_PUBLIC_SEQUENCES, HuggingFaceConfig
from fpld.units import show_count
from fpld.validation import closest_name, did_you_mean, printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

AVERAGING = ("fedavg", "fedavg-1bit", "flora", "feddf", "feddf-kbit", "feddf-written")  # they average weights
SHARED_TOKENS = ("pooled", "pooled-all")
"""Baselines that need one tokenizer for all texts."""
MAX_PROBLEMS = 100
"""Problems of a configuration that are named; of more only their number is said."""
FULL_BATCH_UNITS = 1000
"""How many units a node is taken to have, where all of them take part in a step: for times that are left alone."""
MISSING = "is missing"
_MAX_MESSAGE = 4000  # characters of one problem, which may be several in one
_SEED_LINE = re.compile(r"# --seed (\d{1,19})\n")

S = TypeVar("S", bound=Section)


class Config(Section):
    """A whole configuration."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    probe: ProbeSection
    written: WrittenSection | None = None
    send: SendSection | None = None
    labels: LabelsSection | None = None
    tokenizer: TokenizerSection = TokenizerSection()
    nodes: Annotated[list[NodeSection], Field(min_length=1)]
    budget: BudgetSection = BudgetSection()
    codec: CodecSection = CodecSection()
    combine: CombineSection = CombineSection()
    student: Student
    base: TrainSection | None = None
    local: TrainSection
    distill: TrainSection
    privacy: PrivacySection | None = None
    baselines: BaselinesSection = BaselinesSection()
    engine: EngineSection = EngineSection()
    flower: FlowerSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(self._contradictions())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yield every way in which sections do not fit each other, each naming the key to change."""
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            yield "nodes: names must differ"
        asked = self.run.asked(len(names))
        if self.run.quorum is not None and self.run.quorum > asked:
            which = "nodes" if self.run.fraction is None else "nodes that run.fraction asks"
            yield f"run.quorum must be at most the number of {which}, {asked}, got {self.run.quorum}"
        if self.probe.fresh and self.codec.against == "own":
            yield "probe.fresh must be false when codec.against is 'own': refinement keeps its contexts"
        if self.combine.trim is not None and not registry.rules.get(self.combine.rule).traits.trims:
            yield f"combine.trim must be left out with the rule {self.combine.rule!r}: it is for 'trimmed'"
        averaging = [name for name in self.baselines.methods if name in AVERAGING]
        if self.combine.broadcast == "logits" and averaging:
            yield f"baselines.methods: {averaging[0]!r} averages weights, and combine.broadcast = 'logits' sends none"
        if any(node.differs for node in self.nodes) and averaging:
            yield f"baselines.methods: {averaging[0]!r} averages weights, and nodes have models of their own"
        if any(node.taught for node in self.nodes) and self.base is None:
            yield "base.steps must be given: a node's model learns from the base model before the first round"
        if any(node.effort != 1 for node in self.nodes) and self.privacy is not None:
            yield "nodes.effort must be left out with [privacy]: a guarantee counts the steps of [local]"
        if self.privacy is not None and self.privacy.trained == "subspace":
            least = MIN_PUBLIC_SEQUENCES * self.probe.length
            if self.probe.contexts <= least - self.probe.length:
                yield f"probe.contexts must be at least {least} with privacy.trained = 'subspace'"
        if "flora" in self.baselines.methods and not getattr(self.student.settings, "lora", 0):
            yield "baselines.methods: 'flora' stacks adapters, and student.lora has none"
        counts = self.baselines.rounds or []
        if any(self.local_steps % rounds for rounds in counts):
            yield f"baselines.rounds must divide the nodes' {self.local_steps} local steps, got {counts}"
        if self.codec.against == "own" and not codecs.get(self.codec.name).traits.refines:
            yield (
                f"codec.against must be 'nothing' for the codec {self.codec.name!r}, which codes no residuals to a "
                "reconstruction: set codec.name to 'uniform' for refinement"
            )
        if self.update_bits is not None:
            yield from self._unsendable()
        elif self.written is not None:
            yield from self._unwritable()
        if self.tokenizer.kind == "huggingface" and not self.model_path:
            yield "tokenizer.path or student.path must name a model when tokenizer.kind is 'huggingface'"
        yield from self._unspeakable()

    def _unspeakable(self) -> Iterator[str]:
        """Yield what does not go together with labels over strings, or with tokenizers of nodes without them."""
        for index, node in enumerate(self.nodes):
            if node.tokenizer is None:
                continue
            key = f"nodes[{index}]"
            if not self.over_strings:
                yield f"labels.over must be 'strings': {key}.tokenizer is not that of all models"
            if node.tokenizer.end_of_text:
                yield f"{key}.tokenizer.end_of_text must be left out: models that differ share the text between tokens"
            if node.tokenizer.kind == "huggingface" and not self.tokenizer_choice(index).path:
                yield f"{key}.tokenizer.path or {key}.student.path must name a model: its kind is 'huggingface'"
            if node.taught:
                yield f"{key}.taught must be left out with a tokenizer of its own: it is for models that share one"
        if not self.over_strings:
            return
        why = "with labels over strings"
        if self.tokenizer.end_of_text:
            yield f"tokenizer.end_of_text must be left out {why}: models that differ share the text between tokens"
        if self.probe.fresh:
            yield f"probe.fresh must be false {why}: their positions are drawn once"
        if self.combine.broadcast != "weights":
            yield f"combine.broadcast must be 'weights' {why}: a node learns from the student that it can run"
        for key in ("written", "send"):
            if getattr(self, key) is not None:
                yield f"{key} must be left out {why}: it is for models that share a tokenizer"
        shared = [name for name in self.baselines.methods if name in SHARED_TOKENS]
        if shared and any(node.tokenizer for node in self.nodes):
            yield f"baselines.methods: {shared[0]!r} needs one tokenizer for all nodes, and nodes have their own"

    def _unwritable(self) -> Iterator[str]:
        """Yield what does not go together with text that nodes write."""
        if not codecs.get(self.codec.name).traits.sparse:
            yield f"codec.name must be 'samples' with [written], got {self.codec.name!r}"
        rule = registry.rules.get(self.combine.rule)
        if not rule.traits.audits and self.combine.rule != "mixture":
            yield f"combine.rule must be 'mixture', 'guarded' or 'fitted' with [written], got {self.combine.rule!r}"
        if self.combine.broadcast == "logits":
            yield "combine.broadcast must be 'weights' with [written]: nodes need the student that they code against"

    def _unsendable(self) -> Iterator[str]:
        """Yield what does not go together with updates of weights."""
        why = "with send.updates"
        if self.combine.broadcast != "weights":
            yield f"combine.broadcast must be 'weights' {why}: nodes need the student that they update"
        if self.combine.rule != "mixture":
            yield f"combine.rule must be 'mixture' {why}, got {self.combine.rule!r}: it is that of the rebuilt models"
        if self.codec.name != "samples" or self.codec.against != "nothing":
            yield f"codec.name and codec.against must be left out {why}: they are for labels"
        if self.budget.estimator != "none":
            yield f"budget.estimator must be 'none' {why}, got {self.budget.estimator!r}: it learns from labels"
        for index, node in enumerate(self.nodes):
            if node.student is not None:
                yield f"nodes[{index}].student must be left out {why}: models must be of one kind to be rebuilt"
            if node.clip is not None:
                yield f"nodes[{index}].clip must be left out {why}: it is for labels"

    @property
    def update_bits(self) -> float | None:
        """Return the bits per weight of the nodes' updates; None where they send labels."""
        return None if self.send is None else self.send.updates

    @property
    def written_contexts(self) -> int:
        """Return how many contexts each node is asked to write, in whole sequences."""
        return 0 if self.update_bits is not None else self.contexts_by_model

    @property
    def contexts_by_model(self) -> int:
        """Return how many contexts each node's model writes, in whole sequences: at the node, or rebuilt."""
        return 0 if self.written is None else -(-self.written.contexts // self.probe.length) * self.probe.length

    @property
    def over_strings(self) -> bool:
        """Return whether labels are about strings that all models can speak of, and not about shared tokens."""
        return self.labels is not None and self.labels.over == "strings"

    @property
    def model_path(self) -> str:
        """Return the path or name of the pretrained model whose tokenizer is used, or nothing."""
        settings = self.student.settings
        return self.tokenizer.path or (settings.path if isinstance(settings, HuggingFaceConfig) else "")

    def tokenizer_choice(self, index: int | None) -> TokenizerSection:
        """Return the tokenizer of a node (None: the shared one), with all that decides about it and nothing else."""
        node = None if index is None or self.nodes[index].tokenizer is None else self.nodes[index]
        chosen = self.tokenizer if node is None or node.tokenizer is None else node.tokenizer
        student = self.student if node is None or node.student is None else node.student
        if chosen.kind == "bpe":
            return TokenizerSection(kind="bpe", vocab=chosen.vocab, end_of_text=chosen.end_of_text)
        if chosen.kind == "bytes":
            return TokenizerSection(kind="bytes", end_of_text=chosen.end_of_text)
        path = chosen.path or (student.settings.path if isinstance(student.settings, HuggingFaceConfig) else None)
        return TokenizerSection(kind="huggingface", path=path)

    @property
    def local_steps(self) -> int:
        """Return the training steps of a node in all rounds."""
        return self.local.steps * self.run.rounds

    @property
    def step_cost(self) -> int:
        """Return how many ordinary steps a local step takes: private ones go through more windows, one by one."""
        if self.privacy is None:
            return 1
        batch = int(getattr(self.student.settings, "batch", 1))
        units = self.privacy.units(batch) or FULL_BATCH_UNITS
        windows = units * (1 if self.privacy.unit == "window" else self.privacy.windows)
        return max(-(-2 * windows // batch), 1)

    @property
    def federation_steps(self) -> int:
        """Return the training steps of all nodes and of the student in all rounds, counted in ordinary steps."""
        return len(self.nodes) * self.local_steps * self.step_cost + self.run.rounds * self.distill.steps

    def to_toml(self) -> str:
        """Return the configuration as TOML, every key with its value; `parse_config` reads it back to an equal one.

        >>> demo, _ = read_config("demo")
        >>> parse_config(demo.to_toml(), "a copy") == demo
        True
        """
        return _dump_toml(self.model_dump())


def parse_config(text: str, source: str) -> Config:
    """Check the text of a configuration; `source` names it in errors."""
    return parse_toml(Config, text, source)


def parse_toml(cls: type[S], text: str, source: str) -> S:
    """Check the text of a TOML file against a section; `source` names it in errors."""
    try:
        return cls.model_validate(_tables(text, source))
    except ValidationError as error:
        lines = [_key(found.place) + part for found in _mistakes(cls, error) for part in found.parts]
        raise InputError("; ".join(f"{source}: {line}" for line in _first(lines))) from None


def _tables(text: str, source: str) -> dict[str, Any]:
    try:
        return parse_toml_tables(text)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def examine(text: str, source: str) -> tuple[Config | None, list[str]]:
    """Return every problem of a configuration, and the configuration without the wrong keys, if that is one."""
    try:
        tables = _tables(text, source)
    except InputError as error:
        return None, [str(error)]
    problems: list[str] = []
    changed: list[Place] = []
    while True:
        try:
            return Config.model_validate(tables), _first(problems)
        except ValidationError as error:
            found = _mistakes(Config, error)
            # Problems of a table in which a wrong key was changed may be caused by that: they are not reported.
            new = [mistake for mistake in found if not any(_above(mistake.place, place) for place in changed)]
            lines = [_key(mistake.place) + part for mistake in new for part in mistake.parts]
            problems += [line for line in lines if line not in problems]  # what cannot be mended is found again
            places = [place for mistake in found for place in _mend(tables, mistake)]
            if not places:
                return None, _first(problems)
            changed += places


class _Mistake(NamedTuple):
    """A wrong place, the sentences about it, and the key that was meant, if its key is unknown and near to one."""

    place: Place
    parts: list[str]
    meant: str | None = None


def _mistakes(cls: type[Section], error: ValidationError) -> list[_Mistake]:
    """Return the mistakes of a file; a key that is missing because it is misspelt is one mistake."""
    found = []
    misspelt = set()
    for number, item in enumerate(error.errors()):
        place = item["loc"]
        meant = None
        message = _message(item)
        if item["type"] == "extra_forbidden" and number < MAX_PROBLEMS:
            meant = closest_name(str(place[-1]), _keys(cls, place[:-1]))
            message = "unknown key" if meant is None else f"unknown key: did you mean {meant}?"
        if meant is not None:
            misspelt.add((*place[:-1], meant))
        # The contradictions between tables are one error of the whole.
        found.append(_Mistake(place, [message] if place else message.split("; "), meant))
    return [mistake for mistake in found if not (mistake.place in misspelt and mistake.parts == [MISSING])]


def _keys(cls: type[Section], place: Place) -> list[str]:
    """Return the keys that a table of a file can have."""
    for part in place:
        if isinstance(part, str):
            inner = _section(cls.model_fields[part].annotation) if part in cls.model_fields else None
            if inner is None:
                return []
            cls = inner
    return list(cls.model_fields)


def _section(annotation: Any) -> type[Section] | None:
    """Find the section in the type of a key, such as `list[NodeSection]` or `TrainSection | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner)) is not None), None)


def _above(place: Place, other: Place) -> bool:
    return place == other[: len(place)]


def _mend(tables: Any, mistake: _Mistake) -> list[Place]:
    """Rename a misspelt key of nested tables, or take a wrong one out; return the places that were changed."""
    *above, key = mistake.place or ("",)
    for part in above:
        try:
            tables = tables[part]
        except (KeyError, IndexError, TypeError):
            return []
    if not isinstance(tables, dict) or key not in tables:
        return []
    value = tables.pop(key)
    if mistake.meant is None or mistake.meant in tables:
        return [mistake.place]
    tables[mistake.meant] = value
    return [mistake.place, (*above, mistake.meant)]


def _first(problems: list[str]) -> list[str]:
    """Return the problems, of very many only the first and how many there are."""
    more = len(problems) - MAX_PROBLEMS
    return problems if more <= 0 else [*problems[:MAX_PROBLEMS], f"and {show_count(more, 'more problem')}"]


def read_config(
    source: str | Path | Config, *, seed: int | None = None, overrides: Mapping[str, Any] | None = None
) -> tuple[Config, str]:
    """Read a configuration file, a preset by its name, or a configuration itself; return it and its text.

    `overrides` are as in `override_keys`. `seed` replaces run.seed. The first line of the text then says so, and counts
    when a run's config.toml is read.
    """
    if isinstance(source, Config):
        text = source.to_toml()
        name = "the configuration"
    else:
        text, name = read_config_text(source)
    recorded = _SEED_LINE.match(text)
    if recorded is not None:
        text = text[recorded.end() :]
        if seed is None and "run.seed" not in (overrides or {}):
            seed = int(recorded[1])
    if overrides:
        text = absolute_paths(override_keys(text, overrides, name), Path.cwd())
    config = parse_config(text, name)
    if seed is None:
        return config, text
    changed = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    return changed, f"# --seed {seed}\n{text}"


def override_keys(text: str, overrides: Mapping[str, Any], source: str) -> str:
    r"""Return the text of a configuration with other values of some keys; `parse_config` checks the values.

    Parameters
    ----------
    text, source
        The configuration, and its name in errors.
    overrides
        Values by dotted key, such as `local.steps` or `nodes[0].bits`. A value may be a table; None removes the key.

    Raises
    ------
    InputError
        Naming the key, if it leads through something that is no table, or beyond the end of a list, or if its value is
        none of TOML's.

    >>> override_keys("[local]\nsteps = 9\n", {"local.steps": 300}, "mine.toml")
    '[local]\nsteps = 300\n'
    """
    tables = _tables(text, source)
    for key, value in overrides.items():
        parts = [int(part) if part.isdigit() else part for part in re.split(r"\]?\.|\[|\]$", key) if part]
        table: Any = tables
        try:
            for part, following in pairwise(parts):
                if isinstance(part, str) and isinstance(following, str):
                    table = table.setdefault(part, {})
                else:
                    table = table[part]
            if value is not None:
                table[parts[-1]] = _plain(value)
            elif isinstance(parts[-1], int) or parts[-1] in table:
                del table[parts[-1]]
        except (AttributeError, IndexError, KeyError, TypeError):
            raise InputError(f"{source}: overrides: there is no key {key}") from None
        try:
            text = _dump_toml(tables)
        except (TypeError, ValueError):
            raise InputError(f"{source}: overrides: {key} must be a value of TOML, got {printable(value)}") from None
    return text


def _plain(value: Any) -> Any:
    """Return a path as text and a number of NumPy as one of Python."""
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _dump_toml(tables: dict[str, Any]) -> str:
    """Return tables as TOML, without the keys that are None: TOML has no word for it."""
    import tomlkit

    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return [without_none(item) for item in value] if isinstance(value, list | tuple) else value

    return tomlkit.dumps(without_none(tables))


def read_config_text(path: str | Path) -> tuple[str, str]:
    """Return the text of a configuration file or a preset, and its name for errors.

    Relative paths in a file are written out: they start at its folder. In a run's own `config.toml` they are of an
    earlier version, and start at the working directory.
    """
    name = str(path)
    if name in presets():
        return read_utf8(_preset_folder() / f"{name}.toml"), f"preset {name}"
    if not Path(path).exists():
        listed = f"give a TOML file, or one of the presets {', '.join(presets())}"
        raise InputError(f"{path} does not exist: {listed}{did_you_mean(name, presets())}")
    file = Path(path)
    of_run = file.name == CONFIG and (file.parent / VERSIONS).is_file()
    return absolute_paths(read_utf8(file), Path.cwd() if of_run else file.absolute().parent), name


def presets() -> list[str]:
    """List the presets that come with the package."""
    return sorted(file.stem for file in _preset_folder().glob("*.toml"))


def _preset_folder() -> Path:
    """Find the presets: inside an installed package, or in `experiments/` of a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "experiments"


def _key(place: Place) -> str:
    return f"{show_place(place)}: " if place else ""


def _message(item: Any) -> str:
    message = printable(item["msg"].removeprefix("Value error, "), _MAX_MESSAGE)
    if item["type"] == "extra_forbidden":
        return "unknown key"
    if item["type"] == "missing":
        return MISSING
    value = item.get("input")
    if item["type"] == "literal_error" and isinstance(value, str):
        closest = did_you_mean(value, re.findall(r"'([^']*)'", item["ctx"]["expected"]))
        return f"{message}, got {shown(value)}{closest}"
    return message if isinstance(value, dict | list) or "got" in message else f"{message}, got {shown(value)}"


class Finding(NamedTuple):
    """The result of a check of a key: a problem, or (`wrong` false) something to know."""

    key: str
    says: str
    wrong: bool = True
