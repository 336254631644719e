"""A student that predicts symbols at places of text: a model over its own tokens, seen through its map A.

`PlaceStudent` is a student of V = the alphabet. Its sequences are rows of a probe set of places; the model reads the
same passages as its own tokens. Its logits are log A q at each place, and it is distilled by the cross entropy
-sum_v t_v log (A q)_v, whose gradient goes through A to all weights of the model. Everything else (its weights, copies,
training on text) is the model's own.

With q = softmax(z) and r = A q, the gradient of the loss with respect to z_k is q_k (sum_j q_j g_j - g_k), where g =
A^T (t / r). It is computed by blocks of contexts together with the loss, as that over tokens (`fpld.students.losses`):
no array of logits of a minibatch is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from fpld.data.label_space import ONE
from fpld.errors import InputError
from fpld.students.base import Student
from fpld.students.losses import make_teacher, read_out_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fpld.data.label_space import TokenMap
    from fpld.data.places import Reading
    from fpld.students.base import Distillation
    from fpld.students.configs import Compute
    from fpld.students.gradient import GradientStudent
    from fpld.students.processes import Group
    from fpld.target import Target

LEAST_PROBABILITY = 1e-20
"""The least probability of a symbol: it may be one to which no token of a model leads."""
_PASSAGES = 32  # that a model reads at a time
_CONTEXTS = 32  # whose probabilities are mapped in one sparse product


class MapProduct:
    """The products of a map with the probabilities of many contexts, on a device."""

    def __init__(self, space: TokenMap, device: torch.device) -> None:
        places = torch.from_numpy(np.stack([space.symbols, space.tokens]).astype(np.int64))
        shares = torch.from_numpy((space.shares / ONE).astype(np.float32))
        down = torch.sparse_coo_tensor(places, shares, (space.size, space.vocab), check_invariants=True).coalesce()
        self._down = down.to(device)
        self._up = down.t().coalesce().to(device)

    def symbols(self, q: Tensor) -> Tensor:
        """Return A q [n, V] of probabilities of tokens [n, V_i]."""
        return (self._down @ q.t()).t()

    def tokens(self, g: Tensor) -> Tensor:
        """Return A^T g [n, V_i] of values of symbols [n, V]."""
        return (self._up @ g.t()).t()


class PlaceStudent(Student):
    """A model as a student over the symbols of a probe set of places, which it reads as tokens of its own."""

    kind = "places"

    def __init__(self, model: GradientStudent, reading: Reading) -> None:
        if model.vocab != reading.space.vocab:
            raise InputError(
                f"the map must be from the model's {model.vocab} tokens, and is from {reading.space.vocab}"
            )
        longest = int(reading.ends.max()) + 1
        if model.longest is not None and model.longest < longest:
            raise InputError(
                f"student.length must be at least the {longest} tokens of the longest context, got {model.longest}: "
                "set it higher, or probe.length lower"
            )
        self.model = model
        self.reading = reading
        self.config = model.config
        self._map = MapProduct(reading.space, model.device)

    @property
    def vocab(self) -> int:
        """Return V, the number of symbols."""
        return self.reading.space.size

    @property
    def window(self) -> int:
        """Return how many tokens of context training on text uses."""
        return self.model.window

    @property
    def longest(self) -> int | None:
        """Return None: sequences are those of the probe set."""
        return None

    @property
    def place(self) -> str:
        """Return the device and the precision, for people to read."""
        return self.model.place

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the model's parameters."""
        return self.model.state()

    def _set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.model._set_state(state)

    def join(self, group: Group, device: torch.device, *, shard: bool) -> Self:
        """Be one of the processes that train the model together."""
        self.model.join(group, device, shard=shard)
        self._map = MapProduct(self.reading.space, device)
        return self

    def compute_with(self, compute: Compute) -> Self:
        """Let the model train with what a machine has."""
        self.model.compute_with(compute)
        return self

    def recipe(self) -> tuple[Callable[..., Student], tuple[Any, ...]]:
        """Return a function and its arguments that make an equal student in another process."""
        return type(self), (self.model, self.reading)

    def copy(self) -> Self:
        """Return a student with the same parameters that shares none of them."""
        return type(self)(self.model.copy(), self.reading)

    def _blocks(self, sequences: np.ndarray, size: int) -> Iterator[np.ndarray]:
        # Hidden states of whole passages are held, and logits of a few places.
        return super()._blocks(sequences, min(size, _PASSAGES))

    @torch.inference_mode()
    def _block(self, sequences: np.ndarray) -> np.ndarray:
        features, weight = self._at_places(sequences)
        blocks = []
        for start in range(0, len(features), _CONTEXTS):
            part = features[start : start + _CONTEXTS]
            logits = part if weight is None else torch.mm(part, weight.t())
            blocks.append(self._map.symbols(logits.float().softmax(dim=1)).clamp_(min=LEAST_PROBABILITY).log_())
        rows: np.ndarray = torch.cat(blocks).cpu().numpy()
        return rows

    def _at_places(self, sequences: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [B*T, C] at the places of passages and the read-out; or the logits, and None."""
        passages = self.reading.rows(sequences)
        ends = self.reading.ends[passages]
        tokens = self.reading.tokens[passages, : int(ends.max()) + 1]
        values, weight = self.model.read_out_parts(tokens)
        device = values.device
        rows = torch.arange(len(passages), device=device)[:, None]
        return values[rows, torch.from_numpy(ends).to(device)].flatten(0, 1), weight

    def _target_loss(self, sequences: np.ndarray, t: Tensor) -> Tensor:
        """Return the mean cross entropy of the symbols at places [B, T] to targets [B, T, V]."""
        features, weight = self._at_places(sequences)
        targets = t.flatten(0, 1)
        if weight is None:
            # The logits are there already, as those of the model's own token loss are. The map keeps float32.
            with torch.autocast(features.device.type, enabled=False):
                log_r = self._map.symbols(features.float().softmax(dim=1)).clamp(min=LEAST_PROBABILITY).log()
                return -(targets * log_r).sum() / len(targets)

        def finish(logits: Tensor, rows: slice) -> Tensor:
            some = targets[rows]
            q = torch.softmax(logits, dim=1)
            r = self._map.symbols(q).clamp_(min=LEAST_PROBABILITY)
            g = self._map.tokens(some / r)
            torch.mul(q, (q * g).sum(dim=1, keepdim=True) - g, out=logits)
            return -(some * r.log_()).sum()

        return read_out_loss(features, weight, finish, _CONTEXTS)

    def _finetune(self, tokens: np.ndarray, steps: int, seed: int, rate: float | None) -> float:
        return self.model._finetune(tokens, steps, seed, rate)

    def _check_sequences(self, sequences: np.ndarray) -> np.ndarray:
        places = np.asarray(sequences)
        if places.ndim != 2 or places.shape[1:] != self.reading.ends.shape[1:]:
            length = self.reading.ends.shape[1]
            raise InputError(f"sequences must be rows of {length} positions, got shape {places.shape}")
        self.reading.rows(places)
        return places

    def _check_distillation(self, how: Distillation) -> Distillation:
        return self.model._check_distillation(how)  # public text is in the model's own tokens

    def _distill(self, sequences: np.ndarray, target: Target, reference: Student | None, how: Distillation) -> float:
        if self.model.in_processes:
            arguments = (sequences, target, reference, how)
            return self.model.train_in_processes(self, "_distill", arguments, how.batch)
        teacher = make_teacher(target, sequences, reference, self.model.device)
        return self.model.learn(sequences, teacher, how, self._target_loss, self.vocab)
