"""docs/extending.md runs as it stands, is short, and what it registers can be used by name."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from fpld import Decoded, InputError, combine, decode, encode, registry
from fpld.cli import main
from fpld.registry import Registry
from fpld.rules import MEAN
from tests import test_codecs
from tests.codec_rows import Row, draw
from tests.federation.conftest import CONFIG, write_texts

ROOT = Path(__file__).parent.parent


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (registry.allocators, registry.rules, registry.codecs):
        monkeypatch.setattr(table, "_loaded", dict(table._loaded))


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)


@pytest.fixture
def extended(fresh: None, tmp_path: Path) -> None:
    for number, code in enumerate(examples()):
        file = tmp_path / f"extension{number}.py"
        file.write_text(code)
        runpy.run_path(str(file))


def test_examples_of_the_docs_are_short() -> None:
    assert len(examples()) >= 3
    assert all(len(code.splitlines()) < 40 for code in examples())


@pytest.mark.usefixtures("extended")
def test_the_allocator_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["allocate", "--weights", "1,4", "--total", "300", "--vocab", "8", "--policy", "square-root"]) == 0
    assert "100" in capsys.readouterr().out


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
def test_codec_and_rule_of_the_docs_run_a_federation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run: nodes code with the codec, the aggregator combines with the rule."""
    write_texts(tmp_path)
    text = re.sub(r"^bits = .*$", "bits = 4.0\nclip = 4.0", CONFIG.format(folder=tmp_path), flags=re.MULTILINE)
    file = tmp_path / "extended.toml"
    file.write_text(text + '\n[codec]\nname = "sign"\n\n[combine]\nrule = "midrange"\n')
    assert main(["run", str(file), "--out", str(tmp_path / "out"), "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert 0 < rows["fpld"]["heldout_loss"] < 5.5  # log 256 is 5.545


@pytest.mark.usefixtures("extended")
def test_the_rule_of_the_docs() -> None:
    none = np.zeros((1, 1))
    replies = [Decoded(np.array([values]), none, none) for values in ([1.0, 2.0], [3.0, 8.0], [4.0, 3.0])]
    assert combine(registry.rules.get("midrange"), replies).tolist() == [[2.5, 5.0]]


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
    with pytest.raises(InputError, match="allocator must be one of inverse, optimal, uniform, got 'best'"):
        registry.allocators.get("best")
    with pytest.raises(InputError, match="'mean' exists already"):
        registry.rules.register("mean", MEAN)
