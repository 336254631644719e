"""The student in use: text from it, its loss, and folders that `transformers` and `peft` read without this package."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sysconfig
import time
import venv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fpld
from fpld import progress
from fpld.cli import main
from fpld.data import BpeTokenizer, ByteTokenizer, load_tokenizer
from fpld.students import NGram, NGramConfig, load
from fpld.students import generate as generating
from fpld.students.export import export_tokenizer
from fpld.students.generate import generate
from fpld.students.heldout import HeldoutText
from tests.federation.conftest import CONFIG, WORDS, write_texts
from tests.tiny_llama import make_llama

pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = "snow and ice, naïve café — 123\n\nthe wolf"
# The environment has nothing of this package, nor a network: what loads there loads anywhere.
FOREIGN = """
import importlib.util, json, sys
assert importlib.util.find_spec("fpld") is None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text = sys.argv[1:3]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
assert tokenizer.decode(ids[0]) == text, tokenizer.decode(ids[0])
with torch.no_grad():
    logits = model(ids[:, :12]).logits[0]
torch.manual_seed(0)
drawn = model.generate(ids[:, :4], do_sample=True, max_new_tokens=8, pad_token_id=0)
print(json.dumps({"ids": ids[0].tolist(), "logits": logits.tolist(), "drawn": len(drawn[0])}))
"""


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh virtual environment that has every package that is installed here but this one.

    They are linked, not copied. Files that would lead an interpreter back here (.pth, __editable__) are left out.
    """
    place = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("fpld", "__editable__")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    return place / "bin/python"


def foreign(python: Path, folder: Path, code: str = FOREIGN, *more: str) -> dict[str, Any]:
    """Run code on an exported folder in the environment without this package."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), "-I", "-c", code, str(folder), TEXT, *more],
        capture_output=True,
        text=True,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    return output


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main([*map(str, arguments), "--json"]) == 0
    table: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return table


def make_run(place: Path, student: str, tokenizer: str = 'kind = "bytes"') -> Path:
    write_texts(place)
    text = CONFIG.format(folder=place).replace("rounds = 3", "rounds = 1").replace('kind = "bytes"', tokenizer)
    head, _, rest = text.partition("[student]")
    text = f"{head}[baselines]\nmethods = []\n[student]\n{student}\n[base]{rest.partition('[base]')[2]}"
    (place / "config.toml").write_text(text)
    assert main(["run", str(place / "config.toml"), "--out", str(place / "run"), "--json"]) == 0
    return place / "run"


LLAMA = 'kind = "transformer"\nlayers = 2\nwidth = 16\nheads = 2\nlength = 16\nbatch = 4'


@pytest.fixture(scope="module", params=['kind = "bytes"', 'kind = "bpe"\nvocab = 280'], ids=["bytes", "bpe"])
def llama_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of small transformers, by each kind of tokenizer."""
    return make_run(tmp_path_factory.mktemp("llama"), LLAMA, request.param)


