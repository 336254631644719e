"""A causal language model of transformers as a network that is cut at two places: read-out and trunk.

Token ids become hidden states, and a linear read-out makes logits of them. The two steps are separate, since a large
vocabulary makes logits costly (V = 49152: 197 kB for each context), and hidden states can be kept where logits cannot.

Low-rank adapters (E. Hu et al., *LoRA*, 2022; made by peft) stand beside the linear modules of all layers or of the
last ones. The layers below the lowest adapter, the trunk, never change, so their output for a sequence can be kept.
With adapters in the last ten of thirty layers, a sequence that is seen again costs a third of the layers. Any causal
model is cut by hooks: its lower layers are skipped, and the first one above them is handed their output.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn

from fpld.errors import InputError, ParameterError
from fpld.students.pretrained import MODEL_LOCK, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fpld.students.configs import HuggingFaceConfig

_TRIAL_TOKENS = 6  # of the sequences that a model is tried on
_TOLERANCE = 1e-3  # of the largest logit: rounding of the same sums in another order
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")  # in a module's name


class CausalNetwork(nn.Module):
    """Map token ids [B, T] to the logits [B, T, V] of the tokens that follow; a `bos` token is put before them.

    `examine` sets `separable`, whether hidden states and logits are separate steps, and `trunk`, if there is one.
    """

    def __init__(self, model: nn.Module, bos: int | None) -> None:
        super().__init__()
        self.model = model
        self.bos = bos
        self.separable = False
        self.trunk: Trunk | None = None
        self.wide: Tensor | None = None  # the read-out in float32, made when it is first needed
        self.vocab = int(text_config(model).vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits [B, T, V]."""
        if self.separable:
            return self.read_out(self.features(ids))
        logits: Tensor = self.model(input_ids=self._with_bos(ids), use_cache=False).logits
        return self._without_bos(logits)

    def step(self, ids: Tensor, past: Any) -> tuple[Tensor, Any]:
        """Return the logits [B, V] after the next tokens [B, 1], and the cache with them; None before the first."""
        ids = self._with_bos(ids) if past is None else ids
        if not self.separable:
            out = self.model(input_ids=ids, past_key_values=past, use_cache=True)
            return out.logits[:, -1], out.past_key_values
        out = self._causal.base_model(input_ids=ids, past_key_values=past, use_cache=True)
        return self.read_out(out.last_hidden_state[:, -1]), out.past_key_values

    def features(self, ids: Tensor) -> Tensor:
        """Return the last hidden states [B, T, C], of which logits are a linear map."""
        return self._without_bos(self._run(ids).last_hidden_state)

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
        return self._causal.base_model(input_ids=self._with_bos(ids), use_cache=False)

    def read_out(self, features: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., C], in float32 whatever the precision of the weights.

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
        weight: Tensor | None = head.weight if self.separable and isinstance(head, nn.Linear) else None
        trained = weight is None or weight.requires_grad or getattr(head, "bias", None) is not None
        return None if trained else weight

    @property
    def _causal(self) -> Any:
        """Return transformers' model: peft's stands around it."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def uncut(self) -> nn.Module:
        """Return the model, which is used as a whole from here on."""
        self.separable = False
        self.trunk = None
        return self.model

    def _with_bos(self, ids: Tensor) -> Tensor:
        if self.bos is None:
            return ids
        return torch.cat((torch.full((len(ids), 1), self.bos, dtype=ids.dtype, device=ids.device), ids), 1)

    def _without_bos(self, values: Tensor) -> Tensor:
        """Drop the position of the bos token, which is no context."""
        return values if self.bos is None else values[:, 1:]

    @torch.inference_mode()
    def examine(self, name: str) -> None:
        """Refuse a model that looks ahead or has other logits than V; find out whether it can be cut.

        A model that does more between hidden states and logits, such as capping them, is used as a whole. So are the
        layers of a model whose upper layers take more than hidden states from lower ones.
        """
        weight = next(self.parameters())
        tokens = (torch.arange(2 * _TRIAL_TOKENS, device=weight.device) * 7 % self.vocab).view(2, -1)
        tokens[1, :-1] = tokens[0, :-1]
        self.separable = False
        self.trunk = None
        logits = self(tokens).float()
        if logits.shape[-1] != self.vocab:
            raise InputError(f"{name} must have {self.vocab} logits, as many as tokens, got {logits.shape[-1]}")
        if not logits.isfinite().all():
            raise InputError(f"{name} must have finite logits: its weights are broken, or need another dtype")
        near = _TOLERANCE * float(logits.abs().max())
        if not torch.allclose(logits[0, :-1], logits[1, :-1], rtol=0, atol=near):
            raise InputError(f"{name} must be a causal language model: its logits depend on tokens that come later")
        try:
            parts = self.read_out(self.features(tokens)).float()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return
        self.separable = parts.shape == logits.shape and torch.allclose(parts, logits, rtol=0, atol=near)
        self.trunk = find_trunk(self._causal) if self.separable else None
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


def transformer_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a model, each of which can be computed by itself."""
    layer = require("transformers").modeling_layers.GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, layer)]


