"""Use a causal language model in the format of Hugging Face as a student, with LoRA or without.

The model comes from a local folder: nothing is looked up on a hub and no code in the folder is run. A large
vocabulary makes logits heavy (V = 49152: 197 kB for each context in float32), so blocks are small and
gradients are summed over a few sequences at a time. LoRA is by Hu et al., "LoRA: Low-Rank Adaptation of Large
Language Models" (2022).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fpld.data.pretrained import PretrainedTokenizer, same_tokens
from fpld.errors import InputError, MissingExtraError
from fpld.storage.arrays import read_arrays
from fpld.students.base import check_count
from fpld.students.configs import HuggingFaceConfig
from fpld.students.export import export_pretrained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from fpld.data import Tokenizer

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("the Hugging Face student", "huggingface") from error

from fpld.students.gradient import GradientStudent

log = logging.getLogger(__name__)

BLOCK_BYTES = 64 << 20
"""The most that one block of logits takes, unless a single sequence takes more."""

# Reading a model and drawing adapters change what the process has once: two threads at it leave weights missing.
_ALONE = threading.Lock()


class Network(nn.Module):
    """Map token ids [B, T] to the logits [B, T, V] of the tokens that follow."""

    def __init__(self, model: nn.Module, bos: int | None) -> None:
        super().__init__()
        self.model = model
        self.bos = bos

    def forward(self, ids: Tensor) -> Tensor:
        """Put the first token before the sequences if there is one; its own logits belong to no context."""
        if self.bos is None:
            out: Tensor = self.model(input_ids=ids, use_cache=False).logits
            return out
        first = torch.full((len(ids), 1), self.bos, dtype=ids.dtype, device=ids.device)
        with_first: Tensor = self.model(input_ids=torch.cat((first, ids), 1), use_cache=False).logits
        return with_first[:, 1:]


class HuggingFace(GradientStudent):
    """A pretrained causal language model; its state is what is trained: adapters, or all weights."""

    kind = "huggingface"
    Config = HuggingFaceConfig
    config: HuggingFaceConfig  # with what was found in the folder

    def __init__(self, config: HuggingFaceConfig, *, seed: int, device: str = "cpu") -> None:
        check_count("seed", seed, 0)
        path = locate(config.path)
        digest = weights_digest(path)
        _agree("weights", config.weights, digest, path)  # before a model is made, which takes longer
        model = load_model(path, config.dtype)
        _agree("vocab", config.vocab, int(model.config.vocab_size), path)
        bos = model.config.bos_token_id if config.bos else None
        if config.bos and bos is None:
            raise InputError(f"bos must be False for {path}: its config.json names no bos_token_id")
        self._positions = getattr(model.config, "max_position_embeddings", None)
        self._network = Network(_with_lora(model, config, seed), bos).eval()
        count = sum(weight.numel() for weight in self._trained().values())
        _agree("parameters", config.parameters, count, path)
        vocab = int(model.config.vocab_size)
        self.config = dataclasses.replace(config, vocab=vocab, parameters=count, weights=digest)
        if self.longest is not None and config.length > self.longest:
            raise InputError(f"length must be at most {self.longest} for {path}, got {config.length}")
        self.to(device)
        if config.dtype == "bfloat16" and self.device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise InputError("dtype must be 'float32' here, got 'bfloat16', but this GPU has none")

    @property
    def micro(self) -> int:
        """Return how many sequences of a minibatch are done at a time."""
        return self.config.micro

    @property
    def longest(self) -> int | None:
        """Return how many positions the model has, less the one that `bos` takes."""
        return None if self._positions is None else int(self._positions) - self.config.bos

    @classmethod
    def load(cls, path: str | Path, *, model: str | Path | None = None) -> Self:
        """Read a student; `model` says where its pretrained model is, if not where it was."""
        if model is None:
            return super().load(path)
        state, metadata = read_arrays(path)
        if metadata.get("kind") != cls.kind:
            raise InputError(f"{path}: kind must be {cls.kind!r}, got {metadata.get('kind')!r}")
        try:
            config = HuggingFaceConfig(**json.loads(metadata["config"]) | {"path": str(model)})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} must hold the configuration of a student, but {error}") from error
        student = cls(config, seed=0)
        student.load_state(state)
        return student

    def copy(self) -> Self:
        """Return a student with the same parameters; weights that are never trained are shared."""
        other = copy.copy(self)
        frozen = {id(weight): weight for weight in self._network.parameters() if not weight.requires_grad}
        other._network = copy.deepcopy(self._network, frozen)
        return other

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer with other tokens than the model's, where the model's folder has one."""
        check_tokenizer(self.config.path, tokenizer)

    def export(self, folder: Path, *, adapter: bool = False) -> None:
        """Write the model with its adapters merged, or the adapters alone; the model's own tokenizer beside it."""
        if adapter and self.config.lora == 0:
            raise InputError("adapter must be False for a student without LoRA (student.lora = 0)")
        tokenizer = load_tokenizer(self.config.path)
        export_pretrained(self._network.model, tokenizer, folder, adapter=adapter, base=Path(self.config.path).name)

    def _blocks(self, sequences: np.ndarray, size: int) -> Iterator[np.ndarray]:
        fits = BLOCK_BYTES // (4 * self.vocab * sequences.shape[1])
        return super()._blocks(sequences, max(1, min(size, fits)))


