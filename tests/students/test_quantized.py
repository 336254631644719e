"""A pretrained model whose linear layers are in four bits: what is refused, and that its adapters learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs fpld[huggingface]")
pytest.importorskip("peft", reason="needs fpld[huggingface]")

import fpld  # noqa: E402
from fpld.errors import InputError, MissingExtraError, ParameterError  # noqa: E402
from fpld.students import load, pretrained  # noqa: E402
from fpld.students.configs import Compute, HuggingFaceConfig  # noqa: E402
from fpld.students.huggingface import HuggingFace  # noqa: E402
from tests.federation.conftest import CONFIG, write_texts  # noqa: E402
from tests.tiny_llama import make_llama  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

V = 64
TEXT = np.random.default_rng(0).integers(8, size=2000).astype(np.int32)
SEQUENCES = TEXT[:320].reshape(-1, 16)
CLOSE = 1e-3  # of the logits of two devices


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), V, hidden_size=64, intermediate_size=128)


def quantized(path: Path, device: str = "cpu") -> HuggingFace:
    settings = HuggingFaceConfig(str(path), dtype="4bit", lora=4, length=16, batch=4, rate=1e-2, distill_rate=1e-2)
    return HuggingFace(settings, seed=0, device=device)


def test_four_bits_need_adapters_and_the_library(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="dtype must be 'float32' where all weights are trained"):
        HuggingFaceConfig(str(llama), dtype="4bit", lora=0)
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)  # as where it is not installed
    with pytest.raises(MissingExtraError, match=r"pip install 'fpld\[quantized\]'"):
        quantized(llama)


def test_a_check_says_that_the_library_is_missing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    write_texts(tmp_path)
    table = f'kind = "huggingface"\npath = "{llama}"\ndtype = "4bit"\nlength = 16'
    file = tmp_path / "config.toml"
    text = CONFIG.format(folder=tmp_path).replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', table)
    file.write_text(text)
    says = {finding.key: finding.says for finding in fpld.check(file) if finding.wrong}
    assert "pip install 'fpld[quantized]'" in says["student.dtype"]


def test_a_gguf_file_has_a_precision_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="dtype must be 'float32' or 'bfloat16'"):
        pretrained.load_model(tmp_path / "model.gguf", "4bit")


def test_adapters_beside_four_bits_learn(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs fpld[quantized]")
    student = quantized(llama)
    frozen = [weight for weight in student._network.parameters() if weight.dtype == torch.uint8]
    assert len(frozen) == 2 * 7  # of two layers
    whole = HuggingFace(HuggingFaceConfig(str(llama), lora=4, length=16), seed=0)
    assert student.parameters == whole.parameters
    check_learning(student)
    twin = student.copy()
    assert np.array_equal(twin.logits(SEQUENCES), student.logits(SEQUENCES))
    student.save(tmp_path / "student.safetensors")
    assert np.array_equal(load(tmp_path / "student.safetensors").logits(SEQUENCES), student.logits(SEQUENCES))
    with pytest.raises(InputError, match="adapter must be True for a model in four bits"):
        student.export(tmp_path / "merged")
    with pytest.raises(ParameterError, match="shard must be false for a model in four bits"):
        student.compute_with(Compute(processes=2, shard=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
def test_adapters_beside_four_bits_learn_on_a_gpu(llama: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs fpld[quantized]")
    there = quantized(llama, "cuda")
    here = quantized(llama)
    assert np.abs(there.logits(SEQUENCES) - here.logits(SEQUENCES)).max() < CLOSE
    check_learning(there)


def check_learning(student: Any) -> None:
    before = float(np.mean(student.token_nats(TEXT[:400], 16)))
    student.finetune(TEXT, steps=20, seed=1)
    assert float(np.mean(student.token_nats(TEXT[:400], 16))) < before - 0.1
