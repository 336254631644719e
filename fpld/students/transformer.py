"""A small decoder-only transformer in PyTorch: pre-norm, rotary positions, tied embeddings, AdamW.

Shapes in the comments: B sequences of T tokens, width C, H heads of C/H, vocabulary V.
"""

from typing import Self

from fpld.errors import MissingExtraError
from fpld.students.base import check_count
from fpld.students.configs import TransformerConfig

try:
    import torch
    import torch.nn.functional as F  # noqa: N812  # its usual name
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("the transformer student", "torch") from error

from fpld.students.gradient import GradientStudent


class Block(nn.Module):
    """One layer: attention over earlier positions, then a two-layer perceptron, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend_norm = nn.Parameter(torch.empty(width))
        self.qkv = nn.Parameter(torch.empty(3 * width, width))
        self.attend_out = nn.Parameter(torch.empty(width, width))
        self.mlp_norm = nn.Parameter(torch.empty(width))
        self.mlp_in = nn.Parameter(torch.empty(4 * width, width))
        self.mlp_out = nn.Parameter(torch.empty(width, 4 * width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map the stream x [B, T, C] to the next layer's."""
        B, T, C = x.shape
        y = F.linear(F.rms_norm(x, (C,), self.attend_norm), self.qkv)  # [B, T, 3C]
        q, k, v = y.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [B, H, T, C/H]
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + F.linear(a.transpose(1, 2).reshape(B, T, C), self.attend_out)
        y = look_back(F.rms_norm(x, (C,), self.mlp_norm))
        y = F.relu(F.linear(y, self.mlp_in)).square()  # [B, T, 4C]; as good as GELU and cheaper
        return x + F.linear(y, self.mlp_out)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of coordinates of x [B, H, T, D] by angles that grow with position; cos, sin [T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def look_back(x: Tensor) -> Tensor:
    """Take half of the channels of x [B, T, C] from the token before, so that pairs are learnt at once."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., :half], F.pad(x[:, :-1, half:], (0, 0, 1, 0))), dim=-1)


class Network(nn.Module):
    """The layers between token ids [B, T] and logits [B, T, V]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.width))
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.width))
        half = config.width // config.heads // 2
        angle = torch.outer(torch.arange(config.length), 10000.0 ** (-torch.arange(half) / half))  # [T, D/2]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [B, T] to the logits [B, T, V] of the tokens that follow."""
        T = ids.shape[1]
        x = F.embedding(ids, self.embedding)  # [B, T, C]
        x = F.rms_norm(x, x.shape[-1:])  # a tied embedding is small: without this, early training stalls
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        x = F.rms_norm(x, x.shape[-1:], self.norm)
        return F.linear(x, self.embedding)  # the embedding is tied: a third of the parameters at V = 1024

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights; what adds to the stream starts small, so depth does no harm."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1.0)
            else:
                scale = 0.05 if name == "embedding" else parameter.shape[1] ** -0.5
                if name.endswith("_out"):
                    scale *= 0.5 * len(self.blocks) ** -0.5
                parameter.normal_(0.0, scale, generator=generator)


class Transformer(GradientStudent):
    """A decoder-only transformer.

    >>> import numpy as np
    >>> student = Transformer(TransformerConfig(vocab=256, layers=1, width=16, heads=2, length=8), seed=0)
    >>> student.logits(np.zeros((3, 8), np.int32)).shape
    (24, 256)
    """

    kind = "transformer"
    Config = TransformerConfig

    def __init__(self, config: TransformerConfig, *, seed: int, device: str = "cpu") -> None:
        check_count("seed", seed, 0)
        check_count("vocab", config.vocab, 2)
        self._config = config
        network = Network(config)
        network.initialise(torch.Generator().manual_seed(seed))
        self._network = network
        self.to(device)

    @property
    def config(self) -> TransformerConfig:
        """Return the configuration."""
        return self._config

    @property
    def micro(self) -> int:
        """Return the whole minibatch: its logits are small."""
        return self._config.batch

    @property
    def longest(self) -> int | None:
        """Return the longest context."""
        return self._config.length

    @classmethod
    def make(cls, config: TransformerConfig, *, seed: int, device: str = "cpu") -> Self:
        """Make a student."""
        return cls(config, seed=seed, device=device)

    def copy(self) -> Self:
        """Return a student with the same parameters, on the same device, that shares none of them."""
        other = type(self)(self._config, seed=0, device=str(self.device))
        other._set_state(self.state())
        return other
