"""How a student is judged: against the exact identity."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fpld.errors import InputError
from fpld.federation.workers import blank_kl
from fpld.node.training import make_student, open_student, save_base, use_compute
from fpld.numerics import kl
from fpld.students import Target, devices, divergence
from fpld.students.configs import Compute, HuggingFaceConfig, TransformerConfig, parse_student
from fpld.students.devices import available_devices
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
    save_base(student, tmp_path / "none.safetensors", None)
    assert not (tmp_path / "none.device").exists()
    there = torch.cuda.is_available()
    assert open_student(tmp_path / "cpu.safetensors").place == "on cpu in float32"
    for name in ("auto", "none"):
        chosen = open_student(tmp_path / f"{name}.safetensors")
        assert chosen.place == chosen.copy().place == f"on {available_devices()[0]} in float32"
    if not there:
        with pytest.raises(InputError, match="PyTorch finds no GPU"):
            open_student(tmp_path / "cuda.safetensors")


def test_a_process_computes_with_what_its_machine_says() -> None:
    choice = parse_student({"kind": "transformer", "width": 16, "heads": 2, "layers": 1})
    before = torch.get_num_threads()
    try:
        use_compute(Compute("cpu", threads=2))
        assert make_student(choice, 8, 0).place == "on cpu in float32"
        assert torch.get_num_threads() == 2
        use_compute(Compute())
        assert make_student(choice, 8, 0).place == f"on {available_devices()[0]} in float32"
        assert torch.get_num_threads() == 1
        use_compute(Compute("mps" if "mps" not in available_devices() else "cuda"))
        with pytest.raises(InputError, match="PyTorch finds no GPU"):
            make_student(choice, 8, 0)
        assert make_student(parse_student({"kind": "ngram"}), 8, 0).place.startswith("on cpu")
    finally:
        use_compute(Compute())
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("there", "asked", "chosen", "idle"),
    [
        (["cpu"], "auto", "cpu", False),
        (["mps", "cpu"], "auto", "mps", False),
        (["cuda", "cpu"], "auto", "cuda", False),
        (["cuda", "cpu"], "cpu", "cpu", True),
    ],
)
def test_what_stands_idle_is_said(
    there: list[str], asked: str, chosen: str, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "available_devices", lambda: there)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    said = devices.describe_device(asked, 2, 3)
    assert f"on {chosen}" in said
    assert ("a GPU is there and not used" in said) == idle
    assert ("2 cores idle" in said) == (chosen == "cpu")
    assert ("1 of 4 GPUs is used" in said) == (chosen == "cuda")


def test_half_precision_is_for_adapters() -> None:
    assert HuggingFaceConfig("x", dtype="bfloat16").lora > 0
    with pytest.raises(InputError, match="dtype must be 'float32' where all weights are trained"):
        HuggingFaceConfig("x", dtype="bfloat16", lora=0)
    with pytest.raises(InputError, match="dtype must be"):
        HuggingFaceConfig("x", dtype="float16")  # type: ignore[arg-type]
