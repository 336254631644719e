from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fpld.data import Tokenizer, load_tokenizer
from fpld.errors import InputError, MissingExtraError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fpld.students import huggingface, pretrained  # noqa: E402
from fpld.students.configs import HuggingFaceConfig  # noqa: E402
from fpld.students.huggingface import HuggingFace  # noqa: E402
from fpld.students.pretrained import HuggingFaceTokenizer, model_tokenizer  # noqa: E402
from tests.tiny_llama import make_llama  # noqa: E402

pytestmark = pytest.mark.slow  # the contract of all students, which is quick to test, has a row for these

V = 60
TEXT = np.tile(np.array([5, 9, 5, 7, 11, 3], np.int32), 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny Llama of random weights."""
    return make_llama(tmp_path_factory.mktemp("models") / "llama", V)


def make(folder: Path, *, seed: int = 0, **options: Any) -> HuggingFace:
    return HuggingFace(HuggingFaceConfig(str(folder), **{"length": 8, "rate": 1e-2} | options), seed=seed)


def same(first: HuggingFace, second: HuggingFace) -> bool:
    one = first.state()
    two = second.state()
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def sequences(count: int = 6, length: int = 8) -> np.ndarray:
    return np.random.default_rng(1).integers(2, V, (count, length), dtype=np.int32)


@pytest.mark.parametrize("lora", [0, 2])
def test_logits_are_those_of_the_model(folder: Path, lora: int) -> None:
    student = make(folder, lora=lora)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(torch.tensor(sequences(), dtype=torch.int64)).logits.numpy()
    assert student.vocab == V
    logits = student.logits(sequences())
    assert logits.dtype == np.float32
    # Fresh adapters add exactly nothing.
    np.testing.assert_allclose(logits, expected.reshape(-1, V), atol=1e-5)


def test_rows_see_only_the_tokens_before_them(folder: Path) -> None:
    student = make(folder)
    whole = student.logits(sequences()).reshape(6, 8, V)
    np.testing.assert_allclose(student.logits(sequences()[:, :3]), whole[:, :3].reshape(-1, V), atol=1e-5)


def test_bos_stands_before_every_sequence(folder: Path) -> None:
    plain = make(folder)
    first = make(folder, bos=True)
    with_one = np.concatenate([np.ones((6, 1), np.int32), sequences()], axis=1)
    expected = plain.logits(with_one).reshape(6, 9, V)[:, 1:].reshape(-1, V)
    np.testing.assert_allclose(first.logits(sequences()), expected, atol=1e-5)
    assert (plain.longest, first.longest) == (32, 31)


def test_blocks_stay_small_whatever_rows_allow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "BLOCK_BYTES", 2 * 8 * V * 4)
    student = make(folder)
    blocks = list(student.logit_blocks(sequences(5), rows=1000))
    assert [len(block) for block in blocks] == [16, 16, 8]
    np.testing.assert_array_equal(np.concatenate(blocks), student.logits(sequences(5)))


@pytest.mark.parametrize("lora", [0, 2])
def test_finetuning_learns_and_repeats_exactly(folder: Path, lora: int) -> None:
    first = make(folder, lora=lora)
    second = make(folder, lora=lora)
    before, count = first.loss(TEXT, 8)
    end = first.finetune(TEXT, steps=30, seed=3)
    assert end == second.finetune(TEXT, steps=30, seed=3)
    assert same(first, second)
    assert first.loss(TEXT, 8)[0] < before - 0.5 * count


def test_global_generator_is_neither_used_nor_moved(folder: Path) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = make(folder, lora=2, seed=1)
    first.finetune(TEXT, steps=2, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(6)
    second = make(folder, lora=2, seed=1)
    second.finetune(TEXT, steps=2, seed=0)
    assert same(first, second)
    assert not same(second, make(folder, lora=2, seed=2))


def test_small_parts_give_the_gradient_of_the_whole_minibatch(folder: Path) -> None:
    whole, parts = (make(folder, lora=2, batch=4, micro=micro) for micro in (4, 3))
    whole.finetune(TEXT, steps=3, seed=0)
    parts.finetune(TEXT, steps=3, seed=0)
    for name, array in whole.state().items():
        np.testing.assert_allclose(parts.state()[name], array, atol=1e-4)


def test_distillation_follows_the_target(folder: Path) -> None:
    teacher = make(folder, lora=4)
    student = make(folder, lora=4, distill_rate=2e-2)
    teacher.finetune(TEXT, steps=40, seed=0)
    probes = sequences(24)
    target = teacher.logits(probes)
    first = student.copy().distill(probes, target, steps=1, seed=0)
    last = student.distill(probes, target, steps=80, seed=0)
    assert last < 0.25 * first
    # A constant for each context changes nothing that softmax can see.
    shifted = make(folder, lora=4).distill(probes, target + 3.0, steps=1, seed=0)
    assert shifted == pytest.approx(first, rel=1e-3)


def test_public_text_is_mixed_in(folder: Path) -> None:
    student = make(folder, lora=4, distill_rate=1e-2)
    own = student.logits(sequences())
    before, _ = student.loss(TEXT, 8)
    student.distill(sequences(), own, steps=30, seed=0, public=TEXT, public_weight=1.0)
    assert student.loss(TEXT, 8)[0] < before


def test_state_holds_the_adapters_only(folder: Path) -> None:
    adapted = make(folder, lora=2)
    full = make(folder, lora=0)
    assert all("lora" in name for name in adapted.state())
    assert adapted.parameters == sum(array.size for array in adapted.state().values())
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert full.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("lora", [0, 2])
def test_a_copy_is_free_of_its_origin_and_shares_only_what_is_frozen(folder: Path, lora: int) -> None:
    student = make(folder, lora=lora)
    before = student.state()
    other = student.copy()
    other.finetune(TEXT, steps=2, seed=0)
    assert all(np.array_equal(before[name], array) for name, array in student.state().items())
    assert not same(student, other)
    student.load_state(other.state())
    np.testing.assert_array_equal(student.logits(sequences()), other.logits(sequences()))
    shared = {w.data_ptr() for w in student._network.parameters()} & {w.data_ptr() for w in other._network.parameters()}
    assert bool(shared) == (lora > 0)


@pytest.mark.parametrize("lora", [0, 2])
def test_a_saved_student_is_the_same_also_when_the_model_has_moved(folder: Path, tmp_path: Path, lora: int) -> None:
    student = make(folder, lora=lora)
    student.finetune(TEXT, steps=2, seed=0)
    student.save(tmp_path / "student.safetensors")
    moved = shutil.copytree(folder, tmp_path / "moved")
    for loaded in (
        HuggingFace.load(tmp_path / "student.safetensors"),
        HuggingFace.load(tmp_path / "student.safetensors", model=moved),
    ):
        assert same(student, loaded)
        np.testing.assert_array_equal(student.logits(sequences()), loaded.logits(sequences()))


def test_adapters_refuse_another_model(folder: Path, tmp_path: Path) -> None:
    make(folder).save(tmp_path / "student.safetensors")
    other = shutil.copytree(folder, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(InputError, match=r"weights must be .* for this student"):
        HuggingFace.load(tmp_path / "student.safetensors", model=other)


def _break(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", None, "must hold .*safetensors, got none"),
        ("model.safetensors", b"\xff" * 100, "that can be read"),
        ("config.json", None, "that can be read"),
        ("config.json", b"{", "that can be read"),
    ],
)
def test_a_broken_folder_is_named(folder: Path, tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    _break(broken, name, content)
    with pytest.raises(InputError, match=rf"broken.*{message}"):
        make(broken)


def test_missing_weights_are_not_drawn_at_random(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(InputError, match=r"must hold all weights .*layers\.2"):
        make(broken)


def test_code_in_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    hostile = shutil.copytree(folder, tmp_path / "hostile")
    config = json.loads((hostile / "config.json").read_text()) | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own"},
    }
    (hostile / "config.json").write_text(json.dumps(config))
    (hostile / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(InputError, match="hostile"):
        make(hostile)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": -1}, "lora must be an integer of at least 0"),
        ({"rate": 0.0}, "rate must be a positive number"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"micro": 0}, "micro must be"),
        ({"length": 33}, "length must be at most 32"),
        ({"vocab": 61}, "vocab must be 61 for this student, but .* has 60"),
        ({"parameters": 1}, "parameters must be 1 for this student"),
    ],
)
def test_bad_settings_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(folder, **options)


def test_a_hub_name_is_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"must be a model folder or a \.gguf file on this machine"):
        make(Path("some-organisation/some-model"))


def test_a_model_without_a_first_token_cannot_have_bos(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"bos_token_id": None}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="bos must be False"):
        make(other, bos=True)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"fpld\[huggingface\]"):
        pretrained.require("peft")


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    text = "so naïve a café, so naïve — said the cat" * 5
    make_llama(tmp_path, 270, text=text)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert isinstance(tokenizer, Tokenizer)
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text
    assert tokenizer.text_bytes(tokens) == len(text.encode())
    assert tokenizer.digest == HuggingFaceTokenizer(tmp_path).digest
    tokenizer.save(tmp_path / "saved.json")
    loaded = load_tokenizer(tmp_path / "saved.json")
    assert (loaded.vocab, loaded.digest) == (tokenizer.vocab, tokenizer.digest)
    np.testing.assert_array_equal(loaded.encode(text), tokens)
    assert model_tokenizer(tmp_path).vocab == 270
    assert tokenizer.digest != HuggingFaceTokenizer(tmp_path, vocab=512).digest
    with pytest.raises(InputError, match="vocab must be at least the tokenizer's 270, got 4"):
        HuggingFaceTokenizer(tmp_path, vocab=4)


def test_smollm2_predicts_english() -> None:
    pytest.importorskip("gguf")
    from fpld.students.pretrained import prepare_smollm2

    path = prepare_smollm2()
    assert prepare_smollm2() == path
    tokenizer = HuggingFaceTokenizer(path)
    text = "The capital of France is Paris, and the capital of Germany is Berlin. The sun rises in the east."
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    student = make(path, lora=4, length=16, batch=1)
    assert student.vocab == tokenizer.vocab == 49152
    nats, count = student.loss(tokens, count := len(tokens) - 1)
    assert nats / count < 3.0
    student.finetune(tokens, steps=2, seed=0)


def test_bfloat16_is_near_and_trains_adapters_in_float32(folder: Path) -> None:
    exact, half = (make(folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert half.place == "on cpu in bfloat16"
    assert 0 < np.abs(half.logits(sequences()) - exact.logits(sequences())).max() < 0.1
    half.finetune(TEXT, steps=2, seed=0)
    assert {value.dtype for value in half.state().values()} == {np.dtype(np.float32)}
