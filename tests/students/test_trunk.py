"""Hidden states below the lowest adapter: kept, and the same whether they are kept or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fpld.students import huggingface
from fpld.students.configs import HuggingFaceConfig
from fpld.students.huggingface import HuggingFace
from fpld.target import Target
from tests.tiny_models import FAMILIES, make_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

VOCAB = 64
SEQUENCES = np.random.default_rng(0).integers(VOCAB, size=(6, 8))
CUT = tuple(family for family in FAMILIES if family != "gemma2")  # its logits are capped: it is used as a whole


@pytest.fixture(scope="module", params=CUT)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param), VOCAB)


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    huggingface._TRUNK_CACHE.clear()


def student(folder: Path, **options: Any) -> HuggingFace:
    return HuggingFace(HuggingFaceConfig(str(folder), lora=2, length=8, batch=2, micro=2, **options), seed=1)


def trained(folder: Path, **options: Any) -> HuggingFace:
    made = student(folder, lora_layers=1, rate=1e-2, **options)
    made.finetune(np.random.default_rng(1).integers(VOCAB, size=200), steps=3, seed=0)
    return made


@pytest.mark.parametrize("options", [{}, {"bos": True}, {"checkpointing": True}], ids=["plain", "bos", "checkpointing"])
def test_kept_states_give_the_logits_of_the_whole_model(folder: Path, options: dict[str, Any]) -> None:
    if options.get("bos") and "qwen" in str(folder):
        options = {}  # names no first token
    one = trained(folder, **options)
    other = trained(folder, **options)
    other._network.trunk = None
    assert one._network.trunk is not None
    first = one.logits(SEQUENCES)
    assert np.allclose(
        first, other.logits(SEQUENCES), atol=1e-5
    )  # lower layers run sequence by sequence, or all at once
    assert len(one._trunk_cache) == len(SEQUENCES)
    assert np.array_equal(first, one.logits(SEQUENCES))
    mixed = np.concatenate([SEQUENCES[:2], SEQUENCES[:2] + 1, SEQUENCES[:1]]) % VOCAB
    assert np.allclose(one.logits(mixed), other.logits(mixed), atol=1e-5)


def test_students_share_what_is_kept_and_it_does_not_depend_on_who_asked(folder: Path) -> None:
    trained(folder).logits(SEQUENCES)
    other = student(folder, lora_layers=1)
    kept = dict(other._trunk_cache)
    assert len(kept) == len(SEQUENCES)
    huggingface._TRUNK_CACHE.clear()
    again = student(folder, lora_layers=1)
    again.logits(SEQUENCES[::-1][:4])
    again.logits(SEQUENCES)
    assert all(torch.equal(kept[key], states) for key, states in again._trunk_cache.items())


def test_lower_layers_are_not_run_again(folder: Path) -> None:
    made = trained(folder)
    made.logits(SEQUENCES)
    copied = made.copy()  # it shares what is kept
    trunk = copied._network.trunk
    runs = set[int]()
    assert trunk is not None
    for index, layer in enumerate([*trunk.below, trunk.first]):
        inner = next(module for module in layer.modules() if not list(module.children()))
        inner.register_forward_hook(lambda *_, index=index: runs.add(index))
    copied.logits(SEQUENCES)
    assert runs == {len(trunk.below)}
    copied.logits((SEQUENCES + 1) % VOCAB)
    assert runs == set(range(len(trunk.below) + 1))


def test_distillation_is_the_same_with_and_without(folder: Path) -> None:
    target = Target.unchanged(SEQUENCES.size, VOCAB)
    states = []
    for cut in (True, False):
        made = student(folder, lora_layers=1)
        reference = trained(folder)
        if not cut:
            made._network.trunk = reference._network.trunk = None
        made.distill(SEQUENCES, target, steps=4, seed=3, rate=1e-2, reference=reference)
        states.append(made.state())
    for name, value in states[0].items():
        assert np.allclose(value, states[1][name], atol=1e-6), name
    assert any(np.abs(value).max() > 0 for name, value in states[0].items() if "lora_B" in name)


def test_what_is_kept_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained(folder)
    whole = made.logits(SEQUENCES)
    size = next(iter(made._trunk_cache.values())).nbytes
    monkeypatch.setattr(huggingface, "CACHE_BYTES", 2 * size)
    huggingface._TRUNK_CACHE.clear()
    other = trained(folder)
    assert np.allclose(other.logits(SEQUENCES), whole, atol=1e-5)
    assert len(other._trunk_cache) == 2


def test_adapters_in_all_layers_leave_nothing_below(folder: Path) -> None:
    made = student(folder)
    assert made._network.trunk is None
    made.logits(SEQUENCES)
    assert not made._trunk_cache
