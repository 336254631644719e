"""docs/architecture.md is true: layers and picture against the imports, a round against a run, files that exist."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import pytest

from fpld.cli import main
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["config_file"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PACKAGE = "fpld"
Kind = Literal["top", "call", "types"]  # at the top of a module, inside a function, for type checkers alone


class Import(NamedTuple):
    """One import: by which module, of which, and when it takes place."""

    by: str
    of: str
    kind: Kind

    @property
    def parts(self) -> tuple[str, str]:
        """Return the two parts of the package that it joins."""
        return part(self.by), part(self.of)


def part(module: str) -> str:
    """Return the package or module directly below the root that a module belongs to; "" for the root itself."""
    return module.partition(".")[2].partition(".")[0]


def modules(root: Path) -> dict[str, Path]:
    """Return the files of the package by the names of their modules."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports(root: Path) -> list[Import]:
    """Return every import of the package by itself; imports of names from the root are of the root."""
    known = modules(root)
    found = []
    for name, path in known.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for node, kind in walk(ast.parse(path.read_text("utf-8")), "top"):
            found += [Import(name, of, kind) for of in targets(node, package, known) if of != name]
    return found


def walk(node: ast.AST, kind: Kind) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    """Yield the import statements below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from walk(ast.Module(child.body, []), "types")
            yield from walk(ast.Module(child.orelse, []), kind)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and kind == "top":
            yield from walk(child, "call")
        else:
            yield from walk(child, kind)


def targets(node: ast.Import | ast.ImportFrom, package: str, known: dict[str, Path]) -> list[str]:
    """Return the modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
    return [name for name in names if name == PACKAGE or name.startswith(f"{PACKAGE}.")]


def layers() -> list[str]:
    """Return the parts as the page lists them, lowest first."""
    return re.findall(r"^\| `(\w+)` \|", section("Layers"), re.MULTILINE)


