"""Families of pretrained models: each is read from a folder, trained, asked, saved; what does not fit is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.errors import InputError
from fpld.students import load
from fpld.students.configs import HuggingFaceConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fpld.students.devices import use_threads  # noqa: E402
from fpld.students.huggingface import HuggingFace  # noqa: E402
from tests.tiny_models import FAMILIES, make_model  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

V = 40
TEXT = np.tile(np.array([5, 9, 5, 7, 11, 3], np.int32), 40)
PROBES = np.random.default_rng(1).integers(2, V, (5, 8), dtype=np.int32)
WHOLE = {"gemma2"}  # logits are capped: not a linear map of the hidden states


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    use_threads(1)
    return request.param, make_model(request.param, tmp_path_factory.mktemp("models") / request.param, V)


def make(folder: Path, **options: Any) -> HuggingFace:
    return HuggingFace(HuggingFaceConfig(str(folder), **{"length": 8, "rate": 1e-2} | options), seed=0)


@pytest.mark.parametrize("options", [{"lora": 0}, {"lora": 4}, {"lora": 4, "lora_layers": 1}, {"lora": 4, "bos": True}])
def test_logits_are_those_of_transformers(model: tuple[str, Path], options: dict[str, Any]) -> None:
    family, folder = model
    if options.get("bos") and family.startswith("qwen"):
        with pytest.raises(InputError, match=r"bos must be False for .*: its config\.json names no bos_token_id"):
            make(folder, **options)
        return
    student = make(folder, **options)
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    first = [[own.config.bos_token_id]] * len(PROBES) if options.get("bos") else np.empty((len(PROBES), 0), int)
    with torch.no_grad():
        ids = torch.tensor(np.concatenate([first, PROBES], axis=1), dtype=torch.int64)
        expected = own(ids).logits[:, -PROBES.shape[1] :].numpy()
    np.testing.assert_allclose(student.logits(PROBES), expected.reshape(-1, V), atol=1e-5)
    assert student._network.separable == (family not in WHOLE)
    assert student.longest == 32 - bool(options.get("bos"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lora": 0}, {"lora": 4}, {"lora": 4, "lora_layers": 1}])
def test_each_family_learns_and_is_saved(model: tuple[str, Path], options: dict[str, Any], tmp_path: Path) -> None:
    _, folder = model
    student = make(folder, **options)
    before, count = student.loss(TEXT, 8)
    student.finetune(TEXT, steps=20, seed=0)
    assert student.loss(TEXT, 8)[0] < before - 0.2 * count
    student.save(tmp_path / "student.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "student.safetensors").logits(PROBES), student.logits(PROBES))
    if options["lora"]:
        layers = {re.search(r"\.(\d+)\..*lora_", name)[1] for name in student.state()}  # type: ignore[index]
        assert len(layers) == options.get("lora_layers", len(layers)) > 0
        assert options.get("lora_layers") or len(layers) > 1


def test_checkpointing_gives_the_same_gradients(model: tuple[str, Path]) -> None:
    _, folder = model
    plain, again = (make(folder, lora=4, checkpointing=value) for value in (False, True))
    for student in (plain, again):
        student.finetune(TEXT, steps=3, seed=0)
    layer = transformers.modeling_layers.GradientCheckpointingLayer
    assert sum(isinstance(module, layer) and module.training for module in again._network.modules()) >= 2
    for name, array in plain.state().items():
        np.testing.assert_allclose(again.state()[name], array, atol=1e-5)


def merged(student: HuggingFace) -> dict[str, Any]:
    model: Any = student._network.model
    weights: dict[str, Any] = model.merge_and_unload().state_dict()
    return weights


def test_stacked_adapters_add_the_mean_of_what_each_adds(model: tuple[str, Path]) -> None:
    _, folder = model
    states = []
    changes = []
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for seed in range(3):
        student = make(folder, lora=2)
        student.finetune(TEXT[seed:], steps=4, seed=seed)
        states.append(student.state())
        changes.append({name: weight - plain.state_dict()[name] for name, weight in merged(student).items()})
    together = merged(make(folder, lora=2).stacked(states))
    for name, weight in plain.state_dict().items():
        mean = sum(change[name] for change in changes) / 3
        np.testing.assert_allclose(together[name] - weight, mean, atol=2e-6)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.2,
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="must be a causal language model: its logits depend on tokens"):
        make(tmp_path / "bert")


@pytest.mark.slow
def test_a_folder_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(InputError, match="must hold a causal language model that can be read"):
        make(tmp_path / "t5")


def test_more_layers_than_there_are_get_no_adapters(model: tuple[str, Path]) -> None:
    with pytest.raises(InputError, match=r"lora_layers must be at most the model's \d layers, got 9"):
        make(model[1], lora_layers=9)
