"""The table of what fpld works with: every row names a test that exists, or says that there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TITLE = "## What fpld works with"
TEST = re.compile(r"`(tests/[\w/.-]+\.py)(?:::(\w+))?`")


class Row(NamedTuple):
    """A line of the table: its group, what fpld works with, and how that is known."""

    group: str
    thing: str
    known_by: str


def rows() -> list[Row]:
    """Return the lines of the table on the page."""
    section = (ROOT / "docs/index.md").read_text("utf-8").partition(f"\n{TITLE}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


@cache
def functions(file: str) -> set[str]:
    """Return the names of a file's tests."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_table_has_every_group() -> None:
    groups = [row.group for row in rows() if row.group]
    learning = ["models", "model files", "text", "trainers", "trackers"]
    assert groups == [*learning, "programs", "servers", "engines", "deployment", "clouds"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.thing)
def test_a_row_names_a_test_or_says_that_there_is_none(row: Row) -> None:
    named = TEST.findall(row.known_by)
    assert len(named) == 1 or row.known_by.startswith("no test: ")
    assert all(name for _, name in named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for file, name in TEST.findall(page.read_text("utf-8")):
        assert (ROOT / file).is_file(), file
        assert not name or name in functions(file), f"{file}::{name}"
