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
from fpld.students.configs import Compute, Device, Precision, StudentChoice, parse_student
from fpld.units import parse_rate
from fpld.validation import MAX_BATCH, shown


def check_update_bits(bits: float) -> float:
    """Return bits per weight that an update can have: from 1 to 8, or 32 for float32."""
    if not (1 <= bits <= 8 or bits == 32):
        raise ValueError(f"must be from 1 to 8, or 32 for float32, got {bits:g}")
    return bits


def check_at_once(count: object) -> object:
    """Return how many windows are computed at a time: a number, or "auto"."""
    if count == "auto" or (type(count) is int and 1 <= count <= MAX_BATCH):
        return count
    raise ValueError(f"must be a whole number from 1 to {MAX_BATCH}, or 'auto', got {shown(count)}")


MAX_WORKERS = 1024
"""Worker processes of a run at most: each takes some hundred megabytes."""
MAX_PROCESSES = 64
"""Processes of a training at most: each has the model."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH)]
AtOnce = Annotated[int | Literal["auto"], PlainValidator(check_at_once)]
Processes = Annotated[int, Field(ge=1, le=MAX_PROCESSES)]
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
Tracker = Annotated[str, AfterValidator(registry.trackers.check)]
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
    """Folder of the run, from the working directory; `--out` replaces it."""
    quorum: Count | None = None
    """How many nodes must answer for a round to count (none: all that are asked)."""
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Which part of the nodes is asked in a round, drawn again by the seed for each round (none: all of them)."""
    deadline: Positive | None = None
    """Seconds after which a round closes with those that answered. A late node is in the next round again."""
    continuations: Annotated[int, Field(ge=0, le=20)] = 3
    """How many short texts the student of each round writes, for people to read. No result depends on them."""
    track: list[Tracker] = []
    """Experiment trackers that get the numbers of each round: `tensorboard`, `mlflow`, `wandb`. They write into the
    run's folder, and connect to nothing unless their own variables say so. No result depends on them."""

    def asked(self, nodes: int) -> int:
        """Return how many of so many nodes a round asks."""
        return nodes if self.fraction is None else max(round(self.fraction * nodes), 1)

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The identity of a run comes from its configuration: that of a run without this key is as in earlier versions.
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if value is not None or name != "fraction"}


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
    """Share of the bytes of each node's text that is kept for evaluation, by whole groups of documents; it comes out
    larger by a part of a group. A document that would bring it far beyond is split at a paragraph."""
    heldout_tokens: Count = 8192
    """How many tokens of the held-out text are used."""
    limit: Count | None = None
    """Most bytes of text that a node uses, held-out text and all (none: all of its text). With a limit, documents are
    drawn at random by the seed, and the last one is cut. A node's own `limit` counts if it is smaller."""


class ProbeSection(Section):
    """[probe]: the public text, and which contexts of it the nodes are asked about."""

    source: str
    """The public text: a label of the corpus, or a path. Where there is a corpus, a path of one word is `./word`."""
    contexts: Count = 16384
    """How many probe contexts: each position of a sequence is one."""
    length: Count = 32
    """Tokens of a sequence."""
    limit: Count | None = None
    """Most bytes of public text that are used (none: all). With a limit, documents are drawn at random by the seed, and
    the last one is cut."""
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
    """A sequence is written again if it has a run of this many tokens that stands in the node's private text and not in
    the probe set. 0: nodes write nothing. A node's own setting counts if it is stricter."""


class SendSection(Section):
    """[send]: what nodes send in the place of labels."""

    updates: Annotated[float, Field(ge=1, le=8)] | None = None
    """Bits per weight, from 1 to 8, of updates of the nodes' weights (none: nodes send labels). A node with a lower
    limit sends fewer. The aggregator rebuilds the nodes' models, and these write the contexts of [written]."""


class LabelsSection(Section):
    """[labels]: what the nodes' labels are about. Models with different tokenizers need `strings`."""

    over: Literal["tokens", "strings"] = "tokens"
    """`tokens`: the next token of one tokenizer that all models share. `strings`: what comes next in the text, as one
    of the symbols of an alphabet, asked where every tokenizer has a boundary: [probe] `length` and `contexts` then
    count such positions."""
    symbols: Annotated[int, Field(ge=257, le=65536)] = 2048
    """How many symbols the alphabet has at most: the most frequent words and beginnings of words of the public text,
    and all single bytes."""
    symbol_bytes: Annotated[int, Field(ge=1, le=64)] = 12
    """How many bytes a symbol has at most."""


