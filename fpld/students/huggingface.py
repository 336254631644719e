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
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fpld.arrays import read_arrays
from fpld.data.tokenize import check_tokens
from fpld.errors import InputError, MissingExtraError
from fpld.files import canonical_json
from fpld.students.base import Progress, Student, check_count, tail_mean
from fpld.students.transformer import pick_device, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("the Hugging Face student", "huggingface") from error

BLOCK_BYTES = 64 << 20
"""The most that one block of logits takes, unless a single sequence takes more."""


@dataclass(frozen=True)
class HuggingFaceConfig:
    """Say which model it is and how it is trained.

    `path` is a model folder (config.json, *.safetensors, tokenizer files) or a GGUF file. `bos` puts the
    model's first token before every sequence. `lora` is the rank of the adapters, on all linear layers; 0
    trains all weights. A minibatch of `batch` windows of `length` tokens is done `micro` at a time.

    The last three say what was found in the folder: V, how many parameters are trained, and the SHA-256 of
    the pretrained weights. Left empty they are filled in; given, as in a student's file, they are checked,
    since adapters fit only the model that they were made for.
    """

    path: str
    bos: bool = False
    lora: int = 8
    lora_alpha: float = 16.0
    length: int = 64
    batch: int = 4
    micro: int = 4
    rate: float = 5e-4
    distill_rate: float = 5e-4
    weight_decay: float = 0.0
    clip: float = 1.0
    vocab: int = 0
    parameters: int = 0
    weights: str = ""

    def __post_init__(self) -> None:
        for name in ("lora", "vocab", "parameters"):
            check_count(name, getattr(self, name), 0)
        for name in ("length", "batch", "micro"):
            check_count(name, getattr(self, name), 1)
        for name in ("rate", "distill_rate", "clip", "lora_alpha"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay must be a number of at least 0, got {self.weight_decay!r}")


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


class HuggingFace(Student):
    """A pretrained causal language model; its state is what is trained: adapters, or all weights."""

    kind = "huggingface"
    Config = HuggingFaceConfig

    def __init__(self, config: HuggingFaceConfig, *, seed: int, device: str = "cpu") -> None:
        check_count("seed", seed, 0)
        path = Path(config.path)
        digest = weights_digest(path)
        _agree("weights", config.weights, digest, path)  # before a model is made, which takes longer
        model = load_model(path)
        _agree("vocab", config.vocab, int(model.config.vocab_size), path)
        bos = model.config.bos_token_id if config.bos else None
        if config.bos and bos is None:
            raise InputError(f"bos must be False for {path}: its config.json names no bos_token_id")
        self._positions = getattr(model.config, "max_position_embeddings", None)
        self._network = Network(_with_lora(model, config, seed), bos).eval()
        count = sum(weight.numel() for weight in self._trained().values())
        _agree("parameters", config.parameters, count, path)
        vocab = int(model.config.vocab_size)
        self._config = dataclasses.replace(config, vocab=vocab, parameters=count, weights=digest)
        if self.longest is not None and config.length > self.longest:
            raise InputError(f"length must be at most {self.longest} for {path}, got {config.length}")
        self.to(device)

    @property
    def config(self) -> HuggingFaceConfig:
        """Return the configuration, with what was found in the folder."""
        return self._config

    @property
    def window(self) -> int:
        """Return how many tokens of context training uses."""
        return self._config.length

    @property
    def longest(self) -> int | None:
        """Return how many positions the model has, less the one that `bos` takes."""
        return None if self._positions is None else int(self._positions) - self._config.bos

    @classmethod
    def _make(cls, config: HuggingFaceConfig) -> Self:
        return cls(config, seed=0)

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
        student = cls._make(config)
        student.load_state(state)
        return student

    def to(self, device: str) -> Self:
        """Move to a device ("auto", "cpu" or "cuda") in place; a file is always loaded to the CPU."""
        self.device = pick_device(device)
        self._network.to(self.device)
        return self

    def copy(self) -> Self:
        """Return a student with the same parameters; weights that are never trained are shared."""
        other = copy.copy(self)
        frozen = {id(weight): weight for weight in self._network.parameters() if not weight.requires_grad}
        other._network = copy.deepcopy(self._network, frozen)
        return other

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self._network.named_parameters() if weight.requires_grad}

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the parameters that are trained."""
        return {name: weight.detach().cpu().numpy().copy() for name, weight in self._trained().items()}

    @torch.no_grad()
    def _set_state(self, state: Mapping[str, np.ndarray]) -> None:
        for name, weight in self._trained().items():
            weight.copy_(torch.from_numpy(state[name]))

    def _blocks(self, sequences: np.ndarray, size: int) -> Iterator[np.ndarray]:
        fits = BLOCK_BYTES // (4 * self.vocab * sequences.shape[1])
        return super()._blocks(sequences, max(1, min(size, fits)))

    @torch.inference_mode()
    def _block(self, sequences: np.ndarray) -> np.ndarray:
        out: np.ndarray = self._network(self._ids(sequences)).float().cpu().numpy()
        return out.reshape(-1, self.vocab)

    def _ids(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def _finetune(
        self, tokens: np.ndarray, steps: int, seed: int, rate: float | None, progress: Progress | None
    ) -> float:
        rng = np.random.default_rng(seed)
        rate = rate or self._config.rate
        return self._train(lambda: self._text_step(tokens, rng, 1.0), steps, rate, progress)

    def _distill(
        self,
        sequences: np.ndarray,
        targets: np.ndarray,
        steps: int,
        seed: int,
        rate: float | None,
        public: np.ndarray | None,
        public_weight: float,
        progress: Progress | None,
    ) -> float:
        rng = np.random.default_rng(seed)
        order = np.empty(0, np.int64)

        def divergence(rows: np.ndarray) -> Tensor:
            return self._divergence(sequences[rows], targets[rows])

        def step() -> float:
            nonlocal order
            while len(order) < self._config.batch:  # every sequence once before any twice
                order = np.concatenate([order, rng.permutation(len(sequences))])
            chosen, order = order[: self._config.batch], order[self._config.batch :]
            value = self._accumulate(lambda part: divergence(chosen[part]))
            return value if public is None else value + self._text_step(public, rng, public_weight)

        return self._train(step, steps, rate or self._config.distill_rate, progress)

    def _text_step(self, tokens: np.ndarray, rng: np.random.Generator, weight: float) -> float:
        """Add the gradient of `weight` times the cross entropy of windows that start at random places."""
        starts = rng.integers(len(tokens) - self.window, size=self._config.batch)
        windows = tokens[starts[:, None] + np.arange(self.window + 1)]  # [B, T+1]

        def loss(part: slice) -> Tensor:
            ids = self._ids(windows[part])
            logits = self._network(ids[:, :-1]).flatten(0, 1).float()
            return weight * nn.functional.cross_entropy(logits, ids[:, 1:].flatten())

        return self._accumulate(loss)

    def _divergence(self, sequences: np.ndarray, targets: np.ndarray) -> Tensor:
        """Return the mean over contexts of KL(softmax(targets) || student), with targets [B, T, V]."""
        log_p = nn.functional.log_softmax(torch.from_numpy(targets).to(self.device), dim=-1)
        log_q = nn.functional.log_softmax(self._network(self._ids(sequences)).float(), dim=-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    def _accumulate(self, loss: Callable[[slice], Tensor]) -> float:
        """Sum the gradients of a minibatch a few sequences at a time, to hold few logits in memory."""
        batch, total = self._config.batch, 0.0
        for start in range(0, batch, self._config.micro):
            part = slice(start, min(start + self._config.micro, batch))
            value = loss(part) * ((part.stop - part.start) / batch)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        return total

    def _train(self, step: Callable[[], float], steps: int, rate: float, progress: Progress | None) -> float:
        """Take AdamW steps; the optimizer starts anew, so the parameters are all the state."""
        weights = list(self._trained().values())
        decay = self._config.weight_decay
        optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=decay, fused=True)
        losses = []
        for index in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(index, steps)
            optimizer.zero_grad()
            losses.append(step())
            nn.utils.clip_grad_norm_(weights, self._config.clip)
            optimizer.step()
            if progress is not None:
                progress(index + 1, steps, losses[-1])
        return tail_mean(losses)


class HuggingFaceTokenizer:
    """The tokenizer of a model folder or a GGUF file, as a `fpld.data.Tokenizer`; adds no special token."""

    def __init__(self, path: str | os.PathLike[str], *, vocab: int | None = None) -> None:
        """Read it; `vocab` is the V of the model, which may be larger than the tokenizer's own."""
        folder, options = _place(Path(path))
        tokenizer = require("transformers").AutoTokenizer.from_pretrained(folder, **options)
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(f"{path} must hold a tokenizer.json: only fast tokenizers are read")
        self._backend = tokenizer.backend_tokenizer
        own = int(self._backend.get_vocab_size())
        self.vocab = own if vocab is None else vocab
        if self.vocab < own:
            raise InputError(f"vocab must be at least the tokenizer's {own}, got {vocab}")

    @property
    def digest(self) -> str:
        """Give the SHA-256 over the tokens and their ids, the merges and V."""
        model = json.loads(self._backend.to_str())["model"]
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])]
        serial = {"vocab": self.vocab, "tokens": self._backend.get_vocab(), "merges": merges}
        return hashlib.sha256(canonical_json(serial)).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Give the token ids of `text`."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Give the text of token ids."""
        ids = check_tokens(tokens, self.vocab).ravel().tolist()
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def text_bytes(self, tokens: np.ndarray) -> int:
        """Give the bytes of the decoded text; a character that is cut counts as its replacement mark."""
        return len(self.decode(tokens).encode())


def load_model(path: Path) -> Any:
    """Load a model in float32 from a folder of safetensors or a GGUF file; never from a hub or a pickle."""
    folder, options = _place(path)
    if "gguf_file" in options:
        require("gguf")
    else:
        options["use_safetensors"] = True
    automatic = require("transformers").AutoModelForCausalLM
    try:
        model, report = automatic.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    except Exception as error:  # the readers of weights raise types of their own
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"{path} must hold a causal language model that can be read: {first}") from error
    if report["missing_keys"]:  # they would be drawn at random, with no more than a line in a log
        raise InputError(f"{path} must hold all weights of its model, missing are {sorted(report['missing_keys'])}")
    return model


def weights_digest(path: Path) -> str:
    """Give the SHA-256 over the names and contents of the weight files, in sorted order."""
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
    """Give the folder and the options by which transformers finds what is at `path`."""
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, settings)
