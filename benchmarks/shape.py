"""Measure the shape of the package: its size, its imports, its names, and what one local round enters.

    python -m benchmarks.shape [--commit REV] [--json] [--static]
    python -m benchmarks.shape --list names|lone|packed|wide|chain|vague|round [--commit REV] [--json]

Without --commit the working tree is measured, otherwise the tree of that commit, so one script compares two commits.
--list names the places behind a figure, as file:line. All figures but those of the round are read from the syntax:

- A packed assignment is `a, b = x, y`; its share is that of all assignments.
- A module's importers are the other modules that import it, also inside functions and for type checkers alone.
- A public name is a class or function at the top level of a module, without an underscore. A plugin table is a
  dictionary of modules; a name that all of them define is its contract, and `names_without_contracts` leaves it out.
- The chain is the longest one of imports that take place when its first module is imported. The root of the package
  is loaded before all others and takes no part as a target.
- A vague name is a variable or parameter called as one in `VAGUE`.

The round is a real one: a small federation with n-gram students and default codec and rule runs in one process. Every
function of the package counts that is entered between the first call of --begin and the return of --end.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shape_source import Function, Lines, Module, Place
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
TRACER = Path(__file__).resolve().with_name("shape_round.py")
PACKAGE = "fpld"
LISTS = ("names", "lone", "packed", "wide", "chain", "vague", "round")
VAGUE = frozenset({"found", "said", "told", "known", "given", "own"})
MAX_PARAMETERS = 10
# Where a round may begin and end, as [end of the file's path:]qualified name. The first one that a tree has is taken.
BEGINS = ("Federation.open", "Rounds.open", "open_round")
ENDS = ("federation/state.py:commit", "commit", "Federation.commit", "Rounds.commit")
AIMS: dict[str, float] = {
    "files": 220,
    "lines": 31_000,
    "packed_share": 0.01,
    "names": 0,
    "chain": 10,
    "wide": 0,
    "round_files": 40,
}


class Tree:
    """The parsed package of a tree, and the places behind each figure."""

    def __init__(self, root: Path, package: str = PACKAGE) -> None:
        parsed = [Module(path, root) for path in sorted((root / package).rglob("*.py"))]
        if not parsed:
            raise SystemExit(f"{root} has no package {package}")
        self.package = package
        self.modules = {module.name: module for module in parsed}

    def figures(self) -> dict[str, float]:
        """Return every figure that the syntax alone tells."""
        modules = self.modules.values()
        lines = Lines(*(sum(counts) for counts in zip(*(module.lines() for module in modules), strict=True)))
        assignments = sum(isinstance(node, ast.Assign) for module in modules for node in module.nodes)
        packed = len(self.packed())
        repeated = self.repeated()
        contracts = self.contracts()
        return {
            "files": len(modules),
            "lines": lines.all,
            "code_lines": lines.code,
            "import_lines": lines.imports,
            "import_share": lines.imports / lines.all,
            "comment_lines": lines.comments,
            "comment_share": lines.comments / lines.all,
            "packed": packed,
            "packed_share": packed / max(assignments, 1),
            "lone": len(self.lone()),
            "names": len(repeated),
            "names_without_contracts": sum(
                len(places.keys() - contracts[name]) > 1 for name, places in repeated.items()
            ),
            "chain": len(self.chain()),
            "wide": len(self.wide()),
            "vague": len(self.vague()),
        }

    def packed(self) -> list[Place]:
        """Return the assignments of a tuple of values to a tuple of targets."""
        return [
            module.place(node, ast.unparse(node))
            for module in self.modules.values()
            for node in module.nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Tuple)
        ]

    def wide(self) -> list[Place]:
        """Return the functions with more than `MAX_PARAMETERS` parameters."""
        places = []
        for module in self.modules.values():
            for node in module.nodes:
                if isinstance(node, Function):
                    count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
                    if count > MAX_PARAMETERS:
                        places.append(module.place(node, f"{node.name} has {count} parameters"))
        return places

    def vague(self) -> list[Place]:
        """Return the variables and parameters with a name of `VAGUE`, once for each time that they are bound."""
        places = []
        for module in self.modules.values():
            for node in module.nodes:
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                    places.append(module.place(node, node.id))
                elif isinstance(node, ast.arg) and node.arg in VAGUE:
                    places.append(module.place(node, f"{node.arg} (parameter)"))
        return sorted(places)

    def lone(self) -> list[Place]:
        """Return the modules that exactly one other module imports."""
        importers: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for each in module.imports(self.modules):
                importers[each.target].add(module.name)
        return [
            Place(module.file, 1, f"{module.text.count(chr(10))} lines, imported by {self.modules[importer].file}")
            for module in self.modules.values()
            if len(importers[module.name]) == 1
            for importer in importers[module.name]
        ]

    def names(self) -> list[Place]:
        """Return where the public names are defined that two modules or more define."""
        contracts = self.contracts()
        places = []
        for name, definitions in self.repeated().items():
            for module, place in definitions.items():
                note = f"{place.note} (contract of a plugin table)" if module in contracts[name] else place.note
                places.append(place._replace(note=note))
        return places

    def definitions(self) -> dict[str, dict[str, Place]]:
        """Return where each public name is defined, by module."""
        places: dict[str, dict[str, Place]] = defaultdict(dict)
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                    kind = "class" if isinstance(node, ast.ClassDef) else "def"
                    places[node.name].setdefault(module.name, module.place(node, f"{kind} {node.name}"))
        return dict(sorted(places.items()))

    def repeated(self) -> dict[str, dict[str, Place]]:
        """Return the definitions of the public names that two modules or more define."""
        return {name: places for name, places in self.definitions().items() if len(places) > 1}

    def contracts(self) -> dict[str, set[str]]:
        """Return the modules that define each public name because a plugin table asks for it."""
        tables = [table for module in self.modules.values() for table in module.tables(self.modules)]
        return {
            name: set().union(*(table for table in tables if table <= places.keys()))
            for name, places in self.definitions().items()
        }

    def chain(self) -> list[Place]:
        """Return the longest chain of imports at load time; a module's line is that of its import of the next."""
        longest: dict[str, list[Place]] = {}
        visiting: set[str] = set()

        def extend(name: str) -> list[Place]:
            if name not in longest:
                visiting.add(name)
                module = self.modules[name]
                best = [Place(module.file, 1, name)]
                for each in sorted(module.imports(self.modules)):
                    # The import that would close a circle is left out, so that the search ends in any tree.
                    if each.at_load and each.target != self.package and each.target not in visiting:
                        below = extend(each.target)
                        if len(below) >= len(best):
                            best = [Place(module.file, each.line, name), *below]
                visiting.remove(name)
                longest[name] = best
            return longest[name]

        return max((extend(name) for name in self.modules), key=len, default=[])

    def choose(self, candidates: Sequence[str], option: str) -> str:
        """Return the first of the candidates that is one function of the tree, as file:qualified name."""
        for candidate in candidates:
            suffix, _, wanted = candidate.rpartition(":")
            matches = [
                f"{module.file}:{name}"
                for module in self.modules.values()
                if module.file.endswith(suffix)
                for name, _ in module.functions()
                if name == wanted
            ]
            if len(matches) == 1:
                return matches[0]
        raise SystemExit(f"{option} must name one function of {self.package}/, got {' or '.join(candidates)}")


