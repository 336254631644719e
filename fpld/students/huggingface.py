"""Use a causal language model in the format of Hugging Face as a student, with LoRA or without.

The model comes from a local folder: nothing is looked up on a hub and no code in the folder is run. A large vocabulary
makes logits large (V = 49152: 197 kB for each context in float32), so blocks are small and gradients are summed over a
few sequences at a time.
"""

from __future__ import annotations

import copy
import dataclasses
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from fpld.errors import InputError, MissingExtraError, ParameterError
from fpld.students.configs import HuggingFaceConfig
from fpld.students.export import export_pretrained
from fpld.students.pretrained import check_tokenizer, load_model, load_transformers_tokenizer, locate, model_digest
from fpld.validation import check_count, check_sequences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fpld.data import Tokenizer
    from fpld.students.base import Predictor
    from fpld.students.configs import Compute

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise MissingExtraError("the Hugging Face student", "huggingface") from error

from fpld.students.causal import CausalNetwork, recompute, stack, text_config, transformer_layers, with_adapters
from fpld.students.gradient import GradientStudent, TensorPredictor, some_tokens
from fpld.students.losses import target_loss, token_loss
from fpld.students.processes import shard_weights

BLOCK_BYTES = 64 << 20
"""Bytes of one block of logits at most, unless a single sequence takes more."""
CACHE_BYTES = 512 << 20
"""Bytes of cached hidden states of the trunk at most; those of further sequences are computed each time."""
_TRUNK_CACHE: dict[tuple[object, ...], dict[bytes, Tensor]] = {}
"""Hidden states of the trunk, by model and by sequence: they never change, so students of a process share them."""


class CachingPredictor(TensorPredictor):
    """Keep the last hidden states of sequences: C numbers for each context instead of V."""

    student: HuggingFace

    def __init__(self, student: HuggingFace, sequences: np.ndarray) -> None:
        super().__init__(student, sequences)
        self._features = torch.empty(0)  # [S, T, C], once C is known
        self._computed = np.zeros(len(sequences), bool)

    @torch.no_grad()
    def tensor(self, rows: np.ndarray) -> Tensor:
        """Return the logits [B, T, V] of some sequences, on the student's device."""
        new = rows[~self._computed[rows]]
        if new.size:
            features = self.student.features(self.sequences[new])
            if not self._computed.any():
                self._features = features.new_empty((len(self.sequences), *features.shape[1:]))
            self._features[new] = features
            self._computed[new] = True
        return self.student.read_out(self._features[rows])


