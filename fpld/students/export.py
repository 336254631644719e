"""Students as folders that `transformers` and `peft` read without this package.

The files depend on the student alone: no path of this machine is in them.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from fpld.storage.arrays import dump_arrays
from fpld.storage.files import read_utf8, write_shared, write_shared_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

    from fpld.data import Tokenizer
    from fpld.students.configs import TransformerConfig

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADAPTER_CONFIG = "adapter_config.json"
END_NAME = "<|endoftext|>"  # the name that other programs look for
# transformers fills in tokens 1 and 2 where a Llama's configuration names none, and stops at the second.
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_PATH_KEYS = ("_name_or_path", "name_or_path")


def export_llama(config: TransformerConfig, weights: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write weights by their names in transformers as a LlamaForCausalLM."""
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    _write_json(folder / CONFIG, {**settings, **config.llama, **_NO_SPECIAL_TOKENS})
    # A number of new tokens gives way to the caller's; beside a greatest length transformers would warn of both.
    _write_json(folder / GENERATION, {"do_sample": True, "max_new_tokens": config.length, **_NO_SPECIAL_TOKENS})
    write_shared_bytes(folder / WEIGHTS, dump_arrays(dict(weights), {"format": "pt"}))


def export_pretrained(model: Any, tokenizer: Any, folder: Path, *, adapter: bool, base: str) -> None:
    """Write a model of transformers, its adapters merged, or the adapters of peft alone, for the model named `base`."""
    if hasattr(model, "merge_and_unload") and not adapter:
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # an empty form that peft writes
    for name in (CONFIG, TOKENIZER_CONFIG, ADAPTER_CONFIG):
        if (folder / name).exists():
            settings = json.loads(read_utf8(folder / name))
            settings = {key: value for key, value in settings.items() if key not in _PATH_KEYS}
            _write_json(folder / name, settings | ({"base_model_name_or_path": base} if name == ADAPTER_CONFIG else {}))


def export_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int | None) -> None:
    """Write a tokenizer for AutoTokenizer; one that the model brought along is left, with its special tokens."""
    if (folder / TOKENIZER_CONFIG).exists():
        return
    serial = tokenizer.library_json()
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    end: int | None = getattr(tokenizer, "end_of_text", None)
    if end is not None:
        serial = _with_end(serial, end)
        # A text begins as it would after another one, which is where programs put the first token.
        settings |= {"bos_token": END_NAME, "eos_token": END_NAME}
        for name in (CONFIG, GENERATION):
            values = json.loads(read_utf8(folder / name)) if (folder / name).exists() else None
            if values is not None:
                _write_json(folder / name, values | {"bos_token_id": end, "eos_token_id": end})
    write_shared(folder / TOKENIZER, serial)
    _write_json(folder / TOKENIZER_CONFIG, settings | ({} if longest is None else {"model_max_length": longest}))


def _with_end(serial: str, end: int) -> str:
    """Return the tokenizer with its token of U+0003 under the usual name, as a special token that no text spells."""
    value = json.loads(serial)
    vocab = value["model"]["vocab"]
    value["model"]["vocab"] = {END_NAME if number == end else token: number for token, number in vocab.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    value["added_tokens"] = [{"id": end, "content": END_NAME, **flags, "special": True}]
    return json.dumps(value)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_shared(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
