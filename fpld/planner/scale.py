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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.students.shapes import ModelShape

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
