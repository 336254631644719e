"""The configuration of a run: one TOML file, checked at the border, every error naming the key.

`load` reads a file, `preset` one of the presets that come with the package. `Config` is what the rest trusts.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from fpld import registry
from fpld._check import printable
from fpld.budget.policy import check_choice
from fpld.errors import InputError
from fpld.registry import codecs
from fpld.storage.files import read_utf8
from fpld.students.choice import StudentChoice
from fpld.students.choice import parse as parse_student
from fpld.students.configs import HuggingFaceConfig
from fpld.units import parse_rate

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEED = re.compile(r"# --seed (\d{1,19})\n")
AVERAGING = ("fedavg", "fedavg-1bit", "flora")  # baselines that average weights

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[Positive, BeforeValidator(parse_rate)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$")]
# Names of extension points: those of the package, of installed packages, and what a script has registered.
Codec = Annotated[str, AfterValidator(registry.codecs.check)]
Rule = Annotated[str, AfterValidator(registry.rules.check)]
Allocator = Annotated[str, AfterValidator(registry.allocators.check)]
Estimator = Annotated[str, AfterValidator(registry.estimators.check)]
Corpus = Annotated[str, AfterValidator(registry.corpora.check)]
Baseline = Annotated[str, AfterValidator(registry.baselines.check)]
Student = Annotated[StudentChoice, PlainValidator(parse_student), PlainSerializer(StudentChoice.table)]


class Section(BaseModel):
    """A table of the file: unknown keys are refused, nothing is converted in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


S = TypeVar("S", bound=Section)


class RunSection(Section):
    """[run]: the run as a whole."""

    rounds: Count = 3
    """How many rounds the federation has."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of every draw that is not secret: held-out documents, probe set, first weights, minibatches, dither."""
    out: str = "runs/run"
    """Folder of the run; `--out` replaces it."""
    quorum: Count | None = None
    """How many nodes must answer for a round to count (none: all)."""
    deadline: Positive | None = None
    """Seconds after which a round closes with those that answered. A late node is in the next round again."""
    continuations: Annotated[int, Field(ge=0, le=20)] = 3
    """How many short texts the student of each round writes, for people to read. No result depends on them."""


class BaselinesSection(Section):
    """[baselines]: what a local run compares the student with."""

    methods: list[Baseline] = ["alone", "pooled", "fedavg", "float32"]
    """What to compare with. `alone`: each node by itself. `pooled`: all text in one place. `fedavg`: the mean of the
    nodes' weights in float32. `fedavg-1bit`: the same with one bit per weight (rotated signs, as in DRIVE). `flora`:
    adapters stacked, their exact mean. `float32`: logits that are not quantized. `ensemble`: the mixture of the
    nodes' models, a limit that cannot be sent."""
    rate: Positive | None = None
    """Learning rate of `alone` and `pooled`, which train in one long schedule."""
    rounds: Annotated[list[Count], Field(min_length=1)] | None = None
    """Into how many rounds FedAvg splits the nodes' local steps: a row of the table for each (none: the rounds of
    the run)."""
    fedavg_rate: Positive | None = None
    """Learning rate of FedAvg's nodes (none: that of [local])."""


class DataSection(Section):
    """[data]: where the private text comes from, and how it is dealt to the nodes."""

    corpus: Corpus | None = None
    """A named corpus: `fpld data list` shows them."""
    path: str | None = None
    """A file or folder of texts; `.txt`, `.md`, `.rst`, `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet` or `.arrow`,
    also packed as `.gz` or `.zst`."""
    field: str = "text"
    """Which field of a record holds the text."""
    split: Literal["label", "iid", "dirichlet"] = "label"
    """How documents are dealt to the nodes: by `label` (a folder, an era, a specialty is a node), at random (`iid`),
    or in unequal shares (`dirichlet`)."""
    alpha: Positive = 1.0
    """How equal the shares of `dirichlet` are: the smaller, the more the nodes differ."""
    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of each node's documents that is kept for evaluation, by whole groups."""
    heldout_tokens: Count = 8192
    """How many tokens of the held-out text are used."""
    limit: Count = 4_000_000
    """Most bytes of text that a node uses."""


