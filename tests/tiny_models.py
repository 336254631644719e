"""Model folders made on the spot: tiny models of random weights, of several families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.tiny_llama import make_llama

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "gemma", "gemma2")


def make_model(family: str, path: Path, vocab: int) -> Path:
    """Write a folder with a model of a family."""
    import torch
    import transformers

    if family == "llama":
        return make_llama(path, vocab)
    if family == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=vocab, n_embd=16, n_layer=3, n_head=2, n_positions=32, initializer_range=0.2, bos_token_id=1
        )
    else:
        kind = {"qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gemma2": "Gemma2"}[family]
        tokens = {"bos_token_id": 2} if kind.startswith("Gemma") else {"tie_word_embeddings": kind == "Qwen3"}
        config = getattr(transformers, f"{kind}Config")(vocab_size=vocab, **SIZES, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path