@pytest.mark.slow
def test_transformers_reads_an_exported_student_without_this_package(
    llama_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    made = rows(capsys, "export", llama_run, "--to", "huggingface", "--out", tmp_path / "out", "--licence", "cc0-1.0")
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {str(row["file"]).rpartition("/")[2] for row in made} == {*names, "tokenizer_config.json"}
    loaded = foreign(elsewhere, tmp_path / "out")
    ids = load_tokenizer(llama_run / "tokenizer.json").encode(TEXT)
    assert loaded["ids"] == ids.tolist()
    logits = load(llama_run / "student.safetensors").logits(ids[None, :12])
    assert logits == pytest.approx(np.array(loaded["logits"]), abs=1e-4)
    assert loaded["drawn"] == 12  # no token that happens to be number 2 ends a text
    card = (tmp_path / "out/README.md").read_text()
    caption, table = card.partition("## Budgets\n\n")[2].split("\n\n")[:2]
    assert caption == "Bits per context, and bytes of all rounds."
    assert "| bits per context |" in table
    limit = f"| north | {1.5 * len(logits[0]):g} bits per context |"
    for text in ("license: cc0-1.0", limit, "## Rounds", "| fpld |", "held out"):
        assert text in card


@pytest.mark.slow
def test_an_export_does_not_depend_on_its_place_and_holds_no_private_text(
    llama_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "a longer name"):
        rows(capsys, "export", llama_run, "--to", "huggingface", "--out", tmp_path / name, "--best")
    for file in (tmp_path / "one").iterdir():
        content = file.read_bytes()
        assert content == (tmp_path / "a longer name" / file.name).read_bytes()
        assert str(llama_run.parent).encode() not in content
        assert str(tmp_path).encode() not in content
    assert (tmp_path / "one/config.json").stat().st_mode & 0o044  # for others to read
    assert main(["export", str(llama_run), "--to", "huggingface", "--out", str(tmp_path / "one")]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["export", str(llama_run), "--to", "huggingface", "--out", str(tmp_path / "x"), "--adapter"]) == 2
    assert "adapter must be False" in capsys.readouterr().err


def test_no_command_copies_private_text(llama_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (llama_run / "private/README.txt").exists()
    tokens = (llama_run / "private/heldout.safetensors").read_bytes()[-256:]
    outside = [file for file in llama_run.rglob("*") if file.is_file() and file.parent.name not in ("private", "text")]
    rows(capsys, "report", llama_run, "--out", tmp_path / "report", "--no-figures")
    rows(capsys, "export", llama_run, "--to", "csv", "--out", tmp_path / "csv")
    for file in [*outside, *tmp_path.rglob("*.*")]:
        assert tokens not in file.read_bytes(), file


ADAPTERS = """
import importlib.util, json, sys
assert importlib.util.find_spec("fpld") is None
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
folder, _, base, ids = sys.argv[1:5]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
with torch.no_grad():
    print(json.dumps({"logits": model(torch.tensor([json.loads(ids)])).logits[0].tolist()}))
"""


@pytest.mark.slow
def test_lora_is_merged_or_exported_as_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    model = make_llama(tmp_path / "model", 300, text=" ".join(WORDS.values()))
    student = f'kind = "huggingface"\npath = {json.dumps(str(model))}\nlora = 2\nlength = 16\nrate = 0.02'
    run = make_run(tmp_path, student, 'kind = "huggingface"')
    capsys.readouterr()
    rows(capsys, "export", run, "--to", "huggingface", "--out", tmp_path / "merged")
    rows(capsys, "export", run, "--to", "huggingface", "--out", tmp_path / "lora", "--adapter")
    merged = foreign(elsewhere, tmp_path / "merged")
    ids = merged["ids"][:12]
    logits = load(run / "student.safetensors").logits(np.array([ids], np.int32))
    base = load(run / "base-0.safetensors").logits(np.array([ids], np.int32))
    assert np.abs(logits - base).max() > 0.01  # the adapters have learnt something
    assert logits == pytest.approx(np.array(merged["logits"]), abs=1e-4)
    adapted = foreign(elsewhere, tmp_path / "lora", ADAPTERS, str(model), json.dumps(ids))
    assert logits == pytest.approx(np.array(adapted["logits"]), abs=1e-4)
    assert json.loads((tmp_path / "lora/adapter_config.json").read_text())["base_model_name_or_path"] == "model"
    assert "SHA-256" in (tmp_path / "lora/README.md").read_text()
    for file in [*(tmp_path / "merged").iterdir(), *(tmp_path / "lora").iterdir()]:
        assert str(tmp_path).encode() not in file.read_bytes(), file


def test_a_student_that_nobody_else_reads_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(finished), "--to", "huggingface", "--out", str(tmp_path / "out")]) == 2
    assert "kind 'ngram' has no form that other libraries read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_generated_text_goes_by_its_seed(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("generate", finished, "--prompt", "the w", "--tokens", "30", "--samples", "2", "--seed", "4")
    first = rows(capsys, *ask)
    second = rows(capsys, *ask)
    assert first == second
    assert first[0]["text"] != first[1]["text"]
    assert all(len(row["text"]) == 30 for row in first)  # bytes of plain words
    assert main([str(word) for word in ask]) == 0
    assert capsys.readouterr().out.startswith(f"the w{first[0]['text'][:5]}")
    (greedy,) = rows(capsys, "generate", finished, "--temperature", "0", "--tokens", "5")
    (again,) = rows(capsys, "generate", finished, "--temperature", "0", "--tokens", "5", "--seed", "9")
    assert greedy["text"] == again["text"]
    assert main(["generate", str(finished), "--model", "own"]) == 2
    assert "no model 'own': it has student, best, base" in capsys.readouterr().err


