"""Hooks of the documentation: what is made from the code, by `make docs` or alone.

    python docs/hooks.py             write the reference pages that differ from the code
    python docs/hooks.py --check     name them, and exit with 1 if there are any

- reference/commands.md from the parsers, reference/configuration.md from the configuration's classes and the strings
  below their fields, reference/presets.md from the presets. They are files of the checkout, so that links to them work
  in any file browser; `make docs` writes them again.
- Files of the repository that a page links to become pages of their own, below source/.
- Graphs that are written as mermaid text become pictures, so that no page loads a script from outside.
"""

from __future__ import annotations

import argparse
import ast
import html
import inspect
import os
import posixpath
import re
import sys
import textwrap
from dataclasses import MISSING, fields
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from mkdocs.structure.files import File
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fpld import config, registry
from fpld.cli import COMMANDS, parser
from fpld.students.configs import config_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
STUDENTS = ("transformer", "ngram", "huggingface")
OWN = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".txt": "text", ".cff": "yaml"}
COMMANDS_TEXT = """\
Made from the parsers by `make docs`: `--help` of a command prints the same. Every command takes `--json`: one JSON
object on standard output and nothing else. Bad input is one line on standard error and exit code 2."""
CONFIGURATION_TEXT = """\
One TOML file; the [presets](presets.md) are examples. This page is made from `fpld/config/`. A dash in the column of
defaults: the key must be given. Unknown keys, wrong types and values out of range are errors that name the key;
`fpld check` lists all of them at once. Names of codecs, rules, allocators, estimators, students, corpora and baselines
may be those of [other packages](../extending.md)."""
STUDENT_TEXT = """\
The model: `kind`, the fields of that kind, and `device`. Must be given. The vocabulary is the tokenizer's. A node may
have a table of its own, `[nodes.student]`."""
DEVICE = """\
`cuda` or `mps` (an error where PyTorch finds no such GPU), `cpu`, or `auto` (the first of these that is there). It
holds for every process of this machine. Nodes of a deployment have `device` in `node.toml`. None: that of [engine]."""
PRESETS_TEXT = """\
Configurations that come with the package. `fpld run NAME` runs one. Copy one to begin your own;
[Configuration](configuration.md) has the meaning of each key."""
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#]+)((?:#[^)]*)?)\)")
_GRAPH = re.compile(r"```mermaid\ngraph TD\n(.*?)```", re.DOTALL)


# ---- what mkdocs calls


def on_pre_build(config: MkDocsConfig) -> None:  # noqa: ARG001
    """Write the reference pages anew, before mkdocs looks for files."""
    for path, text in stale_references():
        path.write_text(text, "utf-8")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages that are no files of the checkout."""
    made = {}
    for name, target in OWN.items():
        if (ROOT / name).exists():
            made[target] = _own_page((ROOT / name).read_text("utf-8"))
    texts = [made[name] for name in made] + [
        Path(file.abs_src_path).read_text("utf-8") for file in files.documentation_pages() if file.abs_src_path
    ]
    for path in sorted({path for text in texts for path in _linked(text)}):
        made[f"source/{path}.md"] = source_page(path)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Point links to files of the repository at their pages, and draw graphs."""
    here = posixpath.dirname(page.file.src_uri)

    def local(match: re.Match[str]) -> str:
        path = _repository_path(match[1])
        if path is None:
            return match[0]
        target = OWN.get(path) or ("index.md" if path == "README.md" else f"source/{path}.md")
        return f"]({posixpath.relpath(target, here or '.')}{match[2]})"

    # A number stays together with its error and its unit.
    markdown = re.sub(r"(?<=\d) (±) (?=\d)", r"&nbsp;\1&nbsp;", markdown)
    markdown = re.sub(r"(?<=\d) (?=(?:MB|GB|s) \|)", "&nbsp;", markdown)
    return _GRAPH.sub(lambda match: picture(match[1]), _OUTSIDE.sub(local, markdown))


# ---- pages that the checkout has


def stale_references() -> Iterator[tuple[Path, str]]:
    """Yield the reference pages that are not as the code makes them, with the text that they should have."""
    made = {"commands": commands_page, "configuration": configuration_page, "presets": presets_page}
    for name, page in made.items():
        path = ROOT / "docs/reference" / f"{name}.md"
        text = page()
        if not path.exists() or path.read_text("utf-8") != text:
            yield path, text


def main() -> int:
    """Write the reference pages that differ from the code, or name them."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write nothing")
    check = arguments.parse_args().check
    found = list(stale_references())
    for path, text in found:
        if not check:
            path.write_text(text, "utf-8")
        print(f"{path.relative_to(ROOT)}: {'differs from the code: make docs' if check else 'written'}")
    return 1 if check and found else 0


# ---- files of the repository


def _repository_path(target: str) -> str | None:
    """Return the path of a linked file below the repository's root, or None if it is a page of docs/."""
    path = target.lstrip("./")
    return path if (ROOT / path).is_file() and not path.startswith("docs/") else None


