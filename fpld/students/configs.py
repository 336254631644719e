"""Configurations of students, and the [student] table that chooses one.

A configuration says all that is needed to make a student. Those of the PyTorch students stand here, so that reading a
file needs no PyTorch. In a configuration from a user's file `vocab` is 0: the tokenizer decides it later.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from fpld.errors import InputError, ParameterError
from fpld.registry import students
from fpld.validation import MAX_BATCH, check_count, check_positive, check_vocab, check_weight, closest_name, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_LENGTH = 1 << 16
NORM_EPSILON = 1e-6
ROTARY_BASE = 10000.0
MIN_PUBLIC_SEQUENCES = 32
"""Of the probe set, for `fpld.students.subspace`: with fewer, directions and squares would be those of chance."""
Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class Compute:
    """What a machine computes with.

    Parameters
    ----------
    device
        Of models that name none.
    threads
        Of a process in PyTorch.
    dtype
        The precision of the steps of training. Weights stay in float32, and so does all that is predicted for the
        wire. "auto" is bfloat16 on a GPU that has it, else float32.
    at_once
        How many sequences of a minibatch are computed at a time; gradients are summed. None: what the student's
        configuration says. "auto": as many as fit into memory, tried before each training.
    memory
        Bytes of a GPU that a process may take (None: all).
    processes
        Processes of a training that is not private, each with a GPU where there are some (`fpld.students.processes`).
    shard
        Each of them holds only a share of a pretrained model's weights; the calling process has the model on the CPU.
    """

    device: Device = "auto"
    threads: int = 1
    dtype: Precision = "auto"
    at_once: int | Literal["auto"] | None = None
    memory: int | None = None
    processes: int = 1
    shard: bool = False

    @property
    def sharded(self) -> bool:
        """Return whether trainings divide the weights among processes."""
        return self.shard and self.processes > 1


@dataclass(frozen=True)
class TransformerConfig:
    """The size of a transformer and how it is trained.

    `length` is the longest context in tokens, and the window of training. `rate` and `distill_rate` are the
    highest learning rates of `finetune` and `distill`: each call warms up over its first tenth, then falls
    linearly to a fiftieth of it.
    """

    vocab: int = 0
    layers: int = 2
    """Layers."""
    width: int = 96
    """Width of a layer, a multiple of 2 x `heads`."""
    heads: int = 4
    """Attention heads."""
    length: int = 32
    """Longest context in tokens, and the window of training."""
    batch: int = 8
    """Windows in a minibatch."""
    rate: float = 4e-3
    """Highest learning rate of training on text."""
    distill_rate: float = 3e-3
    """Highest learning rate of distillation."""
    weight_decay: float = 0.1
    """Weight decay."""
    clip: float = 1.0
    """Largest norm of a gradient."""

    def __post_init__(self) -> None:
        check_vocab(self.vocab)
        for name in ("layers", "width", "heads", "length"):
            check_count(name, getattr(self, name), 1)
        check_count("batch", self.batch, 1, MAX_BATCH)
        if self.length > MAX_LENGTH:
            raise ParameterError("length", f"must be at most {MAX_LENGTH}, got {self.length}")
        if self.width % (2 * self.heads):
            raise ParameterError("width", f"must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}")
        for name in ("rate", "distill_rate", "clip"):
            check_positive(name, getattr(self, name))
        check_weight("weight_decay", self.weight_decay)

    @property
    def hidden(self) -> int:
        """Return M, the hidden units of a perceptron: 8/3 of the width, so that it has 8 C^2 weights."""
        return 8 * -(-self.width // 3)

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        layer = (4 * self.width + 3 * self.hidden + 2) * self.width
        return self.vocab * self.width + self.layers * layer + self.width

    @property
    def llama(self) -> dict[str, Any]:
        """Return the arguments of transformers' LlamaConfig."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.length,
            "rms_norm_eps": NORM_EPSILON,
            "rope_theta": ROTARY_BASE,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True)
class HuggingFaceConfig:
    """Which pretrained model it is, and how it is trained.

    `path` is a model folder (config.json, *.safetensors, tokenizer files), a GGUF file, or a name of `MODELS`.
    `bos` puts the model's first token before every sequence. `lora` is the rank of the adapters, which stand beside all
    linear modules of the last `lora_layers` layers (0: of all layers); `lora` = 0 trains all weights. `dtype` is the
    precision of the pretrained weights, which "bfloat16" halves and "4bit" divides by about seven; adapters are always
    trained in float32. A minibatch of `batch` windows of `length` tokens is done `micro` at a time; `checkpointing`
    computes layers again in the backward pass, which takes less memory and a third more time.

    The last three describe the model in the folder: V, the number of trained parameters, and the SHA-256 of the
    pretrained weights. They are filled in when they are empty. Otherwise, as in a student's file, they are checked,
    since adapters fit only the model that they were made for.
    """

    path: str
    """Folder of a model (`config.json`, `*.safetensors`, `tokenizer.json`), a GGUF file, or a name of `fpld data
    list`."""
    bos: bool = False
    """Put the model's first token before every sequence."""
    lora: int = 8
    """Rank of the adapters; 0 trains all weights."""
    lora_layers: int = 0
    """Adapters in that many last layers alone (0: in all)."""
    lora_alpha: float = 16.0
    """Scale of the adapters."""
    dtype: Literal["float32", "bfloat16", "4bit"] = "float32"
    """Precision of the pretrained weights. `bfloat16` halves their memory and needs adapters; machines then agree on
    the student's prediction in fewer positions. `4bit` holds linear layers in NormalFloat of four bits, needs adapters
    too, and the extra `quantized`."""
    length: int = 64
    """Window of training in tokens."""
    batch: int = 4
    """Windows in a minibatch."""
    micro: int = 4
    """Windows that are computed at a time."""
    checkpointing: bool = False
    """Compute layers again in the backward pass: less memory, more time."""
    rate: float = 5e-4
    """Highest learning rate of training on text."""
    distill_rate: float = 5e-4
    """Highest learning rate of distillation."""
    weight_decay: float = 0.0
    """Weight decay."""
    clip: float = 1.0
    """Largest norm of a gradient."""
    vocab: int = 0
    parameters: int = 0
    weights: str = ""
    """SHA-256 that the model's files must have (empty: it is not checked)."""

    def __post_init__(self) -> None:
        for name in ("lora", "lora_layers", "vocab", "parameters"):
            check_count(name, getattr(self, name), 0)
        if self.dtype not in ("float32", "bfloat16", "4bit"):
            raise ParameterError("dtype", f"must be 'float32', 'bfloat16' or '4bit', got {self.dtype!r}")
        if self.dtype != "float32" and self.lora == 0:
            raise ParameterError(
                "dtype", f"must be 'float32' where all weights are trained (lora = 0), got {self.dtype!r}"
            )
        check_count("length", self.length, 1)
        for name in ("batch", "micro"):
            check_count(name, getattr(self, name), 1, MAX_BATCH)
        for name in ("rate", "distill_rate", "clip", "lora_alpha"):
            check_positive(name, getattr(self, name))
        check_weight("weight_decay", self.weight_decay)


