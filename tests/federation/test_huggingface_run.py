"""A whole federation of pretrained models: a tiny Llama at every node, made on the spot."""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld import registry
from fpld.codecs.updates import encode_update
from fpld.config import parse_config, read_config
from fpld.data import load_tokenizer
from fpld.engines.local import run_local
from fpld.errors import InputError, MissingExtraError
from fpld.node.training import make_student
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.storage.arrays import read_arrays
from fpld.students import load as load_student
from fpld.students import student_class
from fpld.students.configs import parse_student
from tests.tiny_llama import make_llama

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")
pytest.importorskip("transformers")

V = 300
WORDS = {
    "north": "ice snow wind bear the cold is long and white",
    "south": "sun sand palm sea the heat is long and bright",
    "public": "wind sea sun snow the day is long and bear sand",
}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make texts of two nodes and a public one, and a model folder whose V is larger than its tokenizer's."""
    root = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    for label, words in WORDS.items():
        (root / "text" / label).mkdir(parents=True)
        for number in range(6):
            text = " ".join(rng.choice(words.split(), 300))
            (root / "text" / label / f"{number}.txt").write_text(text)
    make_llama(root / "model", V, text=" ".join(WORDS.values()))
    return root


def configuration(world: Path) -> str:
    return f"""
        [run]
        rounds = 2
        [data]
        path = {json.dumps(str(world / "text"))}
        heldout_tokens = 200
        [probe]
        source = "public"
        contexts = 64
        length = 8
        [tokenizer]
        kind = "huggingface"
        [[nodes]]
        name = "north"
        bits = 4.0
        [[nodes]]
        name = "south"
        bits = 6.5
        [student]
        kind = "huggingface"
        path = {json.dumps(str(world / "model"))}
        lora = 2
        length = 8
        rate = 1e-2
        distill_rate = 1e-2
        [local]
        steps = 12
        [distill]
        steps = 12
        [baselines]
        methods = ["alone", "pooled", "fedavg", "fedavg-1bit", "flora", "float32"]
        [engine]
        workers = 0
        """


@pytest.fixture(scope="module")
def finished(world: Path) -> tuple[list[dict[str, object]], Path]:
    text = configuration(world)
    return run_local(parse_config(text, "test"), text, world / "one", resume=False), world / "one"


def test_runs_to_the_end_and_learns(finished: tuple[list[dict[str, object]], Path]) -> None:
    rows, out = finished
    loss = {row["method"]: float(str(row["heldout_loss"])) for row in rows}
    averaged = {"fedavg", "fedavg-1bit", "flora, 1 round"}
    assert set(loss) == {"base", "alone: north", "alone: south", "pooled", *averaged, "float32 logits", "fpld"}
    assert all(loss[name] < loss["base"] for name in averaged)
    assert loss["fpld"] < loss["base"]
    sent = {row["method"]: int(str(row["uplink_bytes"])) for row in rows}
    assert sent["fpld"] <= 2 * (64 * V * (4.0 + 6.5) / 8 + 2 * 200)
    student = load_student(out / "student.safetensors")
    adapters = 4 * student.parameters
    in_bits = len(encode_update(student.state(), bits=1, seed=0))
    expected = 2 * 2 * adapters, 2 * 2 * in_bits, 2 * adapters
    assert (sent["fedavg"], sent["fedavg-1bit"], sent["flora, 1 round"]) == expected
    assert len((out / "trace.jsonl").read_text().splitlines()) == 2


def test_the_student_and_the_tokenizer_can_be_read_back(finished: tuple[list[dict[str, object]], Path]) -> None:
    _, out = finished
    tokenizer = load_tokenizer(out / "tokenizer.json")
    student = load_student(out / "student.safetensors")
    assert tokenizer.vocab == student.vocab == V
    assert tokenizer.digest == json.loads((out / "prepared.json").read_text())["tokenizer"]
    text = "the snow is long — and naïve"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    state, _ = read_arrays(out / "student.safetensors")
    assert all("lora" in name for name in state)


