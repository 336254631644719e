"""Check the prose of README and docs: lines, sentences, words that tell history, old words, a few rules of proselint.

    python docs/check_prose.py            all pages
    python docs/check_prose.py --long     also list sentences above the length that is the rule

Part of `make lint`. CONTRIBUTING.md has the style in ten lines, and the list of words (`docs/check_words.py`).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs import check_words  # noqa: E402 (from the checkout, also as a script)

LINE = 120  # characters; tables and code may be longer
# words of a sentence: the rule, the most, and which share of a page may break the rule
RULE = 25
MOST = 40
SHARE = 0.1
HISTORY = re.compile(
    r"\b(until now|formerly|previously|no longer|used to (?:be|have|do)|since then|has since|in the past|"
    r"in an? (?:earlier|old|older) version|as it was|not yet|was changed|has changed|were changed|now|anymore|"
    r"nowadays|at present|until version)\b",
    re.IGNORECASE,
)


class Problem(NamedTuple):
    """What is wrong, and where."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def pages() -> list[Path]:
    """Return all pages, made by hand or by a command."""
    return check_words.pages()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are prose, with their numbers: no code, tables, headings or markers."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not re.match(r"\s*\||#|<!--|:::|    options:|!\[|    \S", line):
            yield number, line
        else:
            yield number, ""


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence with the line that it begins in."""
    start = 0
    block = ""
    for number, line in [*prose(text), (0, "")]:
        item = re.match(r"\s*(?:[-*]|\d+\.)\s+(.*)", line)
        if item or not line.strip():
            for part in re.split(r"(?<=[.!?])\*{0,2}\s+(?=[A-Z`*\[(])", block):
                if part.strip():
                    yield start, part.strip()
            start = number
            block = item[1] if item else ""
        else:
            start, block = (start, f"{block} {line.strip()}") if block else (number, line.strip())


def words(sentence: str) -> int:
    """Count the words of a sentence; code, a formula and a link's address count as one or none."""
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", sentence))
    return len(re.findall(r"[^\W_][\w'’.-]*", plain))


def check(path: Path, *, long: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with a page."""
    text = path.read_text("utf-8")
    for number, line in prose(text):
        if len(line) > LINE:
            yield Problem(path, number, f"{len(line)} characters in a line, at most {LINE}")
    found = list(sentences(text))
    above = [(number, sentence) for number, sentence in found if words(sentence) > RULE]
    for number, sentence in above:
        if words(sentence) > MOST or long:
            yield Problem(path, number, f"{words(sentence)} words in a sentence, at most {MOST}: {sentence[:60]}...")
    if len(above) > max(1, SHARE * len(found)):
        share = f"{len(above)} of {len(found)} sentences have more than {RULE} words, at most {SHARE:.0%} may"
        yield Problem(path, 1, f"{share} (--long lists them)")
    if path.name != "CHANGELOG.md":
        for number, sentence in found:
            for match in HISTORY.finditer(sentence):
                yield Problem(path, number, f"says what was, not what is: {match[0]!r}")


def proselint(paths: list[Path]) -> list[str]:
    """Return what proselint finds in the prose, by the rules in .proselintrc.json."""
    with tempfile.TemporaryDirectory() as folder:
        copies = []
        for path in paths:
            copies.append(Path(folder).resolve() / path.relative_to(ROOT))
            copies[-1].parent.mkdir(parents=True, exist_ok=True)
            lines = (re.sub(r"`[^`]*`", "`code`", line) for _, line in prose(path.read_text("utf-8")))
            copies[-1].write_text("\n".join(lines), "utf-8")
        command = [sys.executable, "-m", "proselint", "--config", str(ROOT / ".proselintrc.json"), "check"]
        done = subprocess.run([*command, *map(str, copies)], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            return [done.stderr.strip() or f"proselint ended with {done.returncode}"]
        return [line.replace(f"{Path(folder).resolve()}/", "") for line in done.stdout.splitlines() if line.strip()]


def main() -> int:
    """Check all pages, and the words of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="(default: all)")
    parser.add_argument("--long", action="store_true", help="list every sentence above the rule")
    given = parser.parse_args()
    paths = [path.resolve() for path in given.pages] or pages()
    found = [str(problem) for path in paths for problem in check(path, long=given.long)] + proselint(paths)
    words = check_words.read_words()
    for path in paths if given.pages else [*check_words.pages(), *check_words.program()]:
        found += [str(Problem(path, use.line, str(use))) for use in check_words.old_words(path, words)]
    print("\n".join(found) if found else f"prose: {len(paths)} pages, nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
