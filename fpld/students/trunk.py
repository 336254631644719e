"""The layers of a model below its lowest adapter. They never change, so what they make of a sequence can be kept.

Where adapters stand in the last ten of thirty layers, a sequence that is seen again costs a third of the layers. Any
causal model of transformers is cut by hooks: it runs as it is, but its lower layers are left out, and the first one
above them is handed what they would have given it.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

LAYER = re.compile(r"\.(\d+)\.")
"""The number of a layer in a module's name."""


class _Reached(Exception):  # noqa: N818  # no error: the lower layers are done
    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


class Trunk:
    """The layers below `first`, the lowest layer with an adapter; `run` runs the whole model."""

    def __init__(self, below: list[nn.Module], first: nn.Module) -> None:
        self.below, self.first = below, first

    @torch.no_grad()
    def states(self, run: Callable[[], Any]) -> Tensor:
        """Return the hidden states [B, T, C] that enter the first layer above; the layers there are not run."""

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
        """Let the model take these hidden states for what its lower layers give."""

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
                del layer.forward  # its class's own is seen again


def _skip(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG001  # the form of a layer
    return hidden_states


def find_trunk(model: nn.Module) -> Trunk | None:
    """Return the layers of a model that lie below all that is trained; None if there are none."""
    found = set()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            place = LAYER.search(name)
            if place is None:
                return None
            found.add((name[: place.start()], int(place[1])))
    if len({path for path, _ in found}) != 1 or min(found)[1] == 0:
        return None
    path, number = min(found)
    layers: Any = model.get_submodule(path)
    return Trunk(list(layers[:number]), layers[number])
