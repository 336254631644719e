"""Pretrained models as they lie on a disk: a folder in the format of Hugging Face, a GGUF file, or a model by name.

Nothing is looked up on a hub, no pickle is read, and no code in a folder is run.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.data.pretrained import PretrainedTokenizer, same_tokens
from fpld.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.data import Tokenizer

log = logging.getLogger(__name__)

# Reading a model and drawing adapters change what the process has once: two threads at it leave weights missing.
ALONE = threading.Lock()


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
    automatic = require("transformers").AutoModelForCausalLM
    try:
        with ALONE:
            model, report = automatic.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
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
