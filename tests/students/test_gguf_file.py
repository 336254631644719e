"""GGUF files: llama.cpp itself loads them, cuts text into the same tokens, and predicts the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.data import BpeTokenizer, ByteTokenizer
from fpld.errors import InputError
from fpld.students.configs import TransformerConfig
from fpld.students.export import export_tokenizer
from fpld.students.gguf_file import write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.data import Tokenizer

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

TEXT = "snow and ice, naïve café — 123\n\nthe wolf"
PLAIN = "the wolf and the bear in the snow"
CONTEXT = 64


def make_student(tokenizer: Tokenizer, folder: Path) -> Any:
    """Write a transformer of random weights with its tokenizer, and the GGUF file of both; return the student."""
    from fpld.students.transformer import Transformer

    student = Transformer(TransformerConfig(vocab=tokenizer.vocab, layers=2, width=64, heads=4, length=CONTEXT), seed=0)
    rng = np.random.default_rng(1)
    noisy = {name: array + 0.3 * rng.standard_normal(array.shape) for name, array in student.state().items()}
    student.load_state({name: array.astype(np.float32) for name, array in noisy.items()})
    student.export(folder)
    export_tokenizer(tokenizer, folder, CONTEXT)
    write_gguf(folder, folder / "student.gguf", name="test", licence="cc0-1.0")
    return student


def complete(file: Path, text: str, top: int) -> dict[str, Any]:
    """Let llama.cpp read a text and predict one token."""
    xllamacpp = pytest.importorskip("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx = CONTEXT
    settings.n_parallel = 1
    settings.cpuparams.n_threads = 1
    settings.verbosity = -1
    settings.warmup = False
    settings.fit_params = False
    server = xllamacpp.Server(settings)
    answer: dict[str, Any] = server.handle_completions(
        {"prompt": text, "max_tokens": 1, "temperature": -1, "logprobs": top, "cache_prompt": False}
    )
    return answer


@pytest.mark.parametrize(
    "tokenizer", [BpeTokenizer.train([TEXT * 9, PLAIN * 9], vocab=290), ByteTokenizer()], ids=["bpe", "bytes"]
)
def test_llama_cpp_has_the_same_tokens_and_log_probabilities(tokenizer: Tokenizer, tmp_path: Path) -> None:
    student = make_student(tokenizer, tmp_path)
    compared = 0
    for text in (TEXT, PLAIN, PLAIN[:9], PLAIN[:12], TEXT[:7]):
        answer = complete(tmp_path / "student.gguf", text, 20)
        ids = tokenizer.encode(text)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        logits = student.logits(ids[None])[-1].astype(np.float64)
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        logprobs = answer["choices"][0]["logprobs"]
        if logprobs is None:
            continue  # the likeliest token is part of a character, which the server waits for
        for each in logprobs["content"][0]["top_logprobs"]:
            assert each["logprob"] == pytest.approx(
                expected[each["id"]], abs=5e-3
            )  # it keeps keys and values in 16 bits
            compared += 1
    assert compared >= 20


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    """Read by the library gguf: shape, tokens, and one matrix whose rows have changed places."""
    tokenizer = BpeTokenizer.train([TEXT * 9], vocab=270)
    student = make_student(tokenizer, tmp_path)
    reader = gguf.GGUFReader(tmp_path / "student.gguf")
    assert reader.get_field("llama.context_length").contents() == CONTEXT
    assert reader.get_field("general.license").contents() == "cc0-1.0"
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 270
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    query = np.split(student.state()["blocks.0.qkv"], 3)[0]
    assert np.array_equal(tensors["token_embd.weight"], student.state()["embedding"])
    assert np.array_equal(tensors["blk.0.attn_q.weight"][1], query[8])  # heads of 16: 0 and 8 turn together


def test_another_model_is_refused(tmp_path: Path) -> None:
    make_student(ByteTokenizer(), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OtherForCausalLM"))
    with pytest.raises(InputError, match="OtherForCausalLM"):
        write_gguf(tmp_path, tmp_path / "other.gguf", name="test")
