"""The sizes of Llama-like models: of some by name, and of a folder by its config.json; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fpld.errors import InputError
from fpld.storage.files import parse_json, read_utf8

if TYPE_CHECKING:
    from pathlib import Path


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
    def multiplied(self) -> int:
        """Return the number of weights that a token is multiplied with: all but an embedding that is no read-out."""
        return self.parameters - (0 if self.tied else self.vocab * self.width)

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
NAMED_MODELS = {"smollm2": "smollm2-135m"}
"""What a configuration calls a model that is fetched, and its name above."""


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
