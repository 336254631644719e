"""What a federation of a large model sends and holds, before there is one: labels beside weights and adapters.

All from the model's shape: bytes by the formulas of what is sent, memory by what our own code holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fpld import _check
from fpld.errors import InputError
from fpld.federation import onebit
from fpld.protocol.priors import notes_bytes
from fpld.protocol.wire import OVERHEAD
from fpld.storage.files import read_utf8

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Row = dict[str, Any]

LINKS = (1e6, 10e6, 100e6)
"""Rates of links that seconds are given for, bits per second in each direction."""
LIBRARIES = 0.35e9  # bytes of a process with PyTorch and transformers in it, as measured
BLOCKS = 4 * (64 << 20)  # of logits and of what is computed from them
_HALF, _SINGLE = 2, 4  # bytes of a number
_TRAINED = 16  # bytes of a weight that is trained: itself, its gradient, AdamW's two means
_ENTRY_BITS = 9.0  # of a label, for each token that it changes
_ENTRY_BYTES = 16  # of such a token at the aggregator


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model in the manner of Llama: width, layers, units of a perceptron, heads, V."""

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
        own = sum(rows * columns for rows, columns in self.linear) + 2 * self.width
        return (1 if self.tied else 2) * self.vocab * self.width + self.layers * own + self.width

    @property
    def linear(self) -> list[tuple[int, int]]:
        """Return the inputs and outputs of the linear modules of a layer."""
        queries, keys = self.heads * self.head, self.key_heads * self.head
        attention = [(self.width, queries), (self.width, keys), (self.width, keys), (queries, self.width)]
        return [*attention, (self.width, self.hidden), (self.width, self.hidden), (self.hidden, self.width)]

    def adapters(self, rank: int, layers: int = 0) -> int:
        """Return the number of weights of adapters of a rank in the last layers (0: in all).

        >>> MODELS["smollm2-135m"].adapters(8), MODELS["smollm2-135m"].adapters(8, 10)
        (2442240, 814080)
        """
        return (layers or self.layers) * rank * sum(rows + columns for rows, columns in self.linear)


MODELS = {
    "smollm2-135m": Shape(576, 30, 1536, 9, 3, 64, 49152, tied=True),
    "smollm2-1.7b": Shape(2048, 24, 8192, 32, 32, 64, 49152, tied=True),
    "llama-3.1-8b": Shape(4096, 32, 14336, 32, 8, 128, 128256, tied=False),
}
"""Models by name."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How a federation of adapters is made: rank and layers of adapters, contexts with bits for each, rounds.

    `outer` are the rounds of a rival that sends all weights often, in four bits each; `tokens` are those of a
    minibatch.
    """

    rank: int = 8
    layers: int = 0
    contexts: int = 65536
    bits: float = 60.0
    rounds: int = 1
    outer: int = 20
    tokens: int = 512


def read_shape(folder: Path) -> Shape:
    """Read the shape of a model from the config.json of its folder."""
    try:
        found = json.loads(read_utf8(folder / "config.json"))
        width, heads = int(found["hidden_size"]), int(found["num_attention_heads"])
        return Shape(
            width,
            int(found["num_hidden_layers"]),
            int(found["intermediate_size"]),
            heads,
            int(found.get("num_key_value_heads") or heads),
            int(found.get("head_dim") or width // heads),
            int(found["vocab_size"]),
            tied=bool(found.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder / 'config.json'} must have the sizes of a model as Llama has them: {error}"
        ) from None


def scale_rows(shape: Shape, nodes: Sequence[int], effort: Effort) -> list[Row]:
    """Return a row for each number of nodes and each method: bytes of a node, seconds on links, memory."""
    _check.integer("contexts", effort.contexts, least=1)
    if effort.layers > shape.layers:
        raise InputError(f"layers of adapters must be at most the model's {shape.layers}, got {effort.layers}")
    return [row for count in nodes for row in _rows(shape, count, effort)]


def _rows(shape: Shape, nodes: int, effort: Effort) -> list[Row]:
    _check.integer("nodes", nodes, least=1)
    weights, adapters = shape.parameters, shape.adapters(effort.rank, effort.layers)
    notes = notes_bytes(effort.contexts, shape.vocab)
    label = -(-effort.contexts * effort.bits // 8) + OVERHEAD
    node, whole = node_bytes(shape, effort), LIBRARIES + weights * _TRAINED + BLOCKS
    combining = effort.contexts * nodes * effort.bits / _ENTRY_BITS * _ENTRY_BYTES
    single = _SINGLE * adapters
    methods: list[tuple[str, int, float, float, float, float]] = [
        ("fpld", effort.rounds, label, single + notes, node, node + combining),
        ("adapters, one bit", effort.rounds, onebit.update_bytes(adapters), single, node, 2 * single),
        ("adapters, float32", effort.rounds, single, single, node, 2 * single),
        ("all weights, four bits, often", effort.outer, weights / 2, weights / 2, whole, 2 * _SINGLE * weights),
        ("all weights, float32", effort.rounds, _SINGLE * weights, _SINGLE * weights, whole, 2 * _SINGLE * weights),
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


def node_bytes(shape: Shape, effort: Effort) -> float:
    """Return about the memory of a node with a model in bfloat16 and adapters.

    That is weights, the read-out in float32, hidden states of the contexts, what the layers with adapters keep for the
    backward pass, and the adapters.
    """
    layers = effort.layers or shape.layers
    kept = effort.tokens * layers * (12 * shape.width + 4 * shape.hidden) * _HALF
    read_out = shape.vocab * shape.width * _SINGLE
    states = effort.contexts * shape.width * _HALF
    trained = _TRAINED * shape.adapters(effort.rank, effort.layers)
    return LIBRARIES + _HALF * shape.parameters + read_out + states + kept + trained + BLOCKS
