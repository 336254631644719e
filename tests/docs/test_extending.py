"""docs/extending.md runs as it stands, is short, and what it registers works by name inside a real `fpld run`."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fpld import Decoded, InputError, combine, decode, encode, registry
from fpld.cli import main
from fpld.registry import Registry
from fpld.rules import MEAN
from tests.codecs import test_codecs
from tests.codecs.codec_rows import Row, draw
from tests.federation.conftest import CONFIG, write_texts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TABLES = (registry.codecs, registry.rules, registry.allocators, registry.estimators, registry.students)
# What the page registers: the table, the name, and the object as its module names it.
NAMES = {
    "codecs": ("sign", "SignCodec()"),
    "rules": ("midrange", "Midrange()"),
    "allocators": ("roots", "by_square_root"),
    "estimators": ("disagreement", "Disagreement()"),
    "students": ("bigram", "Bigram"),
}
SIGN = '[codec]\nname = "sign"\n'
MIDRANGE = '[combine]\nrule = "midrange"\n'
ROOTS = '[budget]\ntotal = 4.0\nallocator = "roots"\n'
DISAGREEMENT = f'{ROOTS}estimator = "disagreement"\nwarmup = 1\n'
BIGRAM = '[student]\nkind = "bigram"\ntrust = 5.0\n'


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in TABLES:
        monkeypatch.setattr(table, "_loaded", dict(table._loaded))


@pytest.fixture
def extended(fresh: None, tmp_path: Path) -> None:
    for number, code in enumerate(BLOCKS):
        file = tmp_path / f"extension{number}.py"
        file.write_text(code)
        runpy.run_path(str(file))


def configured(folder: Path, *tables: str, workers: int = 0) -> Path:
    """Write the small federation's texts and its configuration with other tables; two rounds, no baselines."""
    write_texts(folder)
    text = CONFIG.format(folder=folder)
    text = text.replace("rounds = 3", "rounds = 2").replace("workers = 0", f"workers = {workers}")
    text = text.replace("bits = 1.5", "bits = 4.0\nweight = 4.0")
    if SIGN in tables:
        text = text.replace("bits = 4.0", "bits = 4.0\nclip = 4.0")
    if BIGRAM in tables:
        text = re.sub(r"\[student\]\n.*?\n\n", "", text, flags=re.DOTALL)
    file = folder / "config.toml"
    file.write_text("\n".join([text, "[baselines]\nmethods = []\n", *tables]))
    return file