def _linked(text: str) -> Iterator[str]:
    for target, _ in _OUTSIDE.findall(text):
        path = _repository_path(target)
        if path is not None and path not in OWN and path != "README.md":
            yield path


def _own_page(text: str) -> str:
    """Return a page of the repository's root as one of the site: its links are relative to docs/."""
    text = re.sub(r"\]\(docs/([^)]*)\)", r"](\1)", text)
    return re.sub(r"\]\(((?:examples|experiments|fpld|tests|benchmarks|[A-Z]+\.md)[^):]*)\)", r"](../\1)", text)


def source_page(path: str) -> str:
    """Return a page that shows a file."""
    text = (ROOT / path).read_text("utf-8")
    fence = "````" if "```" in text else "```"
    return f"# {path}\n\n{fence}{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


# ---- commands


def commands_page() -> str:
    """Return the reference of all commands, from their parsers."""
    parts = [
        "# Commands",
        COMMANDS_TEXT,
        _table(("command", "what it does"), [(f"[`fpld {name}`](#{name})", COMMANDS[name].help) for name in COMMANDS]),
    ]
    os.environ["COLUMNS"] = "100"  # usage is the same whatever the terminal
    top = parser()
    (subs,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    for name, sub in subs.choices.items():
        parts += [f"## {name}", *_command(name, sub)]
    return "\n\n".join(parts) + "\n"


def _command(name: str, sub: argparse.ArgumentParser) -> Iterator[str]:
    inner = [action for action in sub._actions if isinstance(action, argparse._SubParsersAction)]
    yield f"{sub.description}"
    usage = textwrap.dedent(sub.format_usage()).removeprefix("usage: ")
    yield f"```{{ .text .wrapped }}\n{usage.rstrip()}\n```"
    rows = []
    for action in sub._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        if "--json" in action.option_strings:
            continue
        rows.append((_spelt(action), _help(action)))
    if rows:
        yield _table(("argument", "meaning"), rows)
    for group in inner:
        for below, each in group.choices.items():
            yield f"### {name} {below}"
            yield from _command(f"{name} {below}", each)
    if sub.epilog:
        yield from _epilog(sub.epilog)


def _epilog(text: str) -> Iterator[str]:
    """Yield what stands below a command's help: its sentences, and its indented lines as blocks."""
    for block in text.strip().split("\n\n"):
        for indented, lines in groupby(block.splitlines(), lambda line: line.startswith("  ")):
            whole = "\n".join(lines)
            yield f"```{{ .text .wrapped }}\n{textwrap.dedent(whole)}\n```" if indented else whole


def _spelt(action: argparse.Action) -> str:
    """Return how an argument is given: its names and what follows them."""
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    shown = value if isinstance(value, str) else " ".join(value)
    if not action.option_strings:
        return f"`{shown}`"
    takes = "" if action.nargs == 0 else f" {shown}"
    return ", ".join(f"`{name}{takes}`" for name in action.option_strings)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")


# ---- configuration


def configuration_page() -> str:
    """Return the reference of the configuration: each key with its type, default and meaning."""
    parts = [
        "# Configuration",
        CONFIGURATION_TEXT,
    ]
    for section, field in config.Config.model_fields.items():
        kind = _section_class(field.annotation)
        heading = f"[[{section}]]" if section == "nodes" else f"[{section}]"
        if kind is None:
            parts += [f"## {heading}", STUDENT_TEXT, *_students()]
            continue
        must = " Must be given." if field.is_required() else ""
        parts += [f"## {heading}", f"{section_summary(kind)}{must}", _keys(kind)]
    return "\n\n".join(parts) + "\n"


def _students() -> Iterator[str]:
    rows = [
        ("`kind`", "name", "-", "Kind of model: " + ", ".join(f"`{name}`" for name in registry.students.names()) + "."),
        ("`device`", "`auto`, `cpu`, `cuda` or `mps`", "none", " ".join(DEVICE.split())),
    ]
    yield _table(("key", "type", "default", "meaning"), rows)
    for kind in STUDENTS:
        cls = config_class(kind)
        said = attribute_texts(cls)
        rows = []
        for field in fields(cls):
            if field.name in ("vocab", "parameters"):
                continue
            default = "-" if field.default is MISSING else _default(field.default)
            hint = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}
            named = hint.get(str(field.type), "") or hint.get(getattr(field.type, "__name__", ""), "")
            shown = named or " or ".join(f"`{value}`" for value in re.findall(r"[\"'](\w+)[\"']", str(field.type)))
            rows.append((f"`{field.name}`", shown, default, said.get(field.name, "")))
        yield f'### kind = "{kind}"'
        yield _table(("key", "type", "default", "meaning"), rows)


def _keys(kind: type[BaseModel]) -> str:
    said = attribute_texts(kind)
    rows = [
        (f"`{key}`", _type(field), "-" if field.is_required() else _default(field.default), said.get(key, ""))
        for key, field in kind.model_fields.items()
    ]
    return _table(("key", "type", "default", "meaning"), rows)


