"""Estimate traffic and memory of a federation of a large model: labels beside adapters and whole weights.

All numbers follow from the model's shape: bytes by the formats of what is sent, memory by what the code holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fpld import validation
from fpld.codecs.updates import update_bytes
from fpld.errors import InputError
from fpld.protocol.shared_prior import estimate_notes_bytes
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.storage.files import parse_json, read_utf8

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Row = dict[str, Any]

LINKS = (1e6, 10e6, 100e6)
"""Rates of links that seconds are given for, bits per second in each direction."""
_PROCESS_BYTES = 0.35e9  # a process that has imported PyTorch and transformers, as measured
_BLOCK_BYTES = 4 * (64 << 20)  # blocks of logits and what is computed from them
_BFLOAT16_BYTES = 2
_FLOAT32_BYTES = 4
_TRAINED_BYTES = 16  # a trained weight: itself, its gradient, AdamW's two means
_LABEL_ENTRY_BITS = 9.0  # of a label, for each token that it changes
_LABEL_ENTRY_BYTES = 16  # of such a token at the aggregator


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama-like model; `hidden` are the units of a perceptron, `head` the width of a head."""

    width: int
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head: int
    vocab: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Return the number of weights.

        >>> MODELS["smollm2-135m"].parameters
        134515008
        """
        layer = sum(rows * columns for rows, columns in self.linear) + 2 * self.width
        return (1 if self.tied else 2) * self.vocab * self.width + self.layers * layer + self.width

    @property
    def linear(self) -> list[tuple[int, int]]:
        """Return the inputs and outputs of the linear modules of a layer."""
        queries = self.heads * self.head
        keys = self.key_heads * self.head
        attention = [(self.width, queries), (self.width, keys), (self.width, keys), (queries, self.width)]
        return [*attention, (self.width, self.hidden), (self.width, self.hidden), (self.hidden, self.width)]

    def adapters(self, rank: int, layers: int = 0) -> int:
        """Return the number of weights of adapters of a rank in the last layers (0: in all).

        >>> MODELS["smollm2-135m"].adapters(8), MODELS["smollm2-135m"].adapters(8, 10)
        (2442240, 814080)
        """
        return (layers or self.layers) * rank * sum(rows + columns for rows, columns in self.linear)


MODELS = {
    "smollm2-135m": ModelShape(576, 30, 1536, 9, 3, 64, 49152, tied=True),
    "smollm2-1.7b": ModelShape(2048, 24, 8192, 32, 32, 64, 49152, tied=True),
    "llama-3.1-8b": ModelShape(4096, 32, 14336, 32, 8, 128, 128256, tied=False),
}
"""Models by name."""


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """A federation of adapters: their rank and layers (0: all), probe contexts, bits for each, and rounds.

    `outer` are the rounds of a method that sends all weights often, in four bits each; `tokens` are those of a
    minibatch.
    """

    rank: int = 8
    layers: int = 0
    contexts: int = 65536
    bits: float = 60.0
    rounds: int = 1
    outer: int = 20
    tokens: int = 512


def read_shape(folder: Path) -> ModelShape:
    """Read the shape of a model from the config.json of its folder."""
    try:
        sizes = parse_json(read_utf8(folder / "config.json"))
        width = int(sizes["hidden_size"])
        heads = int(sizes["num_attention_heads"])
        return ModelShape(
            width,
            int(sizes["num_hidden_layers"]),
            int(sizes["intermediate_size"]),
            heads,
            int(sizes.get("num_key_value_heads") or heads),
            int(sizes.get("head_dim") or width // heads),
            int(sizes["vocab_size"]),
            tied=bool(sizes.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder / 'config.json'} must have the sizes of a model as Llama has them: {error}"
        ) from None


def scale_rows(shape: ModelShape, nodes: Sequence[int], settings: ScaleSettings) -> list[Row]:
    """Return a row for each number of nodes and each method: bytes of a node, seconds on links, memory."""
    validation.integer("contexts", settings.contexts, least=1)
    if settings.layers > shape.layers:
        raise InputError(f"layers of adapters must be at most the model's {shape.layers}, got {settings.layers}")
    return [row for count in nodes for row in _rows(shape, count, settings)]


def _rows(shape: ModelShape, nodes: int, settings: ScaleSettings) -> list[Row]:
    validation.integer("nodes", nodes, least=1)
    weights = shape.parameters
    adapters = shape.adapters(settings.rank, settings.layers)
    notes = estimate_notes_bytes(settings.contexts, shape.vocab)
    label = -(-settings.contexts * settings.bits // 8) + OVERHEAD_BYTES
    node = node_bytes(shape, settings)
    whole = _PROCESS_BYTES + weights * _TRAINED_BYTES + _BLOCK_BYTES
    combining = settings.contexts * nodes * settings.bits / _LABEL_ENTRY_BITS * _LABEL_ENTRY_BYTES
    single = _FLOAT32_BYTES * adapters
    single_weights = _FLOAT32_BYTES * weights
    methods: list[tuple[str, int, float, float, float, float]] = [
        ("fpld", settings.rounds, label, single + notes, node, node + combining),
        ("adapters, one bit", settings.rounds, update_bytes(adapters, 1), single, node, 2 * single),
        ("adapters, float32", settings.rounds, single, single, node, 2 * single),
        ("all weights, four bits, often", settings.outer, weights / 2, weights / 2, whole, 2 * single_weights),
        ("all weights, float32", settings.rounds, single_weights, single_weights, whole, 2 * single_weights),
    ]
    return [
        {
            "nodes": nodes,
            "method": name,
            "rounds": rounds,
            "up_bytes": round(rounds * up),
            "down_bytes": round(rounds * down),
            "aggregator_in": round(nodes * rounds * up),
            **{f"seconds_{rate / 1e6:g}M": 8 * rounds * (up + down) / rate for rate in LINKS},
            "node_memory": round(at_node),
            "aggregator_memory": round(at_aggregator),
        }
        for name, rounds, up, down, at_node, at_aggregator in methods
    ]


def node_bytes(shape: ModelShape, settings: ScaleSettings) -> float:
    """Estimate the memory of a node with a model in bfloat16 and adapters.

    It holds the weights, the read-out in float32, hidden states of the contexts, what the layers with adapters keep
    for the backward pass, and the adapters.
    """
    layers = settings.layers or shape.layers
    kept = settings.tokens * layers * (12 * shape.width + 4 * shape.hidden) * _BFLOAT16_BYTES
    read_out = shape.vocab * shape.width * _FLOAT32_BYTES
    states = settings.contexts * shape.width * _BFLOAT16_BYTES
    trained = _TRAINED_BYTES * shape.adapters(settings.rank, settings.layers)
    weights = _BFLOAT16_BYTES * shape.parameters
    return _PROCESS_BYTES + weights + read_out + states + kept + trained + _BLOCK_BYTES
