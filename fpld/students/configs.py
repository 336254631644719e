"""The configurations of students that need more than NumPy, apart from them: to read one needs no PyTorch.

A configuration says all that is needed to make a student. In one that was read from a file of the user's, `vocab`
is 0: V is that of the tokenizer, which comes later.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from fpld import registry
from fpld.errors import InputError
from fpld.students.base import check_count, check_vocab

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
    width: int = 96
    heads: int = 4
    length: int = 32
    batch: int = 8
    rate: float = 4e-3
    distill_rate: float = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0

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
    bos: bool = False
    lora: int = 8
    lora_layers: int = 0
    lora_alpha: float = 16.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    length: int = 64
    batch: int = 4
    micro: int = 4
    checkpointing: bool = False
    rate: float = 5e-4
    distill_rate: float = 5e-4
    weight_decay: float = 0.0
    clip: float = 1.0
    vocab: int = 0
    parameters: int = 0
    weights: str = ""

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