class ProbeSection(Section):
    """[probe]: the public text, and which contexts of it the nodes are asked about."""

    source: str
    """The public text: a label of the corpus, or a path."""
    contexts: Count = 16384
    """How many probe contexts: each position of a sequence is one."""
    length: Count = 32
    """Tokens of a sequence."""
    limit: Count = 4_000_000
    """Most bytes of public text that are used."""
    fresh: bool = False
    """Draw other contexts in every round. Both ends draw them from the seed and the public text."""
    margin: Annotated[float, Field(gt=0, lt=0.01)] = 2e-5
    """How far, in nats, the floats of two machines may differ where both round the student's prediction."""


class TokenizerSection(Section):
    """[tokenizer]: what turns text into tokens. All models of a federation share it."""

    kind: Literal["bytes", "bpe", "huggingface"] = "bpe"
    """Bytes as tokens, a byte-pair encoding that is trained on the public text, or the tokenizer of a pretrained
    model."""
    path: str | None = None
    """The pretrained model whose tokenizer is used (none: that of the student)."""
    vocab: Annotated[int, Field(ge=257, le=65536)] = 1024
    """Size of the byte-pair encoding."""


class NodeSection(Section):
    """[[nodes]]: a site, and the most that it may send."""

    name: Name
    """The node's name."""
    label: str | None = None
    """Its label in the corpus (none: its name)."""
    data: str | None = None
    """Texts of its own: a file or a folder."""
    field: str | None = None
    """Which field of its records holds the text (none: that of [data])."""
    bits: Positive | None = None
    """The most that it may send in a round, in bits per coordinate. Give one of `bits`, `context_bits` and `uplink`."""
    context_bits: Positive | None = None
    """The same in bits per probe context."""
    uplink: Rate | None = None
    """The same as a link: what it carries within [budget] `deadline`, header and checksum included."""
    clip: Positive | None = None
    """One clip level for all contexts, as in the paper (none: each context states its range)."""
    weight: Positive | None = None
    """The allocator's weight of this node."""
    student: Student | None = None
    """A model of its own kind or size."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if sum(limit is not None for limit in (self.bits, self.context_bits, self.uplink)) != 1:
            raise ValueError("needs one of bits, context_bits and uplink")
        return self


class BudgetSection(Section):
    """[budget]: bits for all nodes together, and how they are shared out."""

    total: Positive | None = None
    """Bits per coordinate for all nodes together (none: each sends at its limit)."""
    context_total: Positive | None = None
    """The same in bits per probe context. Give at most one of the two."""
    allocator: Allocator | None = None
    """How the total is shared out. None: `square-root` for sampled labels, else `optimal`, or the estimator's own
    way."""
    estimator: Estimator = "none"
    """Where the weights come from: `none` (as given), `second-moment` (Algorithm 2), `distortion` (what the codec
    reports) or `curves` (measured loss curves, for the predictive codec; takes no allocator)."""
    warmup: Count = 1
    """How many rounds an estimator begins with in equal shares."""
    forget: Annotated[float, Field(gt=0, le=1)] = 1.0
    """By which factor the memory of `second-moment` fades in each round (1: it does not)."""
    deadline: Positive = 60.0
    """Seconds that an `uplink` has for a round."""

    def bits(self, vocab: int) -> float | None:
        """Return the bits per probe context for all nodes together, if they are limited."""
        return self.context_total if self.total is None else self.total * vocab

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.total is not None and self.context_total is not None:
            raise ValueError("total and context_total are the same in two units: leave one out")
        check_choice(self.allocator, self.estimator, self.forget)
        return self


class CodecSection(Section):
    """[codec]: how a node's logits become bytes."""

    name: Codec = "samples"
    """How logits become bytes: see [Codecs](../codecs.md)."""
    against: Literal["nothing", "own"] = "nothing"
    """`own` codes the difference to the node's own last reconstruction: sequential refinement, with `uniform`."""
    dither: Literal["stratified", "independent"] = "stratified"
    """Drawn by each node for itself, or stratified over all nodes, so that errors of nodes that agree cancel."""


class CombineSection(Section):
    """[combine]: how the nodes' labels become a target, and what goes back to the nodes."""

    rule: Rule = "mixture"
    """How the nodes' labels are combined: see [Rules](../rules.md)."""
    trim: Count | None = None
    """How many of the largest and of the smallest values `trimmed` leaves out (none: 1)."""
    broadcast: Literal["weights", "logits"] = "weights"
    """What goes to the nodes: the student's weights, or the combined logits where nodes cannot run the student."""
    weight_bits: Literal[16, 32] = 32
    """Bits of each of the student's weights; with 16 all ends go on from rounded ones, and half the bytes go down."""