def test_two_runs_give_the_same_bits(world: Path, finished: tuple[list[dict[str, object]], Path]) -> None:
    text = configuration(world)
    (_, out) = finished
    run_local(parse_config(text, "test"), text, world / "two", resume=False)
    for name in ("student.safetensors", "tokenizer.json", "probe.json"):
        assert (out / name).read_bytes() == (world / "two" / name).read_bytes()


def test_a_tokenizer_of_no_model_is_refused(world: Path) -> None:
    before, _, after = configuration(world).partition("[student]")
    text = f'{before}[student]\nkind = "ngram"\n[local]{after.partition("[local]")[2]}'
    with pytest.raises(InputError, match=r"tokenizer\.path or student\.path must name a model"):
        parse_config(text, "test")


def test_a_vocabulary_of_another_tokenizer_is_refused(world: Path, tmp_path: Path) -> None:
    text = configuration(world).replace(
        '[tokenizer]\n        kind = "huggingface"', '[tokenizer]\n        kind = "bytes"'
    )
    with pytest.raises(InputError, match=r"vocab must be 256 for this student, but .* has 300"):
        run_local(parse_config(text, "test"), text, tmp_path / "run", resume=False)


@pytest.mark.parametrize("module", ["transformers", "peft"])
def test_without_the_library_the_error_names_the_extra(
    world: Path, tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    text = configuration(world)
    with pytest.raises(MissingExtraError, match=r"fpld\[huggingface\]"):
        run_local(parse_config(text, "test"), text, tmp_path / "run", resume=False)


def test_without_torch_too_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("huggingface", "gradient", "transformer"):
        monkeypatch.delitem(sys.modules, f"fpld.students.{name}", raising=False)
    monkeypatch.setattr(registry.students, "_loaded", {})
    with pytest.raises(MissingExtraError, match=r"fpld\[huggingface\]"):
        student_class("huggingface")


def test_models_load_in_several_threads_at_once(world: Path) -> None:
    # Two threads in the reader of transformers at once left tied weights missing.
    options = {"kind": "huggingface", "path": str(world / "model"), "lora": 2, "length": 8}
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: make_student(parse_student(options), V, 7).state(), range(8)))
    assert all(np.array_equal(state[name], made[0][name]) for state in made for name in state)


def test_the_preset_is_sound() -> None:
    config, _ = read_config("huggingface")
    assert config.model_path == "smollm2"
    assert len(config.nodes) >= 4
    labels = sum(node.context_bits or math.inf for node in config.nodes) * config.probe.contexts / 8
    assert config.run.rounds * (labels + len(config.nodes) * OVERHEAD_BYTES) <= 2e6


def test_adapters_in_two_bits_are_rebuilt_write_and_teach(world: Path, tmp_path: Path) -> None:
    """The way of the preset `huggingface-updates`: the uplink is that of the updates, the base stays as it is."""
    text = (
        configuration(world)
        .replace("rounds = 2", "rounds = 1")
        .replace("bits = 4.0", "bits = 8.0")
        .replace("bits = 6.5", "bits = 8.0")
        .replace("[tokenizer]", "[send]\nupdates = 2.0\n[written]\ncontexts = 64\n[tokenizer]")
        .replace('["alone", "pooled", "fedavg", "fedavg-1bit", "flora", "float32"]', '["fedavg-1bit", "ensemble"]')
    )
    rows = run_local(parse_config(text, "test"), text, tmp_path / "run", resume=False)
    row = {str(row["method"]): row for row in rows}
    student = load_student(tmp_path / "run/student.safetensors")
    assert all("lora" in name for name in student.state())
    assert float(str(row["fpld"]["heldout_loss"])) < float(str(row["base"]["heldout_loss"]))
    # Two bits per weight of an adapter and a header, whatever the size of the model below.
    assert int(str(row["fpld"]["uplink_bytes"])) <= 2 * (len(encode_update(student.state(), bits=2, seed=0)) + 300)
    assert int(str(row["fpld"]["uplink_bytes"])) > int(str(row["fedavg-1bit"]["uplink_bytes"]))


def test_the_preset_with_updates_sends_less_than_a_megabyte() -> None:
    config, _ = read_config("huggingface-updates")
    assert config.model_path == "smollm2"
    assert config.update_bits == 2.0
    assert config.student == read_config("huggingface")[0].student