def recompute(model: Any) -> None:
    """Let a model compute its layers again in the backward pass instead of keeping their activations."""
    kind = type(model).__name__
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ParameterError(
            "checkpointing", f"must be False for {kind}, which cannot compute its layers again"
        ) from error
    layers = transformer_layers(model)
    if not layers or any(getattr(layer, "dropout", 0.0) for layer in layers):
        raise ParameterError("checkpointing", f"must be False for {kind}: its layers cannot be computed twice alike")
    for layer in layers:
        # Of the layer alone: the modules inside it stay in evaluation mode.
        layer.training = True


class _Reached(Exception):  # noqa: N818  # no error: it ends the pass above the lower layers
    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


class Trunk:
    """The layers `below` the `first` one with an adapter."""

    def __init__(self, below: list[nn.Module], first: nn.Module) -> None:
        self.below = below
        self.first = first

    @torch.no_grad()
    def states(self, run: Callable[[], Any]) -> Tensor:
        """Return the hidden states [B, T, C] that enter the first layer above, when `run` runs the model."""

        def stop(module: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001  # the form of a hook
            raise _Reached(args[0] if args else kwargs["hidden_states"])

        hook = self.first.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            run()
        except _Reached as reached:
            return reached.states
        finally:
            hook.remove()
        raise AttributeError("the model does not run its layers one after the other")

    @contextmanager
    def replaced(self, states: Tensor) -> Iterator[None]:
        """Replace the output of the lower layers by these hidden states, and skip the layers."""

        def enter(module: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001  # the form of a hook
            return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

        hook = self.first.register_forward_pre_hook(enter, with_kwargs=True)
        for layer in self.below:
            layer.forward = _skip
        try:
            yield
        finally:
            hook.remove()
            for layer in self.below:
                del layer.forward  # uncovers the method of the class


def _skip(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG001  # the form of a layer
    return hidden_states


def find_trunk(model: nn.Module) -> Trunk | None:
    """Return the layers of a model that lie below all trained weights; None if there are none."""
    trained = set()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            place = _LAYER_NUMBER.search(name)
            if place is None:
                return None
            trained.add((name[: place.start()], int(place[1])))
    if len({path for path, _ in trained}) != 1 or min(trained)[1] == 0:
        return None
    path, number = min(trained)
    layers: Any = model.get_submodule(path)
    return Trunk(list(layers[:number]), layers[number])


def with_adapters(model: Any, config: HuggingFaceConfig, seed: int) -> Any:
    """Return the model with new adapters, which add nothing yet; unchanged if their rank is 0."""
    if config.lora == 0:
        return model
    peft = require("peft")
    names = linear_modules(model, config.lora_layers)
    settings = peft.LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=names,
        fan_in_fan_out=_transposed(model.get_submodule(names[0])),
        task_type="CAUSAL_LM",
    )
    # The first weights of adapters must neither depend on the global generator nor change its state.
    with MODEL_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, settings)


def linear_modules(model: Any, last: int) -> list[str]:
    """Return the names of the linear modules inside the last layers of a model (0: all its layers).

    The read-out is not among them: in most models it is the embedding.
    """
    modules: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        place = _LAYER_NUMBER.search(name)
        if place is not None and (isinstance(module, nn.Linear) or _transposed(module)):
            modules.setdefault(int(place[1]), []).append(name)
    if not modules:
        kind = type(model).__name__
        raise ParameterError(
            "lora", f"must be 0 for {kind}: it has no linear layers that an adapter could stand beside"
        )
    if last > len(modules):
        raise ParameterError("lora_layers", f"must be at most the model's {len(modules)} layers, got {last}")
    return [name for layer in sorted(modules)[-last:] for name in modules[layer]]


def stack(states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return adapters that add the mean of what several add; their rank is the sum of the ranks."""
    stacked = {}
    for name, first in states[0].items():
        parts = [state[name] for state in states]
        # peft keeps A as [rank, in] and B as [out, rank]; ranks may differ.
        down = "lora_A" in name
        stacked[name] = np.concatenate(parts, axis=0 if down else 1) / (1 if down else len(parts))
        stacked[name] = stacked[name].astype(first.dtype)
    return stacked


def _transposed(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, whose weights are transposed."""
    return type(module).__name__ == "Conv1D"
