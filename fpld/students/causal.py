"""A causal language model of transformers as a network: token ids to hidden states, hidden states to logits.

The two steps are apart, since a large vocabulary makes the second one dear (V = 49152: 197 kB for each context), and
since hidden states, a few hundred numbers for each context, can be kept where logits cannot.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn

from fpld.errors import InputError
from fpld.students.folders import require
from fpld.students.trunk import Trunk, find_trunk

_TRIED = 6  # tokens of the sequences that a model is tried on
_CLOSE = 1e-3  # of the largest logit: what the same sums in another order may differ by


class Network(nn.Module):
    """Map token ids [B, T] to the logits [B, T, V] of the tokens that follow; `bos` stands before them, if given."""

    def __init__(self, model: nn.Module, bos: int | None) -> None:
        super().__init__()
        self.model = model
        self.bos = bos
        self.apart = False
        self.trunk: Trunk | None = None  # known once the model was examined
        self.wide: Tensor | None = None  # the read-out in float32, once it was needed
        self.vocab = int(text_config(model).vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits [B, T, V]."""
        if self.apart:
            return self.read_out(self.features(ids))
        logits: Tensor = self.model(input_ids=self._whole(ids), use_cache=False).logits
        return self._own(logits)

    def features(self, ids: Tensor) -> Tensor:
        """Return the last hidden states [B, T, C], of which logits are a linear map."""
        return self._own(self._run(ids).last_hidden_state)

    def below(self, ids: Tensor) -> Tensor:
        """Return the hidden states [B, T, C] below all that is trained, where the network has a trunk."""
        if self.trunk is None:
            raise AttributeError("no layers lie below all that is trained")
        return self.trunk.states(lambda: self._run(ids))

    def features_above(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the last hidden states as `features`, from those that `below` returns; lower layers are not run."""
        if self.trunk is None:
            raise AttributeError("no layers lie below all that is trained")
        with self.trunk.replaced(states):
            return self.features(ids)

    def _run(self, ids: Tensor) -> Any:
        return self._causal.base_model(input_ids=self._whole(ids), use_cache=False)

    def read_out(self, features: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., C]: in float32 also where the weights have less.

        Logits in bfloat16 are off by up to 0.06 nats, as much as an adapter may change.
        """
        weight = self.frozen_read_out
        if weight is None or weight.dtype == torch.float32:
            logits: Tensor = self._causal.get_output_embeddings()(features)
            return logits
        if self.wide is None or self.wide.device != weight.device:
            self.wide = weight.float()
        return F.linear(features.float(), self.wide)

    @property
    def frozen_read_out(self) -> Tensor | None:
        """Return the weights [V, C] by which hidden states become logits, if that is all and they are not trained."""
        head = self._causal.get_output_embeddings()
        weight: Tensor | None = head.weight if self.apart and isinstance(head, nn.Linear) else None
        trained = weight is None or weight.requires_grad or getattr(head, "bias", None) is not None
        return None if trained else weight

    @property
    def _causal(self) -> Any:
        """Return transformers' model: peft's stands around it."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _whole(self, ids: Tensor) -> Tensor:
        if self.bos is None:
            return ids
        return torch.cat((torch.full((len(ids), 1), self.bos, dtype=ids.dtype, device=ids.device), ids), 1)

    def _own(self, values: Tensor) -> Tensor:
        """Leave out what belongs to the first token, which is no context."""
        return values if self.bos is None else values[:, 1:]

    @torch.inference_mode()
    def examine(self, name: str) -> None:
        """Refuse a model that looks ahead or has other logits than V; see whether its steps can be taken apart.

        A model that does more between hidden states and logits, such as capping them, is used as a whole; so are the
        layers of one in which upper layers take more from lower ones than hidden states.
        """
        weight = next(self.parameters())
        tokens = (torch.arange(2 * _TRIED, device=weight.device) * 7 % self.vocab).view(2, -1)
        tokens[1, :-1] = tokens[0, :-1]
        self.apart, self.trunk = False, None
        logits = self(tokens).float()
        if logits.shape[-1] != self.vocab:
            raise InputError(f"{name} must have {self.vocab} logits, as many as tokens, got {logits.shape[-1]}")
        if not logits.isfinite().all():
            raise InputError(f"{name} must have finite logits: its weights are broken, or need another dtype")
        near = _CLOSE * float(logits.abs().max())
        if not torch.allclose(logits[0, :-1], logits[1, :-1], rtol=0, atol=near):
            raise InputError(f"{name} must be a causal language model: its logits depend on tokens that come later")
        try:
            parts = self.read_out(self.features(tokens)).float()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return
        self.apart = parts.shape == logits.shape and torch.allclose(parts, logits, rtol=0, atol=near)
        self.trunk = find_trunk(self._causal) if self.apart else None
        if self.trunk is None:
            return
        whole = self.features(tokens)
        try:
            above = self.features_above(tokens, self.below(tokens))
        except (AttributeError, KeyError, RuntimeError, TypeError):
            self.trunk = None
            return
        if not torch.equal(above, whole):
            self.trunk = None


def text_config(model: Any) -> Any:
    """Return the configuration of the language model, which models of text and images have apart."""
    return model.config.get_text_config()


def recompute(model: Any) -> None:
    """Let a model compute its layers again in the backward pass instead of keeping what is inside them."""
    kind = type(model).__name__
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise InputError(f"checkpointing must be False for {kind}, which cannot compute its layers again") from error
    block = require("transformers").modeling_layers.GradientCheckpointingLayer
    layers = [module for module in model.modules() if isinstance(module, block)]
    if not layers or any(getattr(layer, "dropout", 0.0) for layer in layers):
        raise InputError(f"checkpointing must be False for {kind}: its layers cannot be computed twice alike")
    for layer in layers:
        layer.training = True  # of the layer alone: what is inside it stays as in evaluation
