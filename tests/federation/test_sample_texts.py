"""What the student of each round writes: from public text, by the seed, and without a trace in any result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.cli import main
from fpld.data import ByteTokenizer
from fpld.federation.callbacks import MAX_PROMPT_WORDS, SAMPLE_TOKENS, prompts
from fpld.students import load
from fpld.students.generate import continuation
from tests.federation.conftest import WORDS as TEXTS
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_continuations_change_no_result(config_file: Path, tmp_path: Path) -> None:
    text = config_file.read_text() + '\n[baselines]\nmethods = ["float32"]\n'
    for name, key in (("with", ""), ("without", "continuations = 0")):
        config_file.write_text(text.replace("seed = 5", f"seed = 5\n{key}"))
        assert main(["run", str(config_file), "--out", str(tmp_path / name), "--json"]) == 0
    for file in ("student.safetensors", "student-best.safetensors", "result.json"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    for one, other in zip(lines(tmp_path / "with"), lines(tmp_path / "without"), strict=True):
        assert len(one.pop("continuations")) == 3
        assert other.pop("continuations") == []
        assert one.pop("seconds").keys() == other.pop("seconds").keys()
        assert one == other


@pytest.mark.slow
def test_continuations_are_by_the_student_of_their_round(config_file: Path, tmp_path: Path) -> None:
    config_file.write_text(config_file.read_text() + "\n[baselines]\nmethods = []\n")
    assert main(["run", str(config_file), "--out", str(tmp_path / "out"), "--json"]) == 0
    first, second, third = (line["continuations"] for line in lines(tmp_path / "out"))
    asked = [[sample["prompt"] for sample in samples] for samples in (first, second, third)]
    assert asked[0] == asked[1] == asked[2]  # the same words in all rounds
    assert first != third  # and other students
    for sample in third:
        assert set(sample["prompt"].split()) <= set(TEXTS["public"].split())
        assert len(sample["prompt"].split()) == MAX_PROMPT_WORDS
        assert SAMPLE_TOKENS / 4 <= len(sample["text"]) <= SAMPLE_TOKENS  # a token is a byte
    student = load(tmp_path / "out/student.safetensors")
    drawn = {
        continuation(student, ByteTokenizer(), third[0]["prompt"], tokens=SAMPLE_TOKENS, seed=seed, temperature=0.8)
        for seed in range(3)
    }
    assert len(drawn) == 3


@pytest.mark.parametrize("text", ["x", "word" * 40, "é" * 90, "one two"])
def test_any_public_text_has_prompts(text: str) -> None:
    found = prompts(ByteTokenizer().encode(text), ByteTokenizer(), count=4, seed=1)
    assert len(found) == 4
    assert all(found)


def test_prompts_go_by_the_seed() -> None:
    tokens = ByteTokenizer().encode(" ".join(f"word{i}" for i in range(500)))
    one, same, other = (prompts(tokens, ByteTokenizer(), count=3, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert np.array_equal(tokens, ByteTokenizer().encode(" ".join(f"word{i}" for i in range(500))))