def section(title: str) -> str:
    """Return what stands below a heading of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def upward(found: list[Import], order: list[str]) -> dict[tuple[str, str], list[Import]]:
    """Return the imports at run time that do not go down, by the parts that they join."""
    wrong: dict[tuple[str, str], list[Import]] = {}
    for each in found:
        by, of = each.parts
        if each.kind != "types" and by and of and by != of and order.index(of) > order.index(by):
            wrong.setdefault((by, of), []).append(each)
    return wrong


def test_every_part_is_listed_once() -> None:
    assert sorted(layers()) == sorted({part(name) for name in modules(ROOT)} - {""})


def test_imports_go_downwards() -> None:
    assert not upward(imports(ROOT), layers())


def picture(root: Path, order: list[str]) -> list[str]:
    """Return the arrows between packages that follow from no others, in the order of the layers."""
    basics = set(order[: order.index("registry") + 1])
    straight: dict[str, set[str]] = {}
    for each in imports(root):
        by, of = ("basics" if name in basics else name for name in each.parts)
        if each.kind != "types" and by and of and by != of:
            straight.setdefault(by, set()).add(of)
    below: dict[str, set[str]] = {"basics": set()}
    for name in order:  # lowest first
        below.setdefault(name, set()).update(*(below[of] | {of} for of in straight.get(name, ())))
    kept = {by: [of for of in ofs if not any(of in below[other] for other in ofs)] for by, ofs in straight.items()}
    return [
        f"    {by} --> {of}" for by in reversed(order) for of in sorted(kept.get(by, ()), key=["basics", *order].index)
    ]


def test_the_picture_is_that_of_the_imports() -> None:
    drawn = re.findall(r"^ +\w+ --> \w+$", section("Packages and their imports"), re.MULTILINE)
    expected = picture(ROOT, layers())
    assert drawn == expected, "the picture must be\n" + "\n".join(expected)


HOPS = re.findall(r"^ ?(\d+)  .*?  +(fpld/\S+\.py) +([\w.]+)$", section("A round as data"), re.MULTILINE)


def test_a_round_has_at_most_twelve_hops_and_their_functions_exist() -> None:
    assert 6 <= len(HOPS) <= 12
    assert [int(number) for number, *_ in HOPS] == list(range(1, len(HOPS) + 1))
    for _, file, name in HOPS:
        body: list[ast.stmt] = ast.parse((ROOT / file).read_text("utf-8")).body
        for part in name.split("."):
            found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
            assert len(found) == 1, f"{file} has no {name}"
            body = found[0].body


def test_a_run_goes_through_the_hops_in_their_order(config_file: Path, tmp_path: Path) -> None:
    """When a real run of one round first calls each."""
    wanted = {(str(ROOT / file), name): int(number) for number, file, name in HOPS}
    met: list[int] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            hop = wanted.get((frame.f_code.co_filename, frame.f_code.co_qualname))
            if hop is not None and hop not in met and (met or hop == 1):  # preparing looks at budgets too
                met.append(hop)

    text = config_file.read_text().replace("rounds = 3", "rounds = 1")
    config_file.write_text(f"{text}\n[baselines]\nmethods = []\n")
    threading.setprofile(note)  # the federation runs in a thread of its own
    try:
        assert main(["run", str(config_file), "--out", str(tmp_path / "out"), "--json"]) == 0
    finally:
        threading.setprofile(None)
    assert met == list(range(1, len(HOPS) + 1))


def test_the_files_to_change_exist() -> None:
    rows = re.findall(r"^\| (?!change|---)(.*?) \| (.*) \|$", section("Where do I change X?"), re.MULTILINE)
    assert len(rows) >= 10
    for change, where in rows:
        named = re.findall(r"`((?:fpld|tests|docs)/[^`]*)`", where)
        assert named, change
        assert all((ROOT / path).exists() for path in named), (change, named)


def test_nothing_imports_the_front_door() -> None:
    """But for the version, names come from where they are defined: the front door imports nearly everything."""
    known = modules(ROOT)
    for name, path in known.items():
        for node, _ in walk(ast.parse(path.read_text("utf-8")), "top"):
            if isinstance(node, ast.ImportFrom) and node.module == PACKAGE and name != PACKAGE:
                names = {alias.name for alias in node.names if f"{PACKAGE}.{alias.name}" not in known}
                assert names <= {"__version__"}, f"{name} imports {names} from {PACKAGE}"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Modules can be sorted so that each imports, at its top, only those before it."""
    left: dict[str, set[str]] = {name: set() for name in modules(ROOT)}
    for each in imports(ROOT):
        if each.kind == "top" and each.of != PACKAGE:
            left[each.by].add(each.of)
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import fpld.high", [("fpld.high", "top")]),
        ("import json, fpld.high as h", [("fpld.high", "top")]),
        ("from fpld import high", [("fpld.high", "top")]),
        ("from fpld.high import thing", [("fpld.high", "top")]),
        ("from . import high", [("fpld.high", "top")]),
        ("from .high import thing", [("fpld.high", "top")]),
        ("from fpld import __version__", [("fpld", "top")]),
        ("def f():\n    from fpld.high import thing", [("fpld.high", "call")]),
        ("class C:\n    def f(self):\n        if 1:\n            import fpld.high", [("fpld.high", "call")]),
        ("try:\n    import fpld.high\nexcept ImportError:\n    pass", [("fpld.high", "top")]),
        ("if TYPE_CHECKING:\n    from fpld.high import thing", [("fpld.high", "types")]),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import fpld.high", [("fpld.high", "top")]),
        ("import fpldx.high", []),
    ],
)
def test_the_graph_sees_every_kind_of_import(tmp_path: Path, text: str, expected: list[tuple[str, str]]) -> None:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    for name, content in (("__init__", ""), ("high", ""), ("low", text)):
        (folder / f"{name}.py").write_text(content)
    found = imports(tmp_path)
    assert [(each.by, each.of, each.kind) for each in found] == [("fpld.low", *each) for each in expected]
    wrong = upward(found, ["low", "high"])
    assert set(wrong) == {("low", "high") for of, kind in expected if of == "fpld.high" and kind != "types"}
    assert not upward(found, ["high", "low"])
