"""What is special to the transformer: devices, schedule, and that no one else's random state is touched."""

import subprocess
import sys

import numpy as np
import pytest

from fpld import registry
from fpld.errors import InputError, MissingExtraError

torch = pytest.importorskip("torch")

from fpld.students.configs import TransformerConfig  # noqa: E402
from fpld.students.gradient import schedule, use_threads  # noqa: E402
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
    assert str(auto.device) == ("cuda" if torch.cuda.is_available() else "cpu")
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
