"""A model folder made on the spot: a tiny Llama of random weights, and a byte-level BPE if a text is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def make_llama(path: Path, vocab: int, *, text: str = "", seed: int = 0, **sizes: int) -> Path:
    """Write the folder, with other `sizes` than tiny ones; with a text, a tokenizer of at most `vocab` tokens."""
    import tokenizers
    import torch
    import transformers

    tiny: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        bos_token_id=1,
        initializer_range=0.2,  # the library's 0.02 would leave adapters little to move
        tie_word_embeddings=True,
        **tiny | sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(path)
    if text:
        backend: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator([text], trainer)
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    return path