def section_summary(kind: type[BaseModel]) -> str:
    """Return the first line of a section's docstring, without the name of its table."""
    first = inspect.getdoc(kind).split("\n", 1)[0]  # type: ignore[union-attr]
    text = first.rpartition("]: ")[2] if first.startswith("[") else first
    return text[0].upper() + text[1:]


def attribute_texts(cls: type[Any]) -> dict[str, str]:
    """Return the strings that stand below the fields of a class, by field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found = {}
    last = ""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last] = " ".join(str(node.value.value).split())
            last = ""
        else:
            last = ""
    return found


def _section_class(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return "`[" + ", ".join(f'"{item}"' for item in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _type(field: Any) -> str:
    """Return a field's type and range in words."""
    annotation = field.annotation
    metadata = list(field.metadata)
    options = [part for part in get_args(annotation) if part is not type(None)]
    if type(None) in get_args(annotation) and len(options) == 1:
        annotation = options[0]
    elif len(options) > 1 and get_origin(annotation) in (Union, UnionType):
        return ", or ".join(_type(FieldInfo(annotation=option)) for option in options)
    if hasattr(annotation, "__metadata__"):
        metadata += list(annotation.__metadata__)
        annotation = get_args(annotation)[0]
        if get_origin(annotation) in (Union, UnionType):  # with a check of its own
            return _type(FieldInfo(annotation=annotation))
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    text = " ".join(str(item) for item in metadata)
    if "parse_student" in text or getattr(annotation, "__name__", "") == "StudentChoice":
        return "table, as [\\[student\\]](#student)"
    if getattr(annotation, "__name__", "") == "TokenizerSection":
        return "table, as [\\[tokenizer\\]](#tokenizer)"
    if "parse_rate" in text:
        return "rate, as `64 kbit/s`"
    if "Registry.check" in text:
        return "name"
    if get_origin(annotation) is list:
        return f"list of {_members(annotation)}"
    named = {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]
    return named + _range(metadata)


def _members(annotation: Any) -> str:
    inner = get_args(annotation)[0]
    if hasattr(inner, "__metadata__") and get_args(inner)[0] is int:
        return "whole numbers"
    return "names"


def _range(metadata: list[Any]) -> str:
    signs = {"gt": "> ", "ge": "≥ ", "lt": "< ", "le": "≤ "}
    limits: dict[str, Any] = {}
    for item in metadata:
        for part in (item, *getattr(item, "metadata", ())):
            limits |= {sign: getattr(part, sign) for sign in signs if getattr(part, sign, None) is not None}
    known = {2**63: "2^63"}
    shown = [f"{signs[sign]}{known.get(limits[sign], limits[sign])}" for sign in signs if sign in limits]
    return ", " + ", ".join(shown) if shown else ""


def presets_page() -> str:
    """Return every preset as it stands."""
    names = config.presets()
    parts = [
        "# Presets",
        PRESETS_TEXT,
    ]
    for name in names:
        text = config.read_config_text(name)[0].rstrip()
        parts += [f"## `{name}`", f"```toml\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# ---- graphs


def picture(text: str) -> str:
    """Return a graph as an SVG: each box one line below the lowest that points to it."""
    edges = re.findall(r"(\w+) --> (\w+)", text)
    names = list(dict.fromkeys(name for edge in edges for name in edge))
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for by, of in edges:
            depth[of] = max(depth[of], depth[by] + 1)
    levels = [[name for name in names if depth[name] == level] for level in range(max(depth.values()) + 1)]
    place: dict[str, float] = {}
    for level in levels:  # in the order of those above, so that few arrows cross
        above = {name: [place[by] for by, of in edges if of == name and by in place] for name in level}
        level.sort(key=lambda name: sum(above[name]) / len(above[name]) if above[name] else 0.5)
        place |= {name: (index + 1) / (len(level) + 1) for index, name in enumerate(level)}
    width = 640
    step = 58
    high = 28
    at = {name: (place[name] * width, depth[name] * step + 20) for name in names}
    lines = []
    for by, of in edges:
        (x1, y1), (x2, y2) = at[by], at[of]
        y1 = y1 + high / 2
        y2 = y2 - high / 2 - 4
        lines.append(f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + 22:.0f} {x2:.0f} {y2 - 22:.0f} {x2:.0f} {y2:.0f}"/>')
    boxes = [
        f'<rect x="{x - 46:.0f}" y="{y - high / 2:.0f}" width="92" height="{high}" rx="5"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}">{html.escape(name)}</text>'
        for name, (x, y) in at.items()
    ]
    size = f'viewBox="0 0 {width} {len(levels) * step}"'
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
    )
    label = html.escape(", ".join(f"{by} imports {of}" for by, of in edges), quote=True)
    drawn = f'<svg role="img" aria-label="{label}" {size}>{arrow}{"".join(lines)}{"".join(boxes)}</svg>'
    return f'<div class="graph">{drawn}</div>\n'


if __name__ == "__main__":
    sys.exit(main())
