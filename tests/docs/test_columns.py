"""docs/reference/columns.md and the pages of names are complete: every column, file and registered name is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fpld import registry
from fpld.cli import main
from tests.federation.conftest import config_file

__all__ = ["config_file"]

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference/columns.md").read_text("utf-8")


def named(title: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.fixture
def run(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    text = config_file.read_text().replace("rounds = 3", "rounds = 1")
    text = text.replace("heldout = 0.25", "heldout = 0.25\nlimit = 5000")  # so that there is a column `left_out`
    config_file.write_text(f"{text}\n[baselines]\nmethods = ['alone']\n")
    assert main(["run", str(config_file), "--out", str(tmp_path / "out"), "--json"]) == 0
    return tmp_path / "out"


def test_the_columns_are_those_of_a_run(run: Path) -> None:
    (line,) = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]
    assert named("trace.jsonl") == set(line)
    assert named("result.json") == set(json.loads((run / "result.json").read_text())[0])


def test_the_files_are_those_of_a_run(run: Path) -> None:
    """All that lies in a run's folder is explained, but for what keeps it whole."""
    internal = {"lock", "prepared.json", "seals.json", "public.safetensors", "fpld", "private"}
    found = {path.name for path in run.iterdir()} - internal
    found = {name for name in found if not name.startswith("baseline-")}
    assert found <= named("The folder of a run")


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("codecs.md", registry.codecs),
        ("rules.md", registry.rules),
        ("allocation.md", registry.allocators),
        ("allocation.md", registry.estimators),
    ],
    ids=["codecs", "rules", "allocators", "estimators"],
)
def test_every_registered_name_is_explained(page: str, table: registry.Registry[object]) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert [name for name in table.names() if not re.search(rf"^\| `{name}`", text, re.MULTILINE)] == []


def test_no_word_of_the_glossary_is_there_twice_and_they_are_sorted() -> None:
    words = re.findall(r"^\| (?!word|---)(.+?) \| ", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    assert len(words) == len(set(words)) > 40
    assert [word.lower() for word in words] == sorted(word.lower() for word in words)
