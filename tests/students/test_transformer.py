"""What is special to the transformer: devices, schedule, and that no one else's random state is touched."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fpld import registry
from fpld.errors import InputError, MissingExtraError

torch = pytest.importorskip("torch")

from fpld.students.configs import Compute, TransformerConfig  # noqa: E402
from fpld.students.devices import available_devices, largest_that_fits, use_threads  # noqa: E402
from fpld.students.gradient import schedule  # noqa: E402
from fpld.students.transformer import Transformer, llama_weights  # noqa: E402

CONFIG = TransformerConfig(vocab=16, layers=1, width=8, heads=2, length=6, batch=4)


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    use_threads(1)
    tokens = np.random.default_rng(0).integers(16, size=200)
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        student = Transformer(CONFIG, seed=5)
        student.finetune(tokens, steps=3, seed=6)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(student.state())
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("steps", [1, 2, 10, 137])
def test_the_schedule_warms_up_and_falls(steps: int) -> None:
    factors = [schedule(step, steps) for step in range(steps)]
    peak = int(np.argmax(factors))
    assert max(factors) == 1.0
    assert min(factors) > 0.0
    assert (np.diff(factors[: peak + 1]) > 0).all()
    assert (np.diff(factors[peak:]) < 0).all()
    if steps > 1:
        assert factors[-1] == pytest.approx(0.02)


def test_longer_sequences_than_its_length_are_refused() -> None:
    with pytest.raises(InputError, match="at most 6 tokens long, got 7"):
        Transformer(CONFIG, seed=0).logits(np.zeros((2, 7), np.int32))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"vocab": 1}, "vocab must"),
        ({"layers": 0}, "layers must"),
        ({"width": 10}, "width must be a multiple of 2"),
        ({"length": 10**9}, "length must be at most"),
        ({"rate": 0.0}, "rate must"),
        ({"clip": float("nan")}, "clip must"),
        ({"weight_decay": -1.0}, "weight_decay must"),
    ],
)
def test_a_bad_configuration_is_refused(bad: dict[str, float], message: str) -> None:
    values: dict[str, float] = {"vocab": 16, "width": 8, "heads": 2, **bad}
    with pytest.raises(InputError, match=message):
        TransformerConfig(**values)  # type: ignore[arg-type]


def test_devices() -> None:
    with pytest.raises(InputError, match="device must"):
        Transformer(CONFIG, seed=0, device="tpu")
    auto = Transformer(CONFIG, seed=0, device="auto")
    assert auto.to("cpu").copy().device == torch.device("cpu")
    auto.to("auto")
    assert str(auto.device) == available_devices()[0]
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="finds no GPU"):
            Transformer(CONFIG, seed=0, device="cuda")


def test_torch_is_loaded_only_when_asked_for() -> None:
    code = "import sys, fpld, fpld.students; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "fpld.students.transformer")
    monkeypatch.setattr(registry.students, "_loaded", {})

    with pytest.raises(MissingExtraError, match=r"transformer student .*fpld\[torch\]"):
        registry.students.get("transformer")


def test_transformers_reads_the_same_model() -> None:
    """The weights under Llama's names give transformers' own implementation the same logits."""
    transformers = pytest.importorskip("transformers", reason="needs fpld[huggingface]")
    for sizes in ({"width": 24, "heads": 3, "layers": 2}, {"width": 16, "heads": 1, "layers": 1}):
        config = TransformerConfig(vocab=40, length=12, **sizes)
        student = Transformer(config, seed=0)
        student.finetune(np.random.default_rng(0).integers(40, size=400), steps=20, seed=0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.llama)).eval()
        weights = {name: torch.from_numpy(w) for name, w in llama_weights(student.state(), config.layers).items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
        sequences = np.random.default_rng(1).integers(40, size=(5, 12))
        with torch.no_grad():
            theirs = model(torch.from_numpy(sequences)).logits.reshape(-1, 40).numpy()
        assert student.logits(sequences) == pytest.approx(theirs, abs=1e-4)


def test_curvature_is_the_mean_squared_gradient_of_each_sequence() -> None:
    student = Transformer(TransformerConfig(vocab=16, layers=1, width=8, heads=2, length=6), seed=1)
    sequences = np.random.default_rng(2).integers(0, 16, (5, 6))
    found = student.curvature(sequences)
    assert found.keys() == student.state().keys()
    expected = dict.fromkeys(found, 0.0)
    for sequence in sequences:
        changed = student.copy()
        logits = torch.log_softmax(changed._network(torch.tensor(sequence[None, :-1])), -1)[0]
        loss = -logits[torch.arange(5), torch.tensor(sequence[1:])].mean()
        loss.backward()
        for name, weight in changed._network.named_parameters():
            assert weight.grad is not None
            expected[name] += float(weight.grad.square().mean()) / 5
    assert found == pytest.approx(expected, rel=1e-4)
    assert all(weight.grad is None for weight in student._network.parameters())


def small(**compute: Any) -> Transformer:
    config = TransformerConfig(vocab=64, layers=1, width=32, heads=2, length=16, batch=8)
    return Transformer(config, seed=0).compute_with(Compute(**compute))


def trained(student: Transformer) -> tuple[Any, ...]:
    """Return the losses of a training and a distillation, and logits after both."""
    text = np.random.default_rng(0).integers(8, size=2000).astype(np.int32)
    sequences = text[:640].reshape(-1, 16)
    first = student.finetune(text, steps=30, seed=1)
    target = student.logits(sequences) * 1.1
    return first, student.distill(sequences, target, steps=10, seed=2), student.logits(sequences)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_in_half_precision_learn_as_much_over_weights_in_float32(dtype: Any) -> None:
    exact = trained(small(dtype="float32"))
    student = small(dtype=dtype)
    half = trained(student)
    assert student.precision == getattr(torch, dtype)
    assert student.copy().place.endswith(f"trained in {dtype}")
    assert {weight.dtype for weight in student.state().values()} == {np.dtype(np.float32)}
    assert half[0] == pytest.approx(exact[0], rel=0.02)
    assert half[1] == pytest.approx(exact[1], abs=0.01)
    assert not np.array_equal(half[2], exact[2])


def test_predictions_for_the_wire_are_in_float32_whatever_the_precision_of_training() -> None:
    student = small(dtype="bfloat16")
    exact = small(dtype="float32")
    exact.load_state(student.state())
    sequences = np.arange(64, dtype=np.int32).reshape(4, 16)
    assert np.array_equal(student.logits(sequences), exact.logits(sequences))


def test_automatic_precision_is_float32_on_the_cpu_bit_for_bit() -> None:
    if available_devices()[0] != "cpu":
        pytest.skip("this machine has a GPU")
    for some, other in zip(trained(small(dtype="auto")), trained(small(dtype="float32")), strict=True):
        assert np.array_equal(some, other)


def test_gradients_are_summed_over_windows_at_a_time() -> None:
    whole = trained(small())
    parts = trained(small(at_once=3))
    assert parts[:2] == pytest.approx(whole[:2], rel=1e-4)
    np.testing.assert_allclose(parts[2], whole[2], rtol=0.02, atol=0.02)


def test_what_fits_into_memory_is_tried_before_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def token_trial(student: Transformer, count: int) -> Any:
        tried.append(count)
        if count > 2:
            raise torch.OutOfMemoryError
        return next(iter(student._trained().values())).sum()

    monkeypatch.setattr(Transformer, "_token_trial", token_trial)
    monkeypatch.setattr(Transformer, "_target_trial", lambda student, count, *_: token_trial(student, count))
    fitted = trained(small(at_once="auto"))
    assert tried == [8, 4, 2] * 2
    for some, other in zip(fitted, trained(small(at_once=2)), strict=True):
        assert np.array_equal(some, other)
    monkeypatch.undo()
    # Without a shortage of memory nothing changes: a trial leaves no trace.
    for some, other in zip(trained(small(at_once="auto")), trained(small()), strict=True):
        assert np.array_equal(some, other)


def test_memory_that_holds_not_even_one_window_is_an_error() -> None:
    def attempt(count: int) -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        largest_that_fits(attempt, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
def test_a_gpu_trains_in_half_precision_within_its_memory() -> None:
    student = Transformer(TransformerConfig(vocab=64, layers=1, width=32, heads=2, length=16), seed=0, device="cuda")
    student.compute_with(Compute(memory=1 << 30, at_once="auto"))
    exact = trained(small())
    assert trained(student)[0] == pytest.approx(exact[0], rel=0.05)