class TokenizerSection(Section):
    """[tokenizer]: what turns text into tokens. All models share it, but for nodes with a `tokenizer` of their own."""

    kind: Literal["bytes", "bpe", "huggingface"] = "bpe"
    """Bytes as tokens, a byte-pair encoding that is trained on the public text, or the tokenizer of a pretrained
    model."""
    path: str | None = None
    """The pretrained model whose tokenizer is used (none: that of the student)."""
    vocab: Annotated[int, Field(ge=257, le=65536)] = 1024
    """Size of the byte-pair encoding."""
    end_of_text: bool = False
    """A token after each document, in place of an empty line: generated texts end with it, and exported models name it.
    For bytes and byte-pair encodings; a pretrained tokenizer has its own."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.end_of_text and self.kind == "huggingface":
            raise ValueError("end_of_text is for kind = 'bytes' and 'bpe': a pretrained tokenizer has its own")
        return self

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # As in [baselines]: a key that earlier versions did not have is left out where it is not given.
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if name != "end_of_text" or value}


NODE_ALIASES = {"from_base": "taught", "steps_factor": "effort"}
"""Keys of [[nodes]] by their newer names, and what they stand for."""


class NodeSection(Section):
    """[[nodes]]: a node, and the most that it may send."""

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
    tokenizer: TokenizerSection | None = None
    """The tokenizer of its model, as in [tokenizer] (none: the shared one); for [labels] `over` = "strings"."""
    taught: bool = False
    """Its model begins by learning from the aggregator's base model on public text, not from the text alone. Also
    called `from_base`."""
    effort: Positive = 1.0
    """Steps of its model, as a multiple of those of [base] and [local]: small models take many. Also called
    `steps_factor`."""

    @model_validator(mode="before")
    @classmethod
    def _by_their_old_names(cls, values: Any) -> Any:
        """Read keys by their newer names too; what is kept and compared has the old ones."""
        if not isinstance(values, dict):
            return values
        named = dict(values)
        for new, old in NODE_ALIASES.items():
            if new in named and old in named:
                raise ValueError(f"{new} and {old} are the same key: give one of them")
            if new in named:
                named[old] = named.pop(new)
        return named

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if sum(limit is not None for limit in (self.bits, self.context_bits, self.uplink)) != 1:
            raise ValueError("needs one of bits, context_bits and uplink")
        if not self.differs and (self.taught or self.effort != 1):
            raise ValueError("from_base and steps_factor are for a node with a student of its own")
        return self

    @property
    def differs(self) -> bool:
        """Return whether its model is of another kind than the aggregator's student, or has another tokenizer."""
        return self.student is not None or self.tokenizer is not None

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # As in [baselines]: a key that earlier versions did not have is left out where it is not given.
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if value is not None or name != "tokenizer"}


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
    """Bits of each of the student's weights. With 16, nodes and aggregator continue from rounded ones, and the downlink
    takes half the bytes."""


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
    batch: BatchSize | None = None
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
    """[privacy]: what nodes guarantee about each unit of their text, over all rounds (`fpld.privacy`)."""

    epsilon: Positive
    """The guarantee, over all rounds together. Smaller is stronger."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The probability with which the guarantee may fail."""
    unit: Literal["window", "document"] = "document"
    """What the guarantee is about: a window of tokens, or a document with those of its group."""
    trained: Literal["all", "subspace"] = "all"
    """What is trained: all weights, or the `numbers` in which public text moves the model most
    (`fpld.students.subspace`). `local.rate` is then a share of the step of Newton's method, 0.1 if none is set."""
    numbers: Count = 32768
    """For `subspace`: how many numbers are trained."""
    clip: Positive = 1.0
    """The largest norm of a unit's gradient."""
    batch: BatchSize | Literal["full"] | None = None
    """How many units take part in a step on average (none: the student's batch); with `full` all do."""
    windows: Count = 8
    """How many windows of a unit take part in a step at most."""
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Over which share of a round's last steps a node's weights are averaged."""

    def units(self, batch: int) -> int | None:
        """Return how many units take part in a step, of a student with this batch; None stands for all."""
        return None if self.batch == "full" else self.batch or batch


PatchName = Literal["installed_app", "connection", "polling", "prefork", "retry", "long_poll", "receive", "runner"]
"""A change of Flower that can be left out (`fpld.engines.flower.patches`)."""
Patches = Literal["auto", "none"] | list[PatchName]


class EngineSection(Section):
    """[engine]: what moves the bytes."""

    kind: Literal["local"] = "local"
    """What moves the bytes. Across machines the command is `fpld aggregator`."""
    workers: Annotated[int, Field(ge=0, le=MAX_WORKERS)] = 2
    """How many node processes work side by side, at most 1024 (0: all in one process)."""
    patches: Patches = "auto"
    """What `fpld aggregator` changes of Flower: all that fits its version (`auto`), nothing (`none`), or a list."""
    device: Device = "auto"
    """Where models are computed that have no `device` in their own table: `cuda`, `mps`, `cpu`, or the first of these
    that is there (`auto`). It holds for this machine; a node of a deployment has its own `device` in `node.toml`."""
    threads: Count = 1
    """Threads of PyTorch in each process. The last bits of a result depend on their number."""
    dtype: Precision = "auto"
    """Precision of the steps of training, over weights in float32: `float32`, `bfloat16`, `float16`, or `bfloat16` on a
    GPU that has it and else `float32` (`auto`). What is predicted for the wire is in float32 always."""
    at_once: AtOnce | None = None
    """How many windows of a minibatch are computed at a time, with the sum of their gradients (none: the student's
    `micro`, or all). `auto`: as many as fit into memory, found by trying before each training."""
    memory: Count | None = None
    """Bytes that a run may take (none: what is there). `fpld check` refuses a run that needs more, and of a GPU no
    process takes more."""

    processes: Processes = 1
    """Processes of each training and distillation, at most 64: each computes a share of every minibatch, on a GPU of
    its own where there are some. Private training has one."""
    shard: bool = False
    """With several processes: each holds only a share of a pretrained model's weights, of one that does not fit on a
    GPU. Predictions are then computed on the CPU."""

    @property
    def compute(self) -> Compute:
        """Return what this machine computes with."""
        return Compute(self.device, self.threads, self.dtype, self.at_once, self.memory, self.processes, self.shard)

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # As in [baselines]: keys that earlier versions did not have are left out where they have their defaults.
        values: dict[str, Any] = serialize(self)
        later = {"device": "auto", "threads": 1, "patches": "auto", "dtype": "auto", "at_once": None, "memory": None}
        later |= {"processes": 1, "shard": False}
        return {name: value for name, value in values.items() if name not in later or value != later[name]}


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