def config_class(kind: str) -> type[Any]:
    """Return the class of the configuration of a kind of student.

    >>> config_class("transformer").__name__
    'TransformerConfig'
    """
    without_import: dict[str, type[Any]] = {"transformer": TransformerConfig, "huggingface": HuggingFaceConfig}
    return without_import[kind] if kind in without_import else students.get(kind).Config


@dataclass(frozen=True, slots=True)
class StudentChoice:
    """A kind of student, its configuration (a frozen dataclass with `vocab` = 0), its device (None: the machine's)."""

    kind: str
    settings: Any
    device: Device | None = None

    def changed(self, **settings: Any) -> StudentChoice:
        """Return the same choice with other settings.

        >>> parse_student({"kind": "ngram", "order": 2}).changed(order=4).settings.order
        4
        """
        return replace(self, settings=replace(self.settings, **settings))

    def table(self) -> dict[str, Any]:
        """Return the table that `parse_student` makes this choice of."""
        settings = {name: value for name, value in asdict(self.settings).items() if name != "vocab"}
        return {"kind": self.kind, "device": self.device, **settings}


def parse_student(table: Any) -> StudentChoice:
    """Check a [student] table: the kind of a student and the fields of its configuration.

    Raises
    ------
    pydantic.ValidationError
        With the key of every field that is wrong.

    >>> parse_student({"kind": "transformer", "width": 64}).settings.width
    64
    """
    if isinstance(table, StudentChoice):
        return table
    if not isinstance(table, dict):
        raise InputError(f"must be a table with a kind, got {shown(table)}")
    settings = dict(table)
    if "kind" not in settings:
        raise _refusal({"kind": f"is missing: one of {', '.join(students.names())}"}, settings)
    kind = str(settings.pop("kind"))
    try:
        students.check(kind)
    except InputError as error:
        raise _refusal({"kind": str(error)}, table) from None
    device = _checked({"device": Device | None}, {"device": settings.pop("device", None)})["device"]
    return StudentChoice(kind, _settings(kind, settings), device)


def _settings(kind: str, settings: dict[str, Any]) -> Any:
    """Return the kind's configuration; V is left open, since the tokenizer decides it."""
    cls = config_class(kind)
    options = {field.name: field for field in fields(cls) if field.name != "vocab"}
    if unknown := sorted(settings.keys() - options.keys()):
        listed = f"a student of kind {kind!r} has {', '.join(sorted(options))}"
        raise _refusal({key: _unknown_key(key, options, listed) for key in unknown}, settings)
    required = {name for name, field in options.items() if field.default is field.default_factory is MISSING}
    if missing := sorted(required - settings.keys()):
        raise _refusal(dict.fromkeys(missing, "is missing"), settings)
    checked = _checked(get_type_hints(cls), settings)
    try:
        return cls(**checked)
    except ParameterError as error:
        key = error.key if error.key in options else ""
        raise _refusal({key: error.problem if key else str(error)}, settings) from None
    except InputError as error:
        raise _refusal({"": str(error)}, settings) from None


def _unknown_key(key: str, options: Iterable[str], listed: str) -> str:
    closest = closest_name(key, options)
    return f"unknown key: {'' if closest is None else f'did you mean {closest}? '}{listed}"


def _checked(types: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check that values have their types, without conversion; name all that have not."""
    checked = {}
    wrong = {}
    for name, value in settings.items():
        try:
            checked[name] = TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            wrong[name] = error.errors()[0]["msg"]
    if wrong:
        raise _refusal(wrong, settings)
    return checked


def _refusal(messages: Mapping[str, str], settings: Mapping[str, Any]) -> ValidationError:
    """Return an error with a line for each key; the key "" stands for the whole table."""
    lines = []
    for name, message in messages.items():
        kind = PydanticCustomError("student", "{message}", {"message": message})
        lines.append(InitErrorDetails(type=kind, loc=(name,) if name else (), input=settings.get(name, settings)))
    return ValidationError.from_exception_data("student", lines)
