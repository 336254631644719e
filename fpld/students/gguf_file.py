"""Students as GGUF files, for llama.cpp and what is built on it.

A GGUF file has the weights, the shape of the model and the tokenizer in one. It is written from a folder that
`fpld.students.export` made for transformers, so there is one place that names weights. Three points differ there:

- llama.cpp turns pairs of neighbouring values by the rotary embedding, transformers a value of the first half of a head
  with one of the second. So the rows of the query and key matrices change places.
- The tokens of a byte-level BPE are stored as the text that the tokenizer has for them, and merges as pairs.
- A tokenizer of bytes has no merges, and llama.cpp wants one: it gets a pair whose result is no token, which has no
  effect.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError, MissingExtraError
from fpld.storage.arrays import read_arrays
from fpld.storage.files import read_utf8
from fpld.students.export import CONFIG, TOKENIZER, WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURE = "LlamaForCausalLM"
_NO_MERGE = "! !"  # its result is no token of a tokenizer of bytes


def write_gguf(folder: Path, file: Path, *, name: str, licence: str | None = None) -> None:
    """Write the model in a folder of transformers as a GGUF file in float32.

    Parameters
    ----------
    folder
        A Llama with its tokenizer, a byte-level BPE: config.json, model.safetensors, tokenizer.json.
    file
        The file to write.
    name, licence
        What is said of the model in the file.

    Raises
    ------
    InputError
        If the model is no Llama, or the tokenizer no byte-level BPE.
    MissingExtraError
        If the library `gguf` is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("A GGUF file", "huggingface") from None
    config = json.loads(read_utf8(folder / CONFIG))
    if config.get("architectures") != [ARCHITECTURE]:
        raise InputError(f"--to gguf is for a Llama, got {config.get('architectures')}: use llama.cpp's own converter")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(name)
    if licence is not None:
        writer.add_license(licence)
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, json.loads(read_utf8(folder / TOKENIZER)), config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    weights, _ = read_arrays(folder / WEIGHTS)
    for weight, array in weights.items():
        values = array.astype(np.float32)
        if weight.endswith("q_proj.weight"):
            values = _neighbouring(values, heads)
        elif weight.endswith("k_proj.weight"):
            values = _neighbouring(values, key_heads)
        target = names.get_name(weight, try_suffixes=(".weight",))
        if target is None:
            raise InputError(f"--to gguf: the model has weights that llama.cpp has no place for: {weight}")
        writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_base(config: dict[str, Any]) -> float:
    """Return the base of the rotary embedding, which newer configurations have in a table."""
    table = config.get("rope_parameters") or {}
    return float(config.get("rope_theta") or table.get("rope_theta") or 10000.0)


def _neighbouring(weight: np.ndarray, heads: int) -> np.ndarray:
    """Bring the rows of each head from two halves into pairs of neighbours.

    >>> _neighbouring(np.arange(4.0)[:, None], 1)[:, 0]
    array([0., 2., 1., 3.])
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Write the tokens with their types, the merges, and where a text is cut first: as by GPT-2."""
    import gguf

    model = tokenizer["model"]
    cuts = _pieces(tokenizer.get("pre_tokenizer"))
    if model.get("type") != "BPE" or "ByteLevel" not in cuts:
        raise InputError("--to gguf is for a byte-level BPE: use llama.cpp's own converter for another tokenizer")
    added = {each["id"]: each for each in tokenizer.get("added_tokens", [])}
    tokens = {number: token for token, number in model["vocab"].items()}
    tokens |= {number: each["content"] for number, each in added.items()}
    vocab = range(config["vocab_size"])
    types = [
        gguf.TokenType.UNUSED
        if number not in tokens
        else gguf.TokenType.CONTROL
        if number in added and added[number]["special"]
        else gguf.TokenType.USER_DEFINED
        if number in added
        else gguf.TokenType.NORMAL
        for number in vocab
    ]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model.get("merges", [])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if "Digits" in cuts else "gpt-2")
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in vocab])
    writer.add_token_types(types)
    writer.add_token_merges(merges or [_NO_MERGE])
    for key, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        if isinstance(config.get(key), int):
            add(config[key])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _pieces(pre_tokenizer: dict[str, Any] | None) -> set[str]:
    """Return the kinds of the parts that cut a text before the merges."""
    if pre_tokenizer is None:
        return set()
    return {pre_tokenizer["type"], *(each["type"] for each in pre_tokenizer.get("pretokenizers", []))}
