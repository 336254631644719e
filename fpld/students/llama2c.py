"""Models in the format of llama2.c, as folders of Hugging Face: weights and a SentencePiece vocabulary in two files.

After A. Karpathy, *llama2.c* (2023): the first version of its files, which demonstrations in a browser carry. A file of
weights is seven integers and then float32 matrices, those of all layers side by side:

    dim, hidden, layers, heads, key-value heads, V (negative: with a read-out of its own), length
    embedding [V, dim] | RMS of attention [L, dim] | wq, wk, wv, wo | RMS of the feed-forward | w1, w2, w3 | RMS [dim]
    cosines and sines of positions [length, dim / heads / 2], twice | the read-out [V, dim], if it is not the embedding

Llama of transformers turns the first half of a head against the second, llama2.c each coordinate against the next one.
So the rows of wq and wk are permuted; all else is copied.

A vocabulary is the length of its longest token, then for each token a score, a length, and UTF-8. Tokens 0, 1 and 2 are
special, the 256 behind them single bytes. SentencePiece joins the two neighbours whose union has the best score. For
the `tokenizers` library that is a list of merges: every way to make a token out of two others, best scores first.
"""

from __future__ import annotations

import importlib
import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.types import Array, Arrays

_HEADER = struct.Struct("<7i")
_TOKEN = struct.Struct("<fi")
_MAX_SIZE = 1 << 20  # of each number of a header
_SPECIAL = ("<unk>", "<s>", "</s>")
_FIRST_PIECE = len(_SPECIAL) + 256
_METASPACE = "\u2581"  # SentencePiece's mark for a blank


class Shape(NamedTuple):
    """The sizes of a model; `tied` says that the read-out is the embedding."""

    dim: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    vocab: int
    length: int
    tied: bool


class Piece(NamedTuple):
    """A token of a SentencePiece vocabulary."""

    text: str
    score: float


def read_weights(data: bytes) -> tuple[Shape, Arrays]:
    """Return a model's sizes, and its weights under the names of Llama in transformers.

    Raises
    ------
    InputError
        If the bytes are not a model of this format.
    """
    if len(data) < _HEADER.size:
        raise InputError(f"a model of llama2.c must have at least {_HEADER.size} bytes, got {len(data)}")
    dim, hidden, layers, heads, key_heads, vocab, length = _HEADER.unpack_from(data)
    shape = Shape(dim, hidden, layers, heads, key_heads, abs(vocab), length, tied=vocab > 0)
    sizes = shape[:-1]
    if not all(0 < size <= _MAX_SIZE for size in sizes) or dim % heads or heads % key_heads or dim // heads % 2:
        raise InputError(f"a model of llama2.c must begin with its sizes, got {sizes}")
    head = dim // heads
    keys = key_heads * head
    parts = {
        "embed": (shape.vocab, dim),
        "input_layernorm": (layers, dim),
        "self_attn.q_proj": (layers, dim, dim),
        "self_attn.k_proj": (layers, keys, dim),
        "self_attn.v_proj": (layers, keys, dim),
        "self_attn.o_proj": (layers, dim, dim),
        "post_attention_layernorm": (layers, dim),
        "mlp.gate_proj": (layers, hidden, dim),
        "mlp.down_proj": (layers, dim, hidden),
        "mlp.up_proj": (layers, hidden, dim),
        "norm": (dim,),
        "positions": (2, length, head // 2),
    } | ({} if shape.tied else {"read_out": (shape.vocab, dim)})
    count = sum(int(np.prod(part, dtype=object)) for part in parts.values())
    if len(data) != _HEADER.size + 4 * count:
        raise InputError(f"a model of llama2.c of sizes {sizes} must have {_HEADER.size + 4 * count} bytes")
    values = np.frombuffer(data, "<f4", offset=_HEADER.size)
    arrays = dict[str, Any]()
    start = 0
    for name, part in parts.items():
        size = int(np.prod(part))
        arrays[name] = values[start : start + size].reshape(part)
        start += size
    arrays["self_attn.q_proj"] = _by_halves(arrays["self_attn.q_proj"], heads)
    arrays["self_attn.k_proj"] = _by_halves(arrays["self_attn.k_proj"], key_heads)
    embedding = arrays.pop("embed")
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": arrays.pop("norm")}
    weights["lm_head.weight"] = arrays.pop("read_out", embedding)
    arrays.pop("positions")
    for name, array in arrays.items():
        weights |= {f"model.layers.{layer}.{name}.weight": array[layer] for layer in range(layers)}
    return shape, {name: np.array(array) for name, array in weights.items()}


def _by_halves(rows: Array, heads: int) -> Array:
    """Order the rows [L, n, dim] of each head: those with even numbers first, then those with odd ones."""
    layers, count, dim = rows.shape
    pairs = rows.reshape(layers, heads, count // heads // 2, 2, dim)
    ordered: Array = pairs.transpose(0, 1, 3, 2, 4).reshape(rows.shape)
    return ordered


def read_vocabulary(data: bytes, vocab: int) -> list[Piece]:
    """Return the `vocab` tokens of a file, in the order of their ids.

    Raises
    ------
    InputError
        If the bytes are not a vocabulary of so many tokens.
    """
    pieces = []
    place = 4  # behind the length of the longest token
    try:
        for _ in range(vocab):
            score, length = _TOKEN.unpack_from(data, place)
            place += _TOKEN.size
            pieces.append(Piece(data[place : place + max(length, 0)].decode("utf-8"), score))
            place += max(length, 0)
    except (struct.error, ValueError) as error:
        raise InputError(f"a vocabulary of llama2.c must have {vocab} tokens, but {error}") from None
    if place != len(data) or vocab <= _FIRST_PIECE:
        raise InputError(f"a vocabulary of llama2.c must have {vocab} tokens and nothing else, got {len(data)} bytes")
    return pieces


def tokenizer_json(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return a vocabulary as the JSON of `tokenizers`: BPE with a blank before a text, and byte fallback."""
    scores = {piece.text.replace(" ", _METASPACE): piece.score for piece in pieces[_FIRST_PIECE:]}
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = {text: number for number, text in enumerate([*_SPECIAL, *bytes_, *scores])}
    if len(ids) != len(pieces):
        raise InputError("a vocabulary of llama2.c must not have a token twice")
    merges = []
    for text in scores:
        ways = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        # Ids order the ways to make one token; the sort is stable.
        usable = [(left, right) for left, right in ways if left in scores and right in scores]
        merges += sorted(usable, key=lambda way: (ids[way[0]], ids[way[1]]))
    merges.sort(key=lambda way: -scores[way[0] + way[1]])
    return {
        "version": "1.0",
        "added_tokens": [_special(number, text) for number, text in enumerate(_SPECIAL)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": _METASPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": _METASPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _METASPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": merges,
        },
    }


def _special(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True, **flags}


def write_folder(weights: bytes, vocabulary: bytes, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that transformers reads."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    shape, arrays = read_weights(weights)
    tokenizer = tokenizer_json(read_vocabulary(vocabulary, shape.vocab))
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=shape.length,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
