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
    """[run]: rounds, seed, the folder; how many nodes must answer for a round to count (all), and within which time.

    `continuations` is how many short texts the student of each round writes, for people to read.
    """

    rounds: Count = 3
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    out: str = "runs/run"
    quorum: Count | None = None
    deadline: Positive | None = None
    continuations: Annotated[int, Field(ge=0, le=20)] = 3


class BaselinesSection(Section):
    """[baselines]: what to compare with; `rate` is that of training alone and pooled, in one long schedule.

    `rounds` are the numbers of rounds that FedAvg splits the nodes' local steps into, each a row of the table (without
    it: those of the run); `fedavg_rate` is the learning rate of its nodes (without it: that of [local]).
    """

    methods: list[Baseline] = ["alone", "pooled", "fedavg", "float32"]
    rate: Positive | None = None
    rounds: Annotated[list[Count], Field(min_length=1)] | None = None
    fedavg_rate: Positive | None = None


class DataSection(Section):
    """[data]: where the private text comes from, and how it is dealt to the nodes.

    `corpus` is a named corpus or `path` a file or folder; a node may also name its own `data`. Documents are dealt
    by label (folder, era, specialty), or `iid`, or `dirichlet` with `alpha`. A share `heldout` of each node's documents
    is kept for evaluation, by whole groups; of a node's text at most `limit` bytes are used.
    """

    corpus: Corpus | None = None
    path: str | None = None
    field: str = "text"
    split: Literal["label", "iid", "dirichlet"] = "label"
    alpha: Positive = 1.0
    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.15
    heldout_tokens: Count = 8192
    limit: Count = 4_000_000


class ProbeSection(Section):
    """[probe]: the public text, as a label of the corpus or a path; how many contexts, in sequences of which length.

    `fresh` draws other contexts in every round. `margin` is how far, in nats, the floats of two machines may differ
    where both round the student's prediction (`fpld.protocol.priors`).
    """

    source: str
    contexts: Count = 16384
    length: Count = 32
    limit: Count = 4_000_000
    fresh: bool = False
    margin: Annotated[float, Field(gt=0, lt=0.01)] = 2e-5


class TokenizerSection(Section):
    """[tokenizer]: bytes, a BPE trained on the public text, or that of the model at `path` (default: student.path)."""

    kind: Literal["bytes", "bpe", "huggingface"] = "bpe"
    path: str | None = None
    vocab: Annotated[int, Field(ge=257, le=65536)] = 1024


class NodeSection(Section):
    """[[nodes]]: a site.

    The most it may send a round is one of `bits` per coordinate, `context_bits` per probe context, or what its `uplink`
    carries within [budget] deadline.
    """

    name: Name
    label: str | None = None
    data: str | None = None
    field: str | None = None
    bits: Positive | None = None
    context_bits: Positive | None = None
    uplink: Rate | None = None
    clip: Positive | None = None
    weight: Positive | None = None
    student: Student | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if sum(limit is not None for limit in (self.bits, self.context_bits, self.uplink)) != 1:
            raise ValueError("needs one of bits, context_bits and uplink")
        return self


class BudgetSection(Section):
    """[budget]: bits for all nodes together, and how they are shared out.

    They are per coordinate (`total`) or per probe context (`context_total`); without either all nodes send at their
    limits.

    Without an `allocator` it is `square-root` for sampled labels, `optimal` for all others, or the estimator's own.
    """

    total: Positive | None = None
    context_total: Positive | None = None
    allocator: Allocator | None = None
    estimator: Estimator = "none"
    warmup: Count = 1
    forget: Annotated[float, Field(gt=0, le=1)] = 1.0
    deadline: Positive = 60.0

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
    """[codec]: its name; `against` own codes the residual to the node's last reconstruction (refinement).

    `dither` is drawn by each node for itself, or stratified over all nodes, so that errors of nodes that agree cancel.
    """

    name: Codec = "samples"
    against: Literal["nothing", "own"] = "nothing"
    dither: Literal["stratified", "independent"] = "stratified"


class CombineSection(Section):
    """[combine]: the rule; `broadcast` sends the student's weights, or the combined logits.

    A node whose own model is another runs the student beside it and distils its own model from the student's
    predictions; where nodes cannot run the student, combined logits are sent, V numbers for each context.

    `trim` is how many of the largest and of the smallest values the rule `trimmed` leaves out (1).

    `weight_bits` are those of each of the student's weights. With 16 the aggregator rounds them after every round, and
    all ends go on from the rounded ones: about half as many bytes go to the nodes.
    """

    rule: Rule = "mixture"
    trim: Count | None = None
    broadcast: Literal["weights", "logits"] = "weights"
    weight_bits: Literal[16, 32] = 32


class TrainSection(Section):
    """[local], [distill]: steps, and the learning rate of the first and of the last round; [base]: before the first."""

    steps: Count
    rate: Positive | None = None
    last_rate: Positive | None = None
    public_weight: Annotated[float, Field(ge=0)] = 0.0
    batch: Count | None = None
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def rate_in(self, round: int, rounds: int) -> float | None:
        """Return the learning rate of a round: from `rate` to `last_rate` in equal steps."""
        if self.rate is None or self.last_rate is None or rounds == 1:
            return self.rate
        return self.rate + (self.last_rate - self.rate) * (round - 1) / (rounds - 1)


class PrivacySection(Section):
    """[privacy]: what nodes promise about each unit of their text, over all rounds (`fpld.privacy`).

    A `unit` is a window of tokens, or a document with those of its group. In a step `batch` units take part on average
    (without it: the student's batch), each with at most `windows` of its windows, and the norm of its gradient is
    clipped to `clip`.
    """

    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    unit: Literal["window", "document"] = "document"
    clip: Positive = 1.0
    batch: Count | None = None
    windows: Count = 8


class EngineSection(Section):
    """[engine]: what moves the bytes, and how many node processes work at a time."""

    kind: Literal["local"] = "local"
    workers: Annotated[int, Field(ge=0)] = 2


class FlowerSection(Section):
    """[flower]: where the aggregator listens, the folders of its certificates and of the nodes' public keys.

    `wait` is how many seconds a round waits for nodes to connect before it begins without them, if the quorum is there.
    """

    address: Annotated[str, Field(pattern=r"^[A-Za-z0-9.\-]+:[0-9]{1,5}$")] = "127.0.0.1:8000"
    certs: str = "certs"
    keys: str = "keys"
    wait: Positive = 600.0


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