def run(folder: Path, capsys: pytest.CaptureFixture[str], *tables: str) -> tuple[float, list[dict[str, Any]]]:
    """Run a federation; return the held-out loss at its end, and the lines of its trace."""
    assert main(["run", str(configured(folder, *tables)), "--out", str(folder / "out"), "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    lines = [json.loads(line) for line in (folder / "out/trace.jsonl").read_text().splitlines()]
    return rows["fpld"]["heldout_loss"], lines


def test_the_page_has_all_five_and_each_is_short() -> None:
    found = [re.findall(r'registry\.(\w+)\.register\("(\w+)", (.*)\)$', code, re.MULTILINE) for code in BLOCKS]
    assert [each for block in found for each in block] == [(table, *names) for table, names in NAMES.items()]
    assert all(len(code.splitlines()) < 40 for code in BLOCKS)


@pytest.mark.slow
@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("tables", [(SIGN,), (MIDRANGE,), (BIGRAM,)], ids=["codec", "rule", "student"])
def test_a_run_with_one_of_them_teaches_the_student(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tables: tuple[str, ...]
) -> None:
    loss, lines = run(tmp_path, capsys, *tables)
    assert 0 < loss < 4.0  # log 256 is 5.545
    assert lines[-1]["heldout_loss"] == loss


@pytest.mark.slow
@pytest.mark.usefixtures("extended")
def test_a_run_uses_the_allocator_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in run(tmp_path, capsys, ROOTS)[1]:
        assert line["bits_allotted"] == pytest.approx([2.0, 1.0, 1.0])


@pytest.mark.slow
@pytest.mark.usefixtures("extended")
def test_a_run_follows_the_estimator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run(tmp_path, capsys, DISAGREEMENT)[1]
    assert first["bits_allotted"] == pytest.approx([4 / 3] * 3)
    roots = np.sqrt(first["weights"])
    assert second["bits_allotted"] == pytest.approx(4.0 * roots / roots.sum())
    assert np.ptp(roots) > 0


@pytest.mark.slow
def test_all_five_installed_run_with_worker_processes(tmp_path: Path) -> None:
    """A package with entry points, as others install one, found by the command and by its workers."""
    package = tmp_path / "site"
    info = package / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    entries = []
    for code, (table, (name, made)) in zip(BLOCKS, NAMES.items(), strict=True):
        (package / f"other_{table}.py").write_text(
            re.sub(r"^.*registry\.\w+\.register.*$", f"ITEM = {made}", code, flags=re.M)
        )
        entries.append(f"[fpld.{table}]\n{name} = other_{table}:ITEM\n")
    (info / "entry_points.txt").write_text("\n".join(entries))
    file = configured(tmp_path, SIGN, MIDRANGE, DISAGREEMENT, BIGRAM, workers=1)
    path = os.pathsep.join([str(package), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fpld", "run", str(file), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(done.stdout)["rows"]}
    assert 0 < rows["fpld"]["heldout_loss"] < 4.0


@pytest.mark.usefixtures("extended")
def test_the_codec_of_the_docs_keeps_the_contract() -> None:
    row = Row("sign", registry.codecs.get("sign"), clip=3.0)
    plan = row.plan()
    logits = draw(*plan.shape)
    decoded = decode(row.codec, encode(row.codec, logits, plan), plan)
    assert np.array_equal(np.sign(decoded.values), np.sign(logits))
    for test in (
        test_codecs.test_any_ranges_give_that_part_of_the_whole,
        test_codecs.test_a_reader_that_seeks_begins_anywhere_and_another_refuses,
        test_codecs.test_the_least_budget_works_and_less_is_refused,
    ):
        test(row)


@pytest.mark.usefixtures("extended")
def test_the_rule_of_the_docs() -> None:
    none = np.zeros((1, 1))
    replies = [Decoded(np.array([values]), none, none) for values in ([1.0, 2.0], [3.0, 8.0], [4.0, 3.0])]
    assert combine(registry.rules.get("midrange"), replies).tolist() == [[2.5, 5.0]]


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(
    ("caps", "floors", "expected"),
    [
        (None, None, [100.0, 200.0]),
        ([400.0, 400.0], [0.0, 0.0], [100.0, 200.0]),
        ([400.0, 150.0], [0.0, 0.0], [150.0, 150.0]),
        ([400.0, 400.0], [120.0, 0.0], [120.0, 180.0]),
    ],
)
def test_the_allocator_of_the_docs_shares_out_within_caps_and_floors(
    caps: list[float] | None, floors: list[float] | None, expected: list[float]
) -> None:
    bits = registry.allocators.get("roots")([1.0, 4.0], 300.0, 8, caps, floors)
    assert bits == pytest.approx(expected)


@pytest.mark.usefixtures("extended")
def test_a_command_takes_the_allocator_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--weights", "1,4", "--total", "300", "--vocab", "8", "--caps", "400", "--policy", "roots"]
    assert main(["allocate", *arguments, "--json"]) == 0
    assert [row["bits"] for row in json.loads(capsys.readouterr().out)["rows"]] == pytest.approx([100.0, 200.0])


@pytest.mark.usefixtures("extended")
def test_the_student_of_the_docs_learns_what_follows_each_token(tmp_path: Path) -> None:
    """A text in which every token is followed by the next one, and a target that says so."""
    bigram = registry.students.get("bigram")
    student = bigram(bigram.Config(vocab=4), seed=0)
    assert student.finetune(np.tile(np.arange(4), 250), steps=1, seed=0) < 0.05
    sequences = np.tile(np.arange(4), (1000, 1))
    assert student.logits(sequences[:1]).argmax(axis=1).tolist() == [1, 2, 3, 0]
    target = np.tile(np.eye(4, dtype=np.float32)[::-1], (1000, 1))
    assert student.distill(sequences, target, steps=1, seed=0) == pytest.approx(0.0, abs=0.01)
    assert student.logits(sequences[:1]).argmax(axis=1).tolist() == [3, 2, 1, 0]
    student.save(tmp_path / "student")
    assert np.array_equal(bigram.load(tmp_path / "student").logits(sequences), student.logits(sequences))


def test_entry_points_of_other_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real installed distribution: a module and its metadata on the path."""
    (tmp_path / "other_package.py").write_text("from fpld.rules import MEAN as evenly\n")
    info = tmp_path / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fpld.rules]\nevenly = other_package:evenly\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rules: Registry[object] = Registry("rule", "fpld.rules", {})
    assert rules.names() == ["evenly"]
    assert rules.get("evenly") is MEAN


@pytest.mark.usefixtures("fresh")
def test_unknown_and_taken_names_are_refused() -> None:
    with pytest.raises(InputError, match="allocator must be one of inverse, optimal, square-root, uniform, got 'best'"):
        registry.allocators.get("best")
    with pytest.raises(InputError, match="'mean' exists already"):
        registry.rules.register("mean", MEAN)
