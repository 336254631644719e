"""Every command that README and docs show: those that are quick are run, and the parser takes all of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fpld.cli import main, parser

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
QUICK = ("plan", "allocate", "bounds", "check", "data list")
NEEDS = ("my.toml", "runs/")  # the reader's own files


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the file and the arguments of every command line in a block of shell."""
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```sh\n(.*?)^```", file.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["fpld"]:
                    yield file.name, words[1:]


FOUND = [pytest.param(words, id=f"{name}: {' '.join(words)}") for name, words in commands()]


def runs_here(words: list[str]) -> bool:
    named = [" ".join(words[: len(quick.split())]) == quick for quick in QUICK]
    return any(named) and not any(word.startswith(NEEDS) for word in words)


def test_there_are_commands() -> None:
    assert len(FOUND) > 40
    assert sum(runs_here(words) for _, words in commands()) >= 7


@pytest.mark.parametrize("words", FOUND)
def test_a_command_of_the_docs_is_one(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser().parse_args(words)
    if runs_here(words):
        monkeypatch.chdir(tmp_path)
        assert main(words) == 0, capsys.readouterr().err
