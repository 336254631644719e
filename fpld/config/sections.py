"""The tables of a configuration, each checked by itself. The string below a key is its documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from fpld import registry
from fpld.budget.policy import check_choice
from fpld.students.configs import StudentChoice, parse_student
from fpld.units import parse_rate


def check_update_bits(bits: float) -> float:
    """Return bits per weight that an update can have: from 1 to 8, or 32 for float32."""
    if not (1 <= bits <= 8 or bits == 32):
        raise ValueError(f"must be from 1 to 8, or 32 for float32, got {bits:g}")
    return bits


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[Positive, BeforeValidator(parse_rate)]
UpdateBits = Annotated[float, AfterValidator(check_update_bits)]
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
    """What to compare with. `alone`: each node by itself. `pooled`: all text in one place, with the steps of one node;
    `pooled-all`: with those of all nodes together. `fedavg`: the mean of the nodes' weights in float32. `fedavg-1bit`:
    the same with one bit per weight (rotated signs, as in DRIVE). `feddf`: the student is distilled to the mixture of
    the nodes' models, sent in float32, on all public text. `feddf-kbit`: the same with updates of `update_bits`.
    `feddf-written`: as that, but on text that the rebuilt models write. `updates`: this federation with [send] updates
    of `update_bits` from every node. `flora`: adapters stacked, their exact mean. `float32`: logits that are not
    quantized. `ensemble`: the mixture of the nodes' models, a limit that cannot be sent."""
    rate: Positive | None = None
    """Learning rate of `alone`, `pooled` and `pooled-all`, which train in one long schedule."""
    rounds: Annotated[list[Count], Field(min_length=1)] | None = None
    """Into how many rounds FedAvg splits the nodes' local steps: a row of the table for each (none: the rounds of
    the run)."""
    fedavg_rate: Positive | None = None
    """Learning rate of FedAvg's nodes (none: that of [local])."""
    feddf_steps: Annotated[list[Count], Field(min_length=1)] | None = None
    """Distillation steps of FedDF: a row of the table for each (none: those of [distill])."""
    update_bits: Annotated[list[UpdateBits], Field(min_length=1)] | None = None
    """Bits per weight of the updates of `feddf-kbit`, `feddf-written` and `updates`, from 1 to 8, or 32 for float32: a
    row for each (none: 3)."""

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The identity of a run comes from its configuration. So that runs of earlier versions can be resumed, keys
        # that these did not have are left out where they are not given.
        values: dict[str, Any] = serialize(self)
        later = ("feddf_steps", "update_bits")
        return {name: value for name, value in values.items() if value is not None or name not in later}


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


class WrittenSection(Section):
    """[written]: text that each node's own model writes and that this node alone labels, besides public text."""

    contexts: Count
    """How many contexts each node writes: each position of a sequence is one. A node's bits are for these and for the
    public ones."""
    temperature: Positive = 1.0
    """Divides the logits that tokens are drawn by."""
    private_run: Annotated[int, Field(ge=0)] = 8
    """A sequence is written anew if it has a run of this many tokens that stands in the node's private text and not in
    the probe set. 0: nodes write nothing. A site's own setting counts if it is stricter."""


class SendSection(Section):
    """[send]: what nodes send in the place of labels."""

    updates: Annotated[float, Field(ge=1, le=8)] | None = None
    """Bits per weight, from 1 to 8, of updates of the nodes' weights (none: nodes send labels). A node with a lower
    limit sends fewer. The aggregator rebuilds the nodes' models, and these write the contexts of [written]."""


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
    taught: bool = False
    """Its model begins by learning from the aggregator's base model on public text, not from the text alone."""
    effort: Positive = 1.0
    """Steps of its model, as a multiple of those of [base] and [local]: small models take many."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if sum(limit is not None for limit in (self.bits, self.context_bits, self.uplink)) != 1:
            raise ValueError("needs one of bits, context_bits and uplink")
        if self.student is None and (self.taught or self.effort != 1):
            raise ValueError("taught and effort are for a node with a student of its own")
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

    def scaled(self, factor: float) -> Self:
        """Return the same section with `factor` times the steps."""
        return self if factor == 1 else self.model_copy(update={"steps": max(round(self.steps * factor), 1)})

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
