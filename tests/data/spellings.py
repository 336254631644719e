"""Tokenizers of several kinds, made on the spot from one text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fpld.data import BpeTokenizer
from fpld.data.tokenizers import PretrainedTokenizer

_SENTENCE = "the hospital has an open house for hot and cold horses, she said; there were others in the north"
_WORDS = _SENTENCE.split()
TEXT = " ".join(np.random.default_rng(0).choice(_WORDS, 3000))


def bpe(vocab: int) -> BpeTokenizer:
    """Return a byte-level BPE."""
    return BpeTokenizer.train([TEXT], vocab=vocab)


def sentencepiece(vocab: int = 330) -> PretrainedTokenizer:
    """Return a tokenizer as those of Llama: a mark for blanks, one before the text, bytes where nothing else fits."""
    import tokenizers

    mark = "\u2581"
    special = ["<unk>", "<s>", "</s>"]
    backend: Any = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token=special[0]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    marks = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab, special_tokens=special + marks, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    value = json.loads(backend.to_str())
    value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] in special]
    value["pre_tokenizer"] = None
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": mark}
    value["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": mark}, replace]}
    back = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    parts = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    value["decoder"] = {"type": "Sequence", "decoders": parts}
    return PretrainedTokenizer(json.dumps(value))
