"""The configurations of students that need more than NumPy, apart from them: to read one needs no PyTorch.

A configuration says all that is needed to make a student. In one that was read from a file of the user's, `vocab`
is 0: V is that of the tokenizer, which comes later.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from fpld import registry
from fpld.errors import InputError
from fpld.students.checks import check_count, check_vocab

MAX_LENGTH = 1 << 16
EPSILON = 1e-6  # of a Llama's norms
THETA = 10000.0  # of its rotary positions


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
        for name in ("layers", "width", "heads", "length", "batch"):
            check_count(name, getattr(self, name), 1)
        if self.length > MAX_LENGTH:
            raise InputError(f"length must be at most {MAX_LENGTH}, got {self.length}")
        if self.width % (2 * self.heads):
            raise InputError(f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}")
        for name in ("rate", "distill_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay must be a number of at least 0, got {self.weight_decay!r}")

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
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True)
class HuggingFaceConfig:
    """State which model it is and how it is trained.

    `path` is a model folder (config.json, *.safetensors, tokenizer files), a GGUF file, or a name of `MODELS`.
    `bos` puts the model's first token before every sequence. `lora` is the rank of the adapters, which stand beside all
    linear modules of the last `lora_layers` layers (0: of all layers); `lora` = 0 trains all weights. `dtype` is the
    precision of the pretrained weights, which "bfloat16" halves; adapters are always trained in float32. A minibatch of
    `batch` windows of `length` tokens is done `micro` at a time; `checkpointing` computes layers again in the backward
    pass, which takes less memory and a third more time.

    The last three say what was found in the folder: V, how many parameters are trained, and the SHA-256 of
    the pretrained weights. Left empty they are filled in; given, as in a student's file, they are checked,
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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the pretrained weights. `bfloat16` halves their memory and needs adapters; machines then agree on
    the student's prediction in fewer places."""
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
        if self.dtype not in ("float32", "bfloat16"):
            raise InputError(f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}")
        if self.dtype == "bfloat16" and self.lora == 0:
            raise InputError("dtype must be 'float32' where all weights are trained (lora = 0), got 'bfloat16'")
        for name in ("length", "batch", "micro"):
            check_count(name, getattr(self, name), 1)
        for name in ("rate", "distill_rate", "clip", "lora_alpha"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay must be a number of at least 0, got {self.weight_decay!r}")


def config_class(kind: str) -> type[Any]:
    """Return the class of the configuration of a kind of student.

    >>> config_class("transformer").__name__
    'TransformerConfig'
    """
    own: dict[str, type[Any]] = {"transformer": TransformerConfig, "huggingface": HuggingFaceConfig}
    return own[kind] if kind in own else registry.students.get(kind).Config
