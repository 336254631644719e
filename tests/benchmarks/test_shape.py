"""The shape of a package: figures and places of a small package that are known, and a traced round."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import shape

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "__init__": "from small.top import start\n",
    "top": '''"""Docstring
of two lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from small import middle
from small.plugins import first, second

if TYPE_CHECKING:
    from small.types_only import Kind

# A comment above the table.
TABLE = {"first": first, "second": second}
TEXT = """
# no comment
"""


def start(found: Kind) -> None:
    a, b = 1, found
    own, (c, d) = a, (b, b)
    e, f = middle.pair()
    for known in range(3):
        print(known)
''',
    "middle": "from . import low\n\n\ndef pair(a, b, c, d, e, f, /, g, h, i, *, j, k): ...\n\n\nclass Kind: ...\n",
    "low": "def late():\n    from small import top\n\n\ndef _kind(): ...\n",
    "types_only": "class Kind: ...\n",
    "plugins/__init__": "",
    "plugins/first": "def run(): ...\n\n\ndef pair(): ...\n",
    "plugins/second": "import small.low\n\n\nasync def run(): ...\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> shape.Tree:
    for name, text in FILES.items():
        path = tmp_path / "small" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return shape.Tree(tmp_path, "small")


def test_figures(tree: shape.Tree) -> None:
    figures = tree.figures()
    assert figures.pop("import_share") == figures["import_lines"] / figures["lines"]
    assert figures.pop("comment_share") == figures["comment_lines"] / figures["lines"]
    assert figures.pop("packed_share") == 2 / 5
    assert figures == {
        "files": 8,
        "lines": 48,
        "code_lines": 28,
        "import_lines": 9,
        "comment_lines": 1,
        "packed": 2,
        "lone": 4,
        "names": 3,
        "names_without_contracts": 2,
        "chain": 4,
        "wide": 1,
        "vague": 3,
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("packed", ["small/top.py:22: a, b = (1, found)", "small/top.py:23: own, (c, d) = (a, (b, b))"]),
        ("wide", ["small/middle.py:4: pair has 11 parameters"]),
        ("vague", ["small/top.py:21: found (parameter)", "small/top.py:23: own", "small/top.py:25: known"]),
        (
            "chain",
            [
                "small/__init__.py:1: small",
                "small/top.py:8: small.top",
                "small/middle.py:1: small.middle",
                "small/low.py:1: small.low",
            ],
        ),
        (
            "lone",
            [
                "small/middle.py:1: 7 lines, imported by small/top.py",
                "small/plugins/first.py:1: 4 lines, imported by small/top.py",
                "small/plugins/second.py:1: 4 lines, imported by small/top.py",
                "small/types_only.py:1: 1 lines, imported by small/top.py",
            ],
        ),
        (
            "names",
            [
                "small/middle.py:7: class Kind",
                "small/types_only.py:1: class Kind",
                "small/middle.py:4: def pair",
                "small/plugins/first.py:4: def pair",
                "small/plugins/first.py:1: def run (contract of a plugin table)",
                "small/plugins/second.py:4: def run (contract of a plugin table)",
            ],
        ),
    ],
)
def test_lists(tree: shape.Tree, kind: str, expected: list[str]) -> None:
    assert [str(place) for place in getattr(tree, kind)()] == expected


def test_a_circle_of_imports_ends(tmp_path: Path) -> None:
    (tmp_path / "ring").mkdir()
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / "ring" / f"{name}.py").write_text(f"from ring import {other}\n")
    assert len(shape.Tree(tmp_path, "ring").chain()) == 3


def test_begin_and_end_are_the_first_that_are_one_function(tree: shape.Tree) -> None:
    assert tree.choose(["absent", "run", "second.py:run", "start"], "--begin") == "small/plugins/second.py:run"
    with pytest.raises(SystemExit, match="--begin"):
        tree.choose(["run"], "--begin")


def test_the_round_is_that_of_the_tree_named(tmp_path: Path) -> None:
    """A package with a command line of its own, traced as the real one is: from `begin` to the return of `end`."""
    (tmp_path / "fpld").mkdir()
    (tmp_path / "fpld" / "__init__.py").write_text("")
    (tmp_path / "fpld" / "cli.py").write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def prepare(): ...\n"
        "def work(): return [each for each in (1, 2)]\n"
        "def begin(): ...\n"
        "def helper(): ...\n"
        "def end(): helper()\n"
        "def rest(): ...\n"
        "def main(arguments):\n"
        "    prepare(), begin()\n"
        "    with ThreadPoolExecutor(1) as pool: pool.submit(work).result()\n"
        "    end(), rest()\n"
        "    return 0\n"
    )
    places = shape.trace_round(tmp_path, "fpld/cli.py:begin", "fpld/cli.py:end")
    assert [place.note for place in places] == ["begin", "work", "end", "helper"]
    assert places[0] == ("fpld/cli.py", 4, "begin")
    with pytest.raises(SystemExit, match="traced"):
        shape.trace_round(tmp_path, "fpld/cli.py:rest", "fpld/cli.py:begin")


def test_the_command_lists_places_of_the_package() -> None:
    command = [sys.executable, "-m", "benchmarks.shape", "--list", "chain"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=shape.ROOT, check=True)
    assert len(done.stdout.splitlines()) > 1
    for line in done.stdout.splitlines():
        file, number, module = line.split(":")
        assert (shape.ROOT / file).read_text("utf-8").count("\n") >= int(number), module
