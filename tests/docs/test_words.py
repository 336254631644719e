"""Pages and commands use one set of words; the reference pages are as the code makes them, and links lead to files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import check_words

ROOT = Path(__file__).parents[2]
LIST = """\
| old | new |
|---|---|
| site, sites | node |
| is said | is logged |

| some | other | table |
"""
WORDS = check_words.read_words(LIST)


def found(text: str) -> list[tuple[int, str]]:
    return [(use.line, use.found) for use in check_words.uses(check_words.page_text(text), WORDS)]


def test_the_list_is_read() -> None:
    assert [(word.old, word.new) for word in WORDS] == [("site", "node"), ("sites", "node"), ("is said", "is logged")]
    assert {"site", "behind fpld"} <= {word.old for word in check_words.read_words()}


def test_old_words_are_found_in_prose_tables_headings_and_comments() -> None:
    assert found("# At a site\n\nMany Sites.\n\n| site | a |\n") == [(1, "site"), (5, "site"), (3, "Sites")]
    assert found("It is\nsaid here.") == [(1, "is said")]  # over the end of a line
    assert found("```toml\nlimit = 3   # of a site\n```\n") == [(2, "site")]


def test_code_addresses_names_and_the_list_itself_are_no_words() -> None:
    text = "`site`, [it](site.md#sites), the on-site, parasite\n\n```sh\nmake site\n```\n\n" + LIST
    assert not found(text)


def test_of_a_program_the_sentences_count_and_not_keys_or_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        '"""A site."""\nKEY = "site"\nHELP = "the bits of a site"\nROWS = """\\\nFor all.\n\n  fpld run sites\n"""\n'
    )
    assert [(use.line, use.found) for use in check_words.old_words(file, WORDS)] == [(3, "site")]
    file.write_text(
        'KEY = 3\n"""Bytes of a site."""\nHELP = f"{KEY} bytes of sites"\n'
    )  # the first for readers of code
    assert [(use.line, use.found) for use in check_words.old_words(file, WORDS)] == [(3, "sites")]
    settings = tmp_path / "some.yaml"
    settings.write_text("# For sites.\nsite: 3\ndescription: of a site  # as is said\n")
    assert [use.found for use in check_words.old_words(settings, WORDS)] == ["sites", "is said"]
    settings.write_text("site:\n  name: site\n")
    assert [(use.line, use.found) for use in check_words.old_words(settings, WORDS)] == [(2, "site")]
    page = tmp_path / "some.html.j2"
    page.write_text('<p class="site">{{ site }} of <b>sites</b></p>')
    assert [use.found for use in check_words.old_words(page, WORDS)] == ["sites"]


@pytest.mark.parametrize("files", [check_words.pages(), check_words.program()], ids=["pages", "program"])
def test_no_old_word_is_left(files: list[Path]) -> None:
    words = check_words.read_words()
    left = [
        f"{path.relative_to(ROOT)}:{use.line}: {use}" for path in files for use in check_words.old_words(path, words)
    ]
    assert not left, "\n".join(left)


def test_reference_pages_are_as_the_code_makes_them() -> None:
    """In a process of its own, where no test has registered anything."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, str(ROOT / "docs/hooks.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", check_words.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_lead_to_files_and_headings(page: Path) -> None:
    """As in any browser of files: no page has to be built first."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in headings(file.read_text()), target


def headings(text: str) -> set[str]:
    """Return the anchors of a page: of its headings, and those that it names."""
    lines = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = set(re.findall(r"\{#([^}]*)\}|<a id=\"([^\"]*)\"", text))
    plain = {re.sub(r"[^\w -]", "", re.sub(r"\{#[^}]*\}", "", line)).strip().lower() for line in lines}
    return {"".join(names) for names in named} | {re.sub(r"[ -]+", "-", line) for line in plain}