class HuggingFace(GradientStudent):
    """A pretrained causal language model; its state is what is trained: adapters, or all weights."""

    kind = "huggingface"
    Config = HuggingFaceConfig
    config: HuggingFaceConfig  # with V, parameters and weights of the model in the folder
    _network: CausalNetwork
    _trunk_cache: dict[bytes, Tensor]  # hidden states by sequence

    def __init__(self, config: HuggingFaceConfig, *, seed: int, device: str = "cpu") -> None:
        check_count("seed", seed, 0)
        path = locate(config.path)
        digest = model_digest(path)
        # Checked before the model is loaded, which takes longer.
        _check_same("weights", config.weights, digest, path)
        model = load_model(path, config.dtype)
        vocab = int(text_config(model).vocab_size)
        _check_same("vocab", config.vocab, vocab, path)
        bos = text_config(model).bos_token_id if config.bos else None
        if config.bos and bos is None:
            raise ParameterError("bos", f"must be False for {path}: its config.json names no bos_token_id")
        self._positions = getattr(text_config(model), "max_position_embeddings", None)
        if config.checkpointing:
            recompute(model.eval())
        network = CausalNetwork(with_adapters(model, config, seed), bos)
        self._network = network if config.checkpointing else network.eval()
        self._network.examine(str(path))
        count = sum(weight.numel() for weight in self._trained().values())
        _check_same("parameters", config.parameters, count, path)
        self.config = dataclasses.replace(config, vocab=vocab, parameters=count, weights=digest)
        if self.longest is not None and config.length > self.longest:
            raise ParameterError("length", f"must be at most {self.longest} for {path}, got {config.length}")
        self.to(device)
        if config.dtype == "bfloat16" and self.device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ParameterError("dtype", "must be 'float32' here, got 'bfloat16', but this GPU has none")

    @property
    def micro(self) -> int:
        """Return how many sequences of a minibatch are done at a time."""
        return self.config.micro

    @property
    def longest(self) -> int | None:
        """Return how many positions the model has, less the one that `bos` takes."""
        return None if self._positions is None else int(self._positions) - self.config.bos

    def to(self, device: str) -> Self:
        """Move to a device ("auto", "cpu", "cuda" or "mps") in place."""
        super().to(device)
        trunk = self._network.trunk
        config = self.config
        depth = 0 if trunk is None else len(trunk.below)
        self._trunk_cache = _TRUNK_CACHE.setdefault(
            (config.weights, config.dtype, config.bos, depth, str(self.device)), {}
        )
        return self

    def _check_sharding(self, compute: Compute) -> None:
        if self.config.dtype == "4bit":
            raise ParameterError("shard", "must be false for a model in four bits: each process has all of it")
        if compute.at_once == "auto":
            raise ParameterError("at_once", "must be a number where shard is true: processes cannot try by themselves")
        if compute.dtype == "float16":
            raise ParameterError("dtype", "must be 'bfloat16' or 'float32' where shard is true, got 'float16'")

    def _shard(self, device: torch.device) -> None:
        shard_weights(self._network.uncut(), transformer_layers(self._network.model), device)

    def next_logits(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from the next tokens [B] of B sequences to the logits [B, V] after them."""
        past = None

        @torch.inference_mode()
        def following(tokens: np.ndarray) -> np.ndarray:
            nonlocal past
            logits, past = self._network.step(self._ids(tokens)[:, None], past)
            rows: np.ndarray = logits.float().cpu().numpy()
            return rows

        return following

    @classmethod
    def load(cls, path: str | Path, *, model: str | Path | None = None) -> Self:
        """Read a student; `model` is the place of its pretrained model, if that has moved."""
        return cls._load(path, {} if model is None else {"path": str(model)})

    def copy(self) -> Self:
        """Return a student with the same parameters; weights that are never trained are shared."""
        other = copy.copy(self)
        frozen = {id(weight): weight for weight in self._network.parameters() if not weight.requires_grad}
        wide = self._network.wide
        other._network = copy.deepcopy(self._network, frozen if wide is None else {**frozen, id(wide): wide})
        return other

    def stacked(self, states: Sequence[Mapping[str, np.ndarray]]) -> Self:
        """Return a student whose adapters add the mean of what those of several states add."""
        ranks = self.config.lora * len(states)
        alpha = self.config.lora_alpha * len(states)
        config = dataclasses.replace(self.config, lora=ranks, lora_alpha=alpha, parameters=0)
        other = type(self)(config, seed=0, device=self.device.type)
        other.load_state(stack(states))
        return other

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer with other tokens than the model's, where the model's folder has one."""
        check_tokenizer(self.config.path, tokenizer)

    def export(self, folder: Path, *, adapter: bool = False) -> None:
        """Write the model with its adapters merged, or the adapters alone; the model's own tokenizer beside it."""
        if adapter and self.config.lora == 0:
            raise InputError("adapter must be False for a student without LoRA (student.lora = 0)")
        if self.config.dtype == "4bit" and not adapter:
            raise InputError(
                "adapter must be True for a model in four bits (student.dtype): merge it with the whole model elsewhere"
            )
        tokenizer = load_transformers_tokenizer(self.config.path)
        export_pretrained(self._network.model, tokenizer, folder, adapter=adapter, base=Path(self.config.path).name)

    def predictor(self, sequences: np.ndarray) -> Predictor:
        """Return a predictor of these sequences that keeps hidden states, where the model allows it."""
        sequences = check_sequences(sequences, self.vocab, self.longest)
        return CachingPredictor(self, sequences) if self._network.separable else TensorPredictor(self, sequences)

    def predict(self, sequences: np.ndarray) -> Tensor:
        """Return the logits [B, T, V] of the tokens that follow, on the student's device."""
        return self.read_out(self.features(sequences)) if self._network.separable else super().predict(sequences)

    def features(self, sequences: np.ndarray) -> Tensor:
        """Return the last hidden states [B, T, C] of sequences [B, T]."""
        ids = self._ids(sequences)
        if self._network.trunk is None:
            return self._network.features(ids)
        return self._network.features_above(ids, self._states_below(sequences, ids))

    def _states_below(self, sequences: np.ndarray, ids: Tensor) -> Tensor:
        """Return the output of the trunk for some sequences, from the cache where it is there."""
        keys = [row.tobytes() for row in sequences.astype(np.int64)]
        new = {key: index for index, key in enumerate(keys) if key not in self._trunk_cache}
        fresh: dict[bytes, Tensor] = {}
        if new:
            # Not in inference mode, whatever mode the caller is in: a later gradient may go through cached states.
            # One by one: cached states must not depend on the other sequences of a minibatch. And in float32, whatever
            # the precision of training: predictions for the wire are made of them too.
            with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
                fresh = {key: self._network.below(ids[row : row + 1])[0] for key, row in new.items()}
            room = CACHE_BYTES // fresh[next(iter(new))].nbytes - len(self._trunk_cache)
            self._trunk_cache.update(islice(fresh.items(), max(room, 0)))
        return torch.stack([fresh[key] if key in fresh else self._trunk_cache[key] for key in keys])

    def read_out(self, features: Tensor) -> Tensor:
        """Return the logits [B, T, V] of hidden states, in float32."""
        return self._network.read_out(features).float()

    def read_out_parts(self, sequences: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states [B, T, C] and the read-out, if that is frozen; else the logits, and None."""
        weight = self._network.frozen_read_out
        return (self.predict(sequences), None) if weight is None else (self.features(sequences), weight)

    def _token_loss(self, ids: Tensor, learnt: Tensor | None = None) -> Tensor:
        weight = self._network.frozen_read_out
        if weight is None:
            return super()._token_loss(ids, learnt)
        features, following = some_tokens(self._network.features(ids[:, :-1]), ids, learnt)
        return token_loss(features, weight, following)

    def _target_loss(self, sequences: np.ndarray, t: Tensor) -> Tensor:
        weight = self._network.frozen_read_out
        if weight is None:
            return super()._target_loss(sequences, t)
        return target_loss(self.features(sequences).flatten(0, 1), weight, t.flatten(0, 1))

    def _blocks(self, sequences: np.ndarray, size: int) -> Iterator[np.ndarray]:
        fits = BLOCK_BYTES // (4 * self.vocab * sequences.shape[1])
        return super()._blocks(sequences, max(1, min(size, fits)))


def _check_same(name: str, expected: object, actual: object, path: Path) -> None:
    if expected and expected != actual:
        raise InputError(
            f"{name} must be {expected} for this student, but {path} has {actual}: "
            "give the folder of the model that the student was made from"
        )
