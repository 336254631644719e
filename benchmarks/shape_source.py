"""The modules of a package as syntax: their lines, imports, functions and plugin tables, for `benchmarks.shape`."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """A place in the tree, with a note on what is there."""

    file: str
    line: int
    note: str

    def __str__(self) -> str:
        """Return the place as editors and terminals open it."""
        return f"{self.file}:{self.line}: {self.note}"


class Import(NamedTuple):
    """An import of a module of the package; `at_load` if it takes place when the importing module is loaded."""

    target: str
    line: int
    at_load: bool


class Lines(NamedTuple):
    """Lines of a module: all, of code (no blank line, comment or docstring), of imports, of comments alone."""

    all: int
    code: int
    imports: int
    comments: int


class Module:
    """One parsed module of a package; `file` is its path below the root of the tree."""

    def __init__(self, path: Path, root: Path) -> None:
        relative = path.relative_to(root)
        self.file = relative.as_posix()
        self.is_package = path.stem == "__init__"
        self.name = ".".join(relative.parent.parts if self.is_package else relative.with_suffix("").parts)
        self.text = path.read_text("utf-8")
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))

    def place(self, node: ast.AST, note: str) -> Place:
        """Return the place of a node."""
        return Place(self.file, getattr(node, "lineno", 1), note)

    def lines(self) -> Lines:
        """Return how many lines there are of each kind."""
        # A comment is told from a '#' inside a string by the tokens, a docstring from any other string by the syntax.
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip().startswith("#")}
        docstrings: set[int] = set()
        imports: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports.update(_lines_of(node))
            elif isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
                docstrings.update(_lines_of(node.body[0]))
        filled = {number for number, line in enumerate(self.text.splitlines(), 1) if line.strip()}
        return Lines(self.text.count("\n"), len(filled - comments - docstrings), len(imports), len(comments))

    def imports(self, modules: dict[str, Module]) -> Iterator[Import]:
        """Yield the imports of other modules of the package."""
        for node, at_load in _import_statements(self.tree, at_load=True):
            for target in self._targets(node, modules):
                if target in modules and target != self.name:
                    yield Import(target, node.lineno, at_load)

    def _targets(self, node: ast.Import | ast.ImportFrom, modules: dict[str, Module]) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        # A relative import counts its dots from the package that the module is in, which is itself for an __init__.
        parents = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        prefix = parents[: len(parents) - node.level + 1] if node.level else []
        base = ".".join([*prefix, *([node.module] if node.module else [])])
        submodules = [f"{base}.{alias.name}" for alias in node.names]
        return [submodule if submodule in modules else base for submodule in submodules]

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Yield the functions and methods that are not inside another function, by their qualified names."""
        pending: list[tuple[str, ast.stmt]] = [("", node) for node in self.tree.body]
        while pending:
            prefix, node = pending.pop()
            if isinstance(node, Function):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                pending += [(f"{prefix}{node.name}.", child) for child in node.body]

    def tables(self, modules: dict[str, Module]) -> Iterator[set[str]]:
        """Yield the modules of each plugin table: a dictionary at the top level whose values are all modules."""
        bound = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                values = {bound.get(ast.unparse(value), "") for value in node.value.values}
                if len(values) > 1 and values <= modules.keys():
                    yield values


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _import_statements(node: ast.AST, *, at_load: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_load
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _import_statements(ast.Module(child.body, []), at_load=False)
            yield from _import_statements(ast.Module(child.orelse, []), at_load=at_load)
        else:
            yield from _import_statements(child, at_load=at_load and not isinstance(child, Function))
