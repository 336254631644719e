"""How a student is judged: against the exact identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fpld.errors import InputError
from fpld.federation.workers import blank_kl
from fpld.node.training import open_student, save_base
from fpld.numerics import kl
from fpld.students import Target, divergence
from fpld.students.configs import HuggingFaceConfig, TransformerConfig
from fpld.students.ngram import NGram, NGramConfig
from fpld.students.transformer import Transformer

if TYPE_CHECKING:
    from pathlib import Path


def test_divergences_are_those_of_the_identity() -> None:
    rng = np.random.default_rng(0)
    student = NGram(NGramConfig(vocab=700))
    sequences = rng.integers(0, 700, (9, 11)).astype(np.int32)
    student.finetune(rng.integers(0, 700, 5000), steps=1, seed=0)
    target = rng.normal(0, 4, (99, 700)).astype(np.float32)
    assert divergence(student, sequences, Target.dense(target)) == pytest.approx(
        kl(target, student.logits(sequences) - target).mean(), rel=1e-5
    )
    assert blank_kl(target) == pytest.approx(kl(target, -target).mean(), rel=1e-5)
    assert blank_kl(np.zeros((3, 700), np.float32)) == pytest.approx(0, abs=1e-5)


def test_a_model_is_opened_on_its_device(tmp_path: Path) -> None:
    student = Transformer(TransformerConfig(vocab=8, width=16, heads=2, layers=1, length=8), seed=0)
    for device in ("cpu", "auto", "cuda"):
        save_base(student, tmp_path / f"{device}.safetensors", device)
    # The model's file goes to others, and says nothing of this machine.
    assert len({(tmp_path / f"{device}.safetensors").read_bytes() for device in ("cpu", "auto", "cuda")}) == 1
    there = torch.cuda.is_available()
    assert open_student(tmp_path / "cpu.safetensors").place == "on cpu in float32"
    chosen = open_student(tmp_path / "auto.safetensors")
    assert chosen.place == chosen.copy().place == f"on {'cuda' if there else 'cpu'} in float32"
    if not there:
        with pytest.raises(InputError, match="PyTorch finds no GPU"):
            open_student(tmp_path / "cuda.safetensors")


def test_half_precision_is_for_adapters() -> None:
    assert HuggingFaceConfig("x", dtype="bfloat16").lora > 0
    with pytest.raises(InputError, match="dtype must be 'float32' where all weights are trained"):
        HuggingFaceConfig("x", dtype="bfloat16", lora=0)
    with pytest.raises(InputError, match="dtype must be"):
        HuggingFaceConfig("x", dtype="float16")  # type: ignore[arg-type]