class TrainSection(Section):
    """[base], [local], [distill]: steps of training before the first round, at a node, and of the student."""

    steps: Count
    """How many steps."""
    rate: Positive | None = None
    """Learning rate of the first round (none: the student's own)."""
    last_rate: Positive | None = None
    """Learning rate of the last round; it changes in equal steps between the two (none: as `rate`)."""
    public_weight: Annotated[float, Field(ge=0)] = 0.0
    """For [distill]: the weight of public text that is mixed in."""
    batch: Count | None = None
    """For [distill]: the size of a minibatch (none: the student's own)."""
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """For [distill]: over which share of the last steps the student's weights are averaged."""

    def rate_in(self, round: int, rounds: int) -> float | None:
        """Return the learning rate of a round: from `rate` to `last_rate` in equal steps."""
        if self.rate is None or self.last_rate is None or rounds == 1:
            return self.rate
        return self.rate + (self.last_rate - self.rate) * (round - 1) / (rounds - 1)


class PrivacySection(Section):
    """[privacy]: what nodes promise about each unit of their text, over all rounds (`fpld.privacy`)."""

    epsilon: Positive
    """The promise, over all rounds together. Smaller is stronger."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The chance that the promise leaves out."""
    unit: Literal["window", "document"] = "document"
    """What the promise is about: a window of tokens, or a document with those of its group."""
    clip: Positive = 1.0
    """The largest norm of a unit's gradient."""
    batch: Count | None = None
    """How many units take part in a step on average (none: the student's batch)."""
    windows: Count = 8
    """How many windows of a unit take part in a step at most."""


class EngineSection(Section):
    """[engine]: what moves the bytes."""

    kind: Literal["local"] = "local"
    """What moves the bytes. Across machines the command is `fpld aggregator`."""
    workers: Annotated[int, Field(ge=0)] = 2
    """How many node processes work side by side (0: all in one process)."""


MOST_MESSAGE = 2_000_000_000
"""Bytes of a message over a network at most. Flower carries it in pieces of 5 MiB, and both ends hold it whole."""


class FlowerSection(Section):
    """[flower]: where an aggregator on a network listens, and which nodes it admits."""

    address: Annotated[str, Field(pattern=r"^[A-Za-z0-9.\-]+:[0-9]{1,5}$")] = "127.0.0.1:8000"
    """Where the aggregator listens."""
    certs: str = "certs"
    """Folder of its certificates."""
    keys: str = "keys"
    """Folder of the nodes' public keys."""
    wait: Positive = 600.0
    """Seconds that a round waits for nodes to connect before it begins without them, if the quorum is there."""
    most_message: Count = MOST_MESSAGE
    """The most bytes of a message to a node or from it: a run that needs larger ones is refused before it begins."""


class Config(Section):
    """A whole configuration."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    probe: ProbeSection
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
        found = list(self._contradictions())
        if found:
            raise ValueError("; ".join(found))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yield every way in which sections do not fit each other, each naming the key to change."""
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            yield "nodes: names must differ"
        if self.run.quorum is not None and self.run.quorum > len(names):
            yield f"run.quorum must be at most the number of nodes, {len(names)}, got {self.run.quorum}"
        if self.probe.fresh and self.codec.against == "own":
            yield "probe.fresh must be false when codec.against is 'own': refinement keeps its contexts"
        if self.combine.trim is not None and not hasattr(registry.rules.get(self.combine.rule), "trim"):
            yield f"combine.trim must be left out with the rule {self.combine.rule!r}: it is for 'trimmed'"
        averaging = [name for name in self.baselines.methods if name in AVERAGING]
        if self.combine.broadcast == "logits" and averaging:
            yield f"baselines.methods: {averaging[0]!r} averages weights, and combine.broadcast = 'logits' sends none"
        if any(node.student for node in self.nodes) and averaging:
            yield f"baselines.methods: {averaging[0]!r} averages weights, and nodes have students of their own"
        if "flora" in self.baselines.methods and not getattr(self.student.settings, "lora", 0):
            yield "baselines.methods: 'flora' stacks adapters, and student.lora has none"
        steps, asked = self.local.steps * self.run.rounds, self.baselines.rounds or []
        if any(steps % rounds for rounds in asked):
            yield f"baselines.rounds must divide the nodes' {steps} local steps, got {asked}"
        if self.codec.against == "own" and not codecs.get(self.codec.name).traits.refines:
            yield (
                f"codec.against must be 'nothing' for the codec {self.codec.name!r}, which codes no residuals to a "
                "reconstruction: set codec.name to 'uniform' for refinement"
            )
        if self.tokenizer.kind == "huggingface" and not self.model_path:
            yield "tokenizer.path or student.path must name a model when tokenizer.kind is 'huggingface'"

    @property
    def model_path(self) -> str:
        """Return the path or name of the pretrained model whose tokenizer is used, or nothing."""
        settings = self.student.settings
        return self.tokenizer.path or (settings.path if isinstance(settings, HuggingFaceConfig) else "")