class HuggingFaceTokenizer(PretrainedTokenizer):
    """The tokenizer of a model: a name of `MODELS`, a folder or a GGUF file."""

    def __init__(self, path: str | os.PathLike[str], *, vocab: int | None = None) -> None:
        """Read it; `vocab` is the V of the model, which may be larger than the tokenizer's own."""
        tokenizer = load_tokenizer(path)
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(f"{path} must hold a tokenizer.json: only fast tokenizers are read")
        super().__init__(tokenizer.backend_tokenizer.to_str(), vocab=vocab)


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Load the tokenizer of a model as transformers has it, with its special tokens."""
    folder, options = _place(locate(path))
    return require("transformers").AutoTokenizer.from_pretrained(folder, **options)


def check_tokenizer(path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with other tokens than those of the model at `path`: equal numbers of them say nothing."""
    place = locate(path)
    if place.is_dir() and not (place / "tokenizer.json").exists():
        log.warning("%s has no tokenizer.json: nobody can tell whether its tokens are those of the federation", path)
        return
    own = HuggingFaceTokenizer(path)
    if not same_tokens(own.library_json(), tokenizer.library_json()):
        raise InputError(
            f"{path} has another tokenizer than the federation, though both may have {own.vocab} tokens: set "
            "tokenizer.kind to 'huggingface' and tokenizer.path to this model, or give a model with the same tokens"
        )


def model_tokenizer(path: str | os.PathLike[str]) -> HuggingFaceTokenizer:
    """Return the tokenizer of a model, with the model's V."""
    folder, options = _place(locate(path))
    try:
        config = require("transformers").AutoConfig.from_pretrained(folder, **options)
        vocab = int(config.vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"{path} must hold the config.json of a language model: {first}") from error
    return HuggingFaceTokenizer(path, vocab=vocab)


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the place of a model: a name of `MODELS` is brought into the cache, any other path is itself."""
    return MODELS[str(path)]() if str(path) in MODELS else Path(path)


def _smollm2() -> Path:
    from fpld.students.smollm2 import prepare_smollm2  # it builds on this module

    return prepare_smollm2()


MODELS: dict[str, Callable[[], Path]] = {"smollm2": _smollm2}
"""Models by name; a student's file holds the name, so that it can move to another machine."""


def load_model(path: Path, dtype: str = "float32") -> Any:
    """Load a model in float32 or bfloat16 from a folder of safetensors or a GGUF file; never from a hub or a pickle."""
    folder, options = _place(path)
    if "gguf_file" in options:
        require("gguf")
    else:
        options["use_safetensors"] = True
    wanted = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    automatic = require("transformers").AutoModelForCausalLM
    try:
        with _ALONE:
            model, report = automatic.from_pretrained(folder, dtype=wanted, output_loading_info=True, **options)
    except Exception as error:  # the readers of weights raise types of their own
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"{path} must hold a causal language model that can be read: {first}") from error
    if report["missing_keys"]:  # they would be drawn at random, with no more than a line in a log
        raise InputError(f"{path} must hold all weights of its model, missing are {sorted(report['missing_keys'])}")
    return model


def weights_digest(path: Path) -> str:
    """Return the SHA-256 over the names and contents of the weight files, in sorted order."""
    _place(path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"{path} must hold *.safetensors, got none: save the model with save_pretrained()")
    hashed = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashed.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return hashed.hexdigest()


def require(module: str) -> Any:
    """Import an optional module; `transformers` learns before its import that there is no hub."""
    # Read when transformers is imported. Without it a mistyped folder is looked up on the hub, for 47 s.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"a Hugging Face model ({module})", "huggingface") from error
    if module == "transformers":
        found.utils.logging.disable_progress_bar()
    return found


def _place(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the folder and the options by which transformers finds what is at `path`."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name, **options}
    if not path.is_dir():
        raise InputError(f"{path} must be a model folder or a .gguf file on this machine, and is neither")
    return str(path), options


def _agree(name: str, said: object, found: object, path: Path) -> None:
    if said and said != found:
        raise InputError(
            f"{name} must be {said} for this student, but {path} has {found}: "
            "give the folder of the model that the student was made from"
        )


def _with_lora(model: Any, config: HuggingFaceConfig, seed: int) -> Any:
    if config.lora == 0:
        return model
    peft = require("peft")
    settings = peft.LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    # The adapters' first draw must neither depend on the global generator nor move it.
    with _ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, settings)