def test_tokens_are_drawn_as_often_as_the_student_says() -> None:
    """One draw of 4000 tokens; each count is within 5 standard deviations, a false alarm in a million."""
    student = NGram(NGramConfig(vocab=4, order=1, buckets=4))
    chances = np.array([0.1, 0.2, 0.3, 0.4])
    student.load_state({**student.state(), "bias": np.log(chances).astype(np.float32)})
    drawn = np.bincount(list(generate(student, np.zeros(1, np.int32), tokens=4000, seed=1)), minlength=4)
    assert np.all(np.abs(drawn - 4000 * chances) < 5 * np.sqrt(4000 * chances * (1 - chances)))
    two = set(generate(student, np.zeros(1, np.int32), tokens=50, seed=1, top=2))
    assert two == {2, 3}


@pytest.mark.slow
def test_evaluating_gives_the_numbers_of_the_table(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluated = {row["model"]: row for row in rows(capsys, "evaluate", finished)}
    table = {row["method"]: row for row in json.loads((finished / "result.json").read_text())}
    for model, method in (("student", "fpld"), ("base", "base")):
        assert evaluated[model]["loss"] == pytest.approx(table[method]["heldout_loss"])
        assert evaluated[model]["bits_per_byte"] == pytest.approx(table[method]["bits_per_byte"])
        assert evaluated[model]["perplexity"] == pytest.approx(math.exp(evaluated[model]["loss"]))
    assert evaluated["best"]["loss"] <= evaluated["student"]["loss"]


def test_nothing_is_silent_for_long(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every few seconds there is a line on standard error, with seconds of a hundredth."""
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_last_line", 0.0)
    nats = HeldoutText.nats
    draw = generating.continuation

    def slow(function: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return function(*arguments, **options)

    monkeypatch.setattr(HeldoutText, "nats", lambda *arguments: slow(nats, *arguments))
    monkeypatch.setattr(generating, "continuation", partial(slow, draw))
    for command, line in (("evaluate", "evaluating student, "), ("generate", "writing text, ")):
        assert main([command, str(finished)]) == 0
        assert line in capsys.readouterr().err
        assert main([command, str(finished), "--json"]) == 0
        assert not capsys.readouterr().err
    run = fpld.read_run(finished)
    run.evaluate(progress=True)
    run.generate(tokens=4, progress=True)
    said = capsys.readouterr().err
    assert "evaluating student, " in said
    assert "writing text, " in said
    run.evaluate()
    assert not capsys.readouterr().err  # no terminal, and nobody asked


def test_evaluating_a_text_of_ones_own(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.txt").write_text("snow and wolf in the frost " * 40)
    (row, *_) = rows(capsys, "evaluate", finished, "--data", tmp_path / "own.txt")
    assert (row["model"], row["bytes"]) == ("student", (tmp_path / "own.txt").stat().st_size + 2)
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2))  # a token is a byte
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "holds no models" in capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BpeTokenizer.train([TEXT * 9], vocab=270)])
def test_exported_tokenizers_are_those_of_the_library(tokenizer: Any, tmp_path: Path) -> None:
    import tokenizers

    export_tokenizer(tokenizer, tmp_path, 8)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(TEXT).ids == tokenizer.encode(TEXT).tolist()
    assert theirs.decode(theirs.encode(TEXT).ids) == TEXT
    assert theirs.get_vocab_size() == tokenizer.vocab