def trace_round(root: Path, begin: str, end: str) -> list[Place]:
    """Run one round of a small federation with the package below `root`; return the functions that it entered."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        config = folder / "config.toml"
        text = CONFIG.format(folder=folder).replace("rounds = 3", "rounds = 1")
        config.write_text(f"{text}\n[baselines]\nmethods = []\n")
        command = [sys.executable, "-P", str(TRACER), str(root), str(config), begin, end]
        environment = os.environ | {"PYTHONPATH": str(root)}
        # The first run compiles the kernels of a fresh tree and keeps them; the second enters what any later run does.
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
            if done.returncode:
                raise SystemExit(f"the traced run failed:\n{done.stderr}")
    return [Place(*place) for place in json.loads(done.stdout)]


@contextlib.contextmanager
def checkout(commit: str | None) -> Iterator[Path]:
    """Yield the root of the working tree, or of the tree of a commit in a temporary folder."""
    if commit is None:
        yield ROOT
        return
    archive = subprocess.run([shutil.which("git") or "git", "-C", str(ROOT), "archive", commit], capture_output=True)
    if archive.returncode:
        raise SystemExit(f"--commit: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
        yield Path(folder).resolve()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shape", description="Measure the shape of the package.")
    parser.add_argument("--commit", metavar="REV", help="measure the tree of this commit")
    parser.add_argument("--list", choices=LISTS, help="list the places behind a figure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--static", action="store_true", help="leave out the traced round")
    parser.add_argument("--begin", metavar="[FILE:]NAME", help="the function whose first call begins the round")
    parser.add_argument("--end", metavar="[FILE:]NAME", help="the function whose return ends the round")
    return parser


def _show(figures: dict[str, float]) -> None:
    for name, value in figures.items():
        form = ".1%" if name.endswith("_share") else ","
        limit = f"at most {AIMS[name]:{form}}" if name in AIMS else ""
        print(f"{name:<24} {value:>8{form}}  {limit}".rstrip())


def main() -> None:
    """Measure a tree, or list the places behind a figure."""
    arguments = _parser().parse_args()
    with checkout(arguments.commit) as root:
        tree = Tree(root)
        figures = tree.figures()
        lists = {kind: getattr(tree, kind)() for kind in LISTS if kind != "round"}
        report = {"commit": arguments.commit, "figures": figures, "chain": [place.note for place in lists["chain"]]}
        if arguments.list == "round" or not (arguments.list or arguments.static):
            begin = tree.choose([arguments.begin] if arguments.begin else BEGINS, "--begin")
            end = tree.choose([arguments.end] if arguments.end else ENDS, "--end")
            lists["round"] = trace_round(root, begin, end)
            figures["round_files"] = len({place.file for place in lists["round"]})
            figures["round_functions"] = len(lists["round"])
            report["round"] = {"begin": begin, "end": end}
    if arguments.list:
        lines = [str(place) for place in lists[arguments.list]]
        print(json.dumps(lines, indent=1) if arguments.json else "\n".join(lines))
    elif arguments.json:
        print(json.dumps(report, indent=1))
    else:
        _show(figures)
        print("chain: " + " -> ".join(report["chain"]))


if __name__ == "__main__":
    main()
