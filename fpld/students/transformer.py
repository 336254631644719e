"""A small Llama in PyTorch: RMS norms, rotary positions, SwiGLU, tied embeddings, no biases; AdamW.

`transformers` reads the same weights as a LlamaForCausalLM: `llama_weights` names them as it does, and
`TransformerConfig.llama` is its configuration.

Shapes in the comments: B sequences of T tokens, width C, H heads of C/H, M hidden units, vocabulary V.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np

from fpld.errors import InputError, MissingExtraError
from fpld.students.configs import NORM_EPSILON, ROTARY_BASE, TransformerConfig
from fpld.students.export import export_llama
from fpld.validation import check_count

try:
    import torch
    import torch.nn.functional as F  # noqa: N812  # its usual name
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("the transformer student", "torch") from error

from fpld.students.gradient import GradientStudent, some_tokens
from fpld.students.losses import target_loss, token_loss

LARGE_VOCAB = 16384  # from here on the logits of a minibatch are never held together
EMBEDDING_SCALE = 0.4  # the standard deviation of a new embedding
EMBEDDING_RATE = 4.0  # factor of its learning rate: weights of this scale need larger steps


class KeyValueCache:
    """Keys and values [B, H, T, C/H] of the positions that a layer has seen."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next position; return all."""
        if self._kept is not None:
            key = torch.cat((self._kept[0], key), dim=2)
            value = torch.cat((self._kept[1], value), dim=2)
        self._kept = key, value
        return self._kept