def parse(text: str, source: str) -> Config:
    """Check the text of a configuration; `source` names it in errors."""
    return parse_toml(Config, text, source)


def parse_toml(cls: type[S], text: str, source: str) -> S:
    """Check the text of a TOML file against what it must hold; every error names the key."""
    try:
        return cls.model_validate(_tables(text, source))
    except ValidationError as error:
        raise InputError("; ".join(f"{source}: {line}" for line in _problems(error))) from None


def _tables(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{source}: must be TOML of tables that are not nested so deep") from None
    except ValueError as error:  # of TOML, or of a number with thousands of digits
        raise InputError(f"{source}: must be TOML: {printable(error)}") from None


def examine(text: str, source: str) -> tuple[Config | None, list[str]]:
    """Return every problem of a configuration, and the rest of it without what is wrong, if that makes one."""
    try:
        tables = _tables(text, source)
    except InputError as error:
        return None, [str(error)]
    found: list[str] = []
    removed: list[tuple[int | str, ...]] = []
    while True:
        try:
            return Config.model_validate(tables), found
        except ValidationError as error:
            # What is said of a table only because a key of it was taken out is no problem of the file's.
            new = [item for item in error.errors() if not any(_above(item["loc"], place) for place in removed)]
            found += [_key(item["loc"]) + part for item in new for part in _message(item).split("; ")]
            places = [item["loc"] for item in new if _remove(tables, item["loc"])]
            if not places:
                return None, found
            removed += places


def _above(place: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return place == other[: len(place)]


def _remove(tables: Any, place: tuple[int | str, ...]) -> bool:
    """Take a key out of nested tables; return whether it was there."""
    for part in place[:-1]:
        try:
            tables = tables[part]
        except (KeyError, IndexError, TypeError):
            return False
    return bool(place) and isinstance(tables, dict) and tables.pop(place[-1], None) is not None


def _problems(error: ValidationError) -> list[str]:
    return [f"{_key(item['loc'])}{_message(item)}" for item in error.errors()]


def load(path: str | Path, *, seed: int | None = None) -> tuple[Config, str]:
    """Read a configuration file, or a preset by its name; return it and its text.

    `seed` replaces run.seed. The first line of the text then says so, and counts when a run's config.toml is read.
    """
    text, source = read_text(path)
    config, said = parse(text, source), _SEED.match(text)
    if said is not None:
        seed, text = (int(said[1]) if seed is None else seed), text[said.end() :]
    if seed is None:
        return config, text
    changed = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    return changed, f"# --seed {seed}\n{text}"


def read_text(path: str | Path) -> tuple[str, str]:
    """Return the text of a configuration file or a preset, and what to call it in errors."""
    name = str(path)
    if name in presets():
        return read_utf8(_preset_folder() / f"{name}.toml"), f"preset {name}"
    if not Path(path).exists():
        raise InputError(f"{path} does not exist: give a TOML file, or one of the presets {', '.join(presets())}")
    return read_utf8(Path(path)), name


def presets() -> list[str]:
    """List the presets that come with the package."""
    return sorted(file.stem for file in _preset_folder().glob("*.toml"))


def _preset_folder() -> Path:
    """Find the presets: inside an installed package, or in `experiments/` of a checkout."""
    package = Path(__file__).parent
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "experiments"


def _key(place: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    return f"{text}: " if text else ""


def _message(item: Any) -> str:
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return "unknown key"
    if item["type"] == "missing":
        return "is missing"
    value = item.get("input")
    return message if isinstance(value, dict | list) or "got" in message else f"{message}, got {value!r}"
