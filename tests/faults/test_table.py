"""The table of faults: every row has a test that is there, and the page says the same."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.faults.table import AGGREGATOR, DECODER, NODE, PAGE, PARTS, ROOT, page


@cache
def functions(file: str) -> set[str]:
    """Return the names of a file's tests."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_all_rows_are_there() -> None:
    assert (len(DECODER), len(NODE), len(AGGREGATOR)) == (17, 6, 15)


@pytest.mark.parametrize("test", sorted({test for rows in PARTS.values() for row in rows for test in row.tests}))
def test_a_row_names_a_test_that_exists(test: str) -> None:
    file, name = test.split("::")
    assert name in functions(file)


def test_every_row_has_a_test() -> None:
    assert all(row.tests for rows in PARTS.values() for row in rows)


def test_the_page_is_made_from_the_table() -> None:
    assert PAGE.read_text() == page()