class TransformerLayer(nn.Module):
    """One layer: attention over earlier positions, then a gated perceptron, each added to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend_norm = nn.Parameter(torch.empty(width))
        self.qkv = nn.Parameter(torch.empty(3 * width, width))
        self.attend_out = nn.Parameter(torch.empty(width, width))
        self.mlp_norm = nn.Parameter(torch.empty(width))
        self.mlp_in = nn.Parameter(torch.empty(2 * hidden, width))  # the gate above the values
        self.mlp_out = nn.Parameter(torch.empty(width, hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map the residual stream x [B, T, C] to that of the next layer.

        With a cache x is the next position alone (T = 1), and attends to those in the cache, which it joins.
        """
        B, T, C = x.shape
        y = F.linear(F.rms_norm(x, (C,), self.attend_norm, NORM_EPSILON), self.qkv)  # [B, T, 3C]
        q, k, v = y.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [B, H, T, C/H]
        k = apply_rotary(k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        a = F.scaled_dot_product_attention(apply_rotary(q, cos, sin), k, v, is_causal=cache is None)
        x = x + F.linear(a.transpose(1, 2).reshape(B, T, C), self.attend_out)
        y = F.linear(F.rms_norm(x, (C,), self.mlp_norm, NORM_EPSILON), self.mlp_in)  # [B, T, 2M]
        gate, value = y.chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * value, self.mlp_out)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of coordinates of x [B, H, T, D] by angles that grow with position; cos, sin [T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class TransformerNetwork(nn.Module):
    """The layers between token ids [B, T] and logits [B, T, V]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.width))
        self.blocks = nn.ModuleList(
            TransformerLayer(config.width, config.heads, config.hidden) for _ in range(config.layers)
        )
        self.norm = nn.Parameter(torch.empty(config.width))
        half = config.width // config.heads // 2
        angle = torch.outer(torch.arange(config.length), ROTARY_BASE ** (-torch.arange(half) / half))  # [T, D/2]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [B, T] to the logits [B, T, V] of the tokens that follow."""
        return F.linear(self.features(ids), self.embedding)  # tied weights

    def features(self, ids: Tensor) -> Tensor:
        """Return the last hidden states [B, T, C], of which logits are a linear map."""
        T = ids.shape[1]
        x = F.embedding(ids, self.embedding)  # [B, T, C]
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return F.rms_norm(x, x.shape[-1:], self.norm, NORM_EPSILON)

    def step(self, ids: Tensor, position: int, caches: Sequence[KeyValueCache]) -> Tensor:
        """Return the logits [B, V] after the tokens [B] at a position, with a cache for each layer."""
        here = slice(position, position + 1)
        x = F.embedding(ids[:, None], self.embedding)  # [B, 1, C]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, self.cos[here], self.sin[here], cache)
        return F.linear(F.rms_norm(x[:, 0], x.shape[-1:], self.norm, NORM_EPSILON), self.embedding)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights: layers add little to the stream at first, and the first logits are small."""
        width = self.embedding.shape[1]
        for name, parameter in self.named_parameters():
            if name == "norm":
                parameter.fill_(min(1.0, 0.7 / (EMBEDDING_SCALE * width**0.5)))
            elif name.endswith("norm"):
                parameter.fill_(1.0)
            else:
                scale = EMBEDDING_SCALE if name == "embedding" else parameter.shape[1] ** -0.5
                if name.endswith("_out"):
                    scale *= 0.05 * len(self.blocks) ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """Initialise heads of the first layer to attend to the last token or the one before it.

        So pairs of tokens are learnt at once: 0.2 nats less after 700 steps. One channel of the embedding is
        the same for all tokens (which no softmax sees); through it a head's queries and keys are constants, and
        the highest rotary frequencies make their product largest at a distance of 1 or 2.
        """
        block: Any = self.blocks[0]
        width = self.embedding.shape[1]
        heads = block.heads
        size = width // heads
        half = size // 2
        waves = min(3, size // 2)
        self.embedding[:, 0] = 3.0 * EMBEDDING_SCALE
        constant = 3.0 / math.sqrt(1.0 + 9.0 / width)  # that channel after the norm
        scale = math.sqrt(24.0 * math.sqrt(size) / waves) / constant  # the largest product is 24
        query, key, _ = block.qkv.view(3, heads, size, width)
        for head in range(max(1, 3 * heads // 4)):  # the rest stay free
            distance = 1 if head < (heads + 1) // 2 else 2
            query[head] *= 0.3
            key[head] *= 0.3
            for wave in range(waves):
                angle = distance * ROTARY_BASE ** (-wave / half)
                query[head, wave, 0] += scale
                key[head, wave, 0] += scale * math.cos(angle)
                key[head, half + wave, 0] += scale * math.sin(angle)


class Transformer(GradientStudent):
    """A decoder-only transformer: a Llama.

    >>> import numpy as np
    >>> student = Transformer(TransformerConfig(vocab=256, layers=1, width=16, heads=2, length=8), seed=0)
    >>> student.logits(np.zeros((3, 8), np.int32)).shape
    (24, 256)
    """

    kind = "transformer"
    Config = TransformerConfig
    config: TransformerConfig
    _network: TransformerNetwork

    def __init__(self, config: TransformerConfig, *, seed: int, device: str = "cpu") -> None:
        check_count("seed", seed, 0)
        check_count("vocab", config.vocab, 2)
        self.config = config
        network = TransformerNetwork(config)
        network.initialise(torch.Generator().manual_seed(seed))
        self._network = network
        self.to(device)

    @property
    def micro(self) -> int:
        """Return the whole minibatch: its logits are small."""
        return self.config.batch

    @property
    def longest(self) -> int | None:
        """Return the longest context."""
        return self.config.length

    def next_logits(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from the next tokens [B] of B sequences to the logits [B, V] after them."""
        caches = [KeyValueCache() for _ in self._network.blocks]
        positions = count()

        @torch.inference_mode()
        def following(tokens: np.ndarray) -> np.ndarray:
            logits: np.ndarray = self._network.step(self._ids(tokens), next(positions), caches).float().cpu().numpy()
            return logits

        return following

    @property
    def _large(self) -> bool:
        """Return whether logits are so many that losses go by blocks of contexts."""
        return self.vocab >= LARGE_VOCAB

    def read_out_parts(self, sequences: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states [B, T, C] and the embedding, which is the read-out."""
        return self._network.features(self._ids(sequences)), self._network.embedding

    def _token_loss(self, ids: Tensor, learnt: Tensor | None = None) -> Tensor:
        if not self._large:
            return super()._token_loss(ids, learnt)
        features, following = some_tokens(self._network.features(ids[:, :-1]), ids, learnt)
        return token_loss(features, self._network.embedding, following)

    def _target_loss(self, sequences: np.ndarray, t: Tensor) -> Tensor:
        if not self._large:
            return super()._target_loss(sequences, t)
        features = self._network.features(self._ids(sequences)).flatten(0, 1)
        return target_loss(features, self._network.embedding, t.flatten(0, 1))

    def _rate_factor(self, name: str) -> float:
        return EMBEDDING_RATE if name == "embedding" else 1.0

    def copy(self) -> Self:
        """Return a student with the same parameters, on the same device, that shares none of them."""
        other = type(self)(self.config, seed=0, device=str(self.device))
        other._set_state(self.state())
        return other.compute_with(self._compute)

    def export(self, folder: Path, *, adapter: bool = False) -> None:
        """Write the model as a LlamaForCausalLM."""
        if adapter:
            raise InputError("adapter must be False for a transformer: all its weights are trained")
        export_llama(self.config, llama_weights(self.state(), self.config.layers), folder)


def llama_weights(state: Mapping[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """Name a transformer's weights as transformers' LlamaForCausalLM does; the embedding is the head too."""
    weights = {"model.embed_tokens.weight": state["embedding"], "model.norm.weight": state["norm"]}
    for index in range(layers):
        layer = f"blocks.{index}."
        llama = f"model.layers.{index}."
        query, key, value = np.split(state[layer + "qkv"], 3)
        gate, up = np.split(state[layer + "mlp_in"], 2)
        weights |= {
            llama + "input_layernorm.weight": state[layer + "attend_norm"],
            llama + "self_attn.q_proj.weight": query,
            llama + "self_attn.k_proj.weight": key,
            llama + "self_attn.v_proj.weight": value,
            llama + "self_attn.o_proj.weight": state[layer + "attend_out"],
            llama + "post_attention_layernorm.weight": state[layer + "mlp_norm"],
            llama + "mlp.gate_proj.weight": gate,
            llama + "mlp.up_proj.weight": up,
            llama + "mlp.down_proj.weight": state[layer + "mlp_out"],
        }
    return weights
