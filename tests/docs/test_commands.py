"""Every command that README and docs show is run here, or by the test that is named; the parser takes all of them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import pytest
from pydantic import BaseModel

from fpld.cli import main, parser
from fpld.config import Config, presets
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands that are run elsewhere, because they take long or need other machines: by which file.
ELSEWHERE = {
    "aggregator": "tests/docs/test_tutorials.py",
    "audit": "tests/audit/test_audit.py",
    "bench": "tests/bench/test_bench.py",
    "certs": "tests/docs/test_tutorials.py",
    "dashboard": "tests/report/test_dashboard.py",
    "data fetch": "tests/data/test_fetch.py",
    "init-node": "tests/docs/test_tutorials.py",
    "node": "tests/docs/test_tutorials.py",
    "reproduce": "tests/cli/test_cli.py",
    "run PRESET": "tests/config/test_presets.py",
    "evaluate NODE": "tests/docs/test_tutorials.py",
    "check NODE": "tests/engines/flower/test_fault_table.py",
}
TUTORIALS = "docs/tutorials/"  # run by tests/docs/test_tutorials.py
STUDENT = '[student]\nkind = "transformer"\nlayers = 1\nwidth = 16\nheads = 2\nlength = 16\nbatch = 4\n\n'


def shell(file: Path) -> Iterator[list[str]]:
    """Yield the words of every line in the blocks of shell of a page, up to a redirection."""
    for block in re.findall(r"^```sh\n(.*?)^```", file.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            end = next((index for index, word in enumerate(words) if word in (">", "|", "&", "&&")), len(words))
            if words:
                yield words[:end]


def commands(file: Path) -> list[list[str]]:
    """Return the arguments of every call of `fpld` on a page."""
    return [words[1:] for words in shell(file) if words[0] == "fpld"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def elsewhere(words: list[str], world: Path) -> str | None:
    """Return the file that runs such a command, if it is not run here."""
    first, *rest = words
    named = [word for word in rest if not word.startswith("-")]
    if first == "run" and (not named or named[0] in presets()):
        return ELSEWHERE["run PRESET"]
    if first == "evaluate" and not (world / named[0]).exists():
        return ELSEWHERE["evaluate NODE"]
    if first == "check" and "--connect" in rest:
        return ELSEWHERE["check NODE"]
    return ELSEWHERE.get(first) or ELSEWHERE.get(" ".join(words[:2]))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: texts, a configuration, and small runs by the names that the pages use."""
    folder = tmp_path_factory.mktemp("reader")
    write_texts(folder)
    shutil.copytree(folder / "texts/north", folder / "my-texts")
    text = re.sub(r"\[student\]\n.*?\n\n", STUDENT, CONFIG.format(folder=folder), flags=re.DOTALL)
    text = (
        text.replace("rounds = 3", "rounds = 1").replace("steps = 60", "steps = 20").replace("bits = 1.5", "bits = 4.0")
    )
    (folder / "my.toml").write_text(text + '\n[baselines]\nmethods = ["alone"]\n')
    assert main(["run", str(folder / "my.toml"), "--out", str(folder / "runs/demo"), "--json"]) == 0
    shutil.copytree(folder / "runs/demo", folder / "runs/uniform")
    return folder


def test_there_are_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 60
    assert all((ROOT / file).exists() for file in ELSEWHERE.values())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_parser_takes_every_command(page: Path) -> None:
    whole = parser()
    for words in commands(page):
        whole.parse_args(words)


QUICK = [words for page in PAGES for words in commands(page) if words[0] in ("plan", "allocate", "bounds", "check")]
ALONE = [words for words in QUICK if len(words) == 1 or words[1].startswith("-") or words[1] in presets()]


@pytest.mark.parametrize("words", [*ALONE, ["data", "list"]], ids=" ".join)
def test_a_quick_command_runs_anywhere(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0, capsys.readouterr().err


def test_there_are_quick_commands() -> None:
    assert len(ALONE) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page) and TUTORIALS not in name(page)], ids=name)
def test_the_commands_of_a_page_run(
    page: Path, world: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for words in commands(page):
        if elsewhere(words, world) is None:
            assert main(words) == 0, (words, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_other_commands_of_a_page_exist(page: Path) -> None:
    """Targets of make, modules and scripts of Python; `python -c` is run."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in shell(page):
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif words[:2] == ["python", "-m"]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists(), words
        elif words[:2] == ["python", "-c"]:
            subprocess.run([sys.executable, "-c", words[2]], check=True, cwd=ROOT, capture_output=True)
        elif words[0] == "python":
            assert (ROOT / words[1]).exists() or f'title="{words[1]}"' in page.read_text("utf-8"), words


def mentions(file: Path) -> Iterator[list[str]]:
    """Yield the words of every command that a page names outside its blocks of shell, cut at a redirection."""
    text = re.sub(r"^```(?!text)\w*.*?\n.*?^```$", "", file.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^(?: {4}|)((?:fpld|make|python) [a-z-].*)$", text, re.MULTILINE)
    for span in [
        *re.findall(r"`((?:fpld|make|python) [^`]+)`", text),
        *(re.split(r" {2,}| #", line)[0] for line in indented),
    ]:
        yield re.split(r" [>|&] ", " ".join(span.split()))[0].split()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "wire.md"], ids=name)  # it has keys of hashes
def test_commands_that_a_page_names_exist(page: Path) -> None:
    """With their options; what stands for a value of the reader's own is not looked at."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    choices = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    known = cast("dict[str, ArgumentParser]", choices)
    for words in mentions(page):
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif words[:2] == ["python", "-m"]:
            assert words[2] == "fpld" or list(ROOT.glob(f"{words[2].replace('.', '/')}*")), words
        elif words[0] == "python":
            assert (ROOT / words[1]).exists() or (page.parent / words[1]).exists(), words
        elif not words[1].startswith("-"):
            assert words[1] in known, words
            options = known[words[1]]._option_string_actions
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= set(options), words


def sections() -> dict[str, type[BaseModel]]:
    kinds = {key: (field.annotation, *get_args(field.annotation)) for key, field in Config.model_fields.items()}
    return {
        key: kind
        for key, some in kinds.items()
        for each in some
        for kind in (each, *get_args(each))
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_of_configuration_have_keys_that_exist(page: Path) -> None:
    for block in re.findall(r"^```toml.*?\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        for section, table in tomllib.loads(block).items():
            if section in sections():
                for each in table if isinstance(table, list) else [table]:
                    assert set(each) <= set(sections()[section].model_fields), (section, each)
