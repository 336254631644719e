"""Who imports whom: a federation knows no engine, and who shows finished runs needs no federation."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fpld

PACKAGE = Path(fpld.__file__).parent


def imported(folder: str) -> set[str]:
    """Return the modules of ours that a package imports, anywhere in its files but for type checkers alone."""
    found = set()
    for file in (PACKAGE / folder).rglob("*.py"):
        tree = ast.parse(file.read_text())
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("fpld.")}


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("protocol", ("federation", "engines", "cli", "report", "web", "students")),
        ("federation", ("engines", "cli", "report", "web")),
        ("engines", ("cli", "report", "web")),
        ("report", ("engines", "cli", "web")),
        ("storage", ("protocol", "federation", "engines", "students", "cli", "report", "web")),
    ],
)
def test_imports_go_one_way(folder: str, others: tuple[str, ...]) -> None:
    found = imported(folder)
    assert found
    assert not [name for name in found if name.split(".")[1] in others]
