"""Low-rank adapters on the linear layers of a pretrained model, of all its layers or of the last ones.

After E. Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, 2022; made by peft. Layers below the lowest
adapter never change: training takes no gradient through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fpld.errors import InputError
from fpld.students.folders import ALONE, require
from fpld.students.trunk import LAYER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.students.configs import HuggingFaceConfig


def with_adapters(model: Any, config: HuggingFaceConfig, seed: int) -> Any:
    """Return the model with fresh adapters, which add nothing yet; as it is if none are wanted (rank 0)."""
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
    # The adapters' first draw must neither depend on the global generator nor move it.
    with ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, settings)


def linear_modules(model: Any, last: int) -> list[str]:
    """Return the names of the linear modules inside the last layers of a model (0: all its layers).

    What turns hidden states into logits is none of them: it is the embedding in most models.
    """
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        place = LAYER.search(name)
        if place is not None and (isinstance(module, nn.Linear) or _transposed(module)):
            found.setdefault(int(place[1]), []).append(name)
    if not found:
        kind = type(model).__name__
        raise InputError(f"lora must be 0 for {kind}: it has no linear layers that an adapter could stand beside")
    if last > len(found):
        raise InputError(f"lora_layers must be at most the model's {len(found)} layers, got {last}")
    return [name for layer in sorted(found)[-last:] for name in found[layer]]


def stack(states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return adapters that add the mean of what several add, of as many times the rank."""
    stacked = {}
    for name, first in states[0].items():
        parts = [state[name] for state in states]
        # peft keeps A as [rank, in] and B as [out, rank]; ranks may differ.
        down = "lora_A" in name
        stacked[name] = np.concatenate(parts, axis=0 if down else 1) / (1 if down else len(parts))
        stacked[name] = stacked[name].astype(first.dtype)
    return stacked


def _transposed(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, whose weights stand the other way round."""
    return type(module).__name__ == "Conv1D"
