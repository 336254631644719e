"""Check that users read one set of words: find the old ones of the table in CONTRIBUTING.md, on pages and in commands.

Pages are README, CONTRIBUTING, SECURITY, CHANGELOG and all of docs/, made by hand or not: prose, tables, headings and
the comments in blocks of code. Of the program it is what a person reads: the sentences among the strings of the whole
package, and the text of templates. Files that people copy are read whole: those of deploy/ and the presets, and of
examples the docstrings and comments too. Code in backticks, names of keys and addresses of links are not words.

`docs/check_prose.py` runs it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
LIST = ROOT / "CONTRIBUTING.md"
HEAD = "| old | new |"
PROGRAM = ("fpld", "examples", "experiments", "deploy")
SETTINGS = ("pyproject.toml", "mkdocs.yml", ".github/workflows/test.yml")  # of which the descriptions are read
READ = {".py", ".j2", ".toml", ".yaml", ".yml", ".service", ""}
WHOLE = {"examples"}  # where docstrings and comments are for readers too
_EXAMPLE = re.compile(r"^  fpld .*?(?=  |$)", re.MULTILINE)  # a command that a help shows
_COMMENT = re.compile(r"(?:^|\s)#\s+(.*)$")
_SETTING = re.compile(r"^(?:.*[#] |\s*(?:[\w-]*description|keywords|name)\s*[=:]\s*)(.*)$")
# What is no word: code, where a link leads, comments, identifiers of headings, HTML's tags.
_CODE = re.compile(r"`[^`]*`|(?<=\])\([^)]*\)|<!--.*?-->|\{#[^}]*\}|\{\{.*?\}\}|\{%.*?%\}|<[^<>]*>", re.DOTALL)


class Word(NamedTuple):
    """An old word or phrase, what finds it, and what to write."""

    old: str
    pattern: re.Pattern[str]
    new: str


class Use(NamedTuple):
    """An old word somewhere: the line, what stands there, and what to write."""

    line: int
    found: str
    new: str

    def __str__(self) -> str:
        return f"old word {self.found!r}: {self.new}"


def read_words(text: str | None = None) -> list[Word]:
    """Return the words of the table; a row may name several, with commas between them."""
    lines = (LIST.read_text("utf-8") if text is None else text).splitlines()
    words = []
    for line in lines[lines.index(HEAD) + 2 :]:
        if not line.startswith("|"):
            break
        olds, new = (cell.strip() for cell in line.strip("|").split("|"))
        for old in olds.split(", "):
            phrase = r"\s+".join(map(re.escape, old.split()))
            words.append(Word(old, re.compile(rf"(?<![\w/.-]){phrase}(?![\w/-])", re.IGNORECASE), new))
    return words


def uses(text: str, words: list[Word]) -> Iterator[Use]:
    """Yield the old words in a text that has been cleared of code."""
    for word in words:
        for match in word.pattern.finditer(text):
            yield Use(text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), word.new)


def clear(text: str) -> str:
    """Return a text without its code, with the lines where they were."""
    return _CODE.sub(lambda match: "\n" * match[0].count("\n") or "`", text)


def page_text(text: str) -> str:
    """Return what a person reads of a page, line by line: of code the comments, and nothing of the list itself."""
    kept = []
    fenced = False
    listed = False
    for line in text.splitlines():
        listed = line == HEAD or (listed and line.startswith("|"))
        if line.lstrip().startswith("```"):
            fenced = not fenced
            kept.append("")
        elif fenced:
            comment = _COMMENT.search(line)
            kept.append(comment[1] if comment else "")
        else:
            kept.append("" if listed else line)
    return clear("\n".join(kept))


def program_text(path: Path) -> str:
    """Return what a person reads of a file of the program, line by line."""
    text = path.read_text("utf-8")
    whole = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in WHOLE
    if path.suffix == ".j2":
        return clear(text)
    if path.suffix != ".py":
        found = (_SETTING.match(line) for line in text.splitlines())
        return clear("\n".join(match[1] if match else "" for match in found))
    lines: dict[int, str] = {}
    if whole:
        for number, line in enumerate(text.splitlines(), 1):
            comment = _COMMENT.search(line)
            lines[number] = clear(comment[1]) if comment else ""
    tree = ast.parse(text)
    # A string that stands alone is documentation: what of it users see, the reference pages show.
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (whole or id(node) not in alone):
            if " " not in node.value.strip():  # a key or a name
                continue
            for offset, line in enumerate(_EXAMPLE.sub("", clear(node.value)).splitlines()):
                lines[node.lineno + offset] = f"{lines.get(node.lineno + offset, '')} {line}"
    return "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))


def pages() -> list[Path]:
    """Return all pages."""
    own = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    return [*own, *sorted((ROOT / "docs").rglob("*.md"))]


def program() -> list[Path]:
    """Return the files of the program that have text for people."""
    found = [path for folder in PROGRAM for path in (ROOT / folder).rglob("*") if path.is_file()]
    read = [path for path in found if path.suffix in READ and "__pycache__" not in path.parts]
    return sorted([*read, *(ROOT / name for name in SETTINGS)])


def old_words(path: Path, words: list[Word]) -> Iterator[Use]:
    """Yield the old words of a page or of a file of the program."""
    text = page_text(path.read_text("utf-8")) if path.suffix == ".md" else program_text(path)
    yield from uses(text, words)
