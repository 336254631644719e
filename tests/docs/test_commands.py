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
from fpld.config.sections import NODE_ALIASES
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = "docs/tutorials/"  # run by tests/docs/test_tutorials.py
# Commands that are run elsewhere, because they take long or need other machines: by which files, each option with them.
ELSEWHERE = {
    "aggregator": ("tests/docs/test_tutorials.py", "tests/engines/flower/test_commands.py"),
    "audit": ("tests/audit/test_audit.py", "tests/bench/test_bench.py"),
    "bench": ("tests/bench/test_bench.py",),
    "certs": ("tests/docs/test_tutorials.py",),
    "dashboard": ("tests/report/test_dashboard.py",),
    "data fetch": ("tests/data/test_fetch.py",),
    "init-node": ("tests/docs/test_tutorials.py", "tests/engines/flower/test_commands.py"),
    "node": ("tests/docs/test_tutorials.py",),
    "reproduce": ("tests/cli/test_cli.py",),
    "run PRESET": ("tests/config/test_presets.py", "tests/cli/test_cli.py"),
    "evaluate NODE": ("tests/engines/flower/test_evaluate.py",),
    "check NODE": ("tests/engines/flower/test_fault_table.py",),
}
# All that a page shows and that is not run as it stands there: other programs, with the reason, or what does run them.
NOT_RUN = {
    ".": "activates an environment of the reader's",
    "cat": "tests/docs/test_tutorials.py",
    "cp": "tests/docs/test_tutorials.py",
    "docker": "needs Docker; tests/engines/flower/test_image.py runs what is in the image",
    "flower-superlink": "tests/engines/flower/test_app.py",
    "flower-supernode": "tests/engines/flower/test_app.py",
    "flwr": "tests/engines/flower/test_app.py",
    "hf": "needs a hub; tests/data/test_hub.py has one on this machine, with the same library",
    "kill": "tests/docs/test_tutorials.py",
    "llama-cli": "tests/students/test_gguf_file.py runs llama.cpp as a library",
    "llama-quantize": "is a program of llama.cpp that no package index has",
    "lm_eval": "tests/report/test_lm_eval.py",
    "mkdir": "tests/docs/test_tutorials.py",
    "mlflow": "serves a page until it is stopped; tests/federation/test_tracking.py reads the same file",
    "pip": "needs a package index; tests/test_package.py builds the wheel, `make package` and `make extras` install it",
    "tensorboard": "serves a page until it is stopped; tests/report/test_export.py reads the same file",
    "twine": "uploads, or is run by `make package`",
    "uv": "needs a package index",
    "vllm": "needs a GPU",
    "wandb": "needs an account; tests/federation/test_tracking.py runs the library offline",
}
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


def elsewhere(words: list[str], world: Path) -> tuple[str, ...] | None:
    """Return the files that run such a command, if it is not run here."""
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


def source(files: tuple[str, ...]) -> str:
    """Return the text of tests; to that of the tutorials belong the pages that it runs."""
    texts = [(ROOT / file).read_text("utf-8") for file in files]
    if "tests/docs/test_tutorials.py" in files:
        texts += [page.read_text("utf-8") for page in sorted((ROOT / TUTORIALS).glob("*.md"))]
    return "\n".join(texts)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_the_test_that_is_named_for_a_command_has_all_its_options(page: Path) -> None:
    """Of those that are not run here; `--json` and `--out` are options of all commands."""
    for words in commands(page):
        files = elsewhere(words, Path("nowhere")) if words[0] != "evaluate" else None
        if files is not None:
            options = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--json", "--out"}
            text = source(files)
            assert not {option for option in options if option not in text}, (words, files)


def test_every_other_program_of_a_page_is_in_the_list_and_the_other_way_round() -> None:
    shown = {words[0] for page in PAGES for words in shell(page)} - {"fpld", "make", "python"}
    named = set()
    for page in PAGES:
        spans = re.findall(r"`([a-z][\w-]*|\.) [^`]+`", page.read_text("utf-8"))
        named |= set(spans) & set(NOT_RUN)
    assert shown <= set(NOT_RUN), shown - set(NOT_RUN)
    assert set(NOT_RUN) <= shown | named, set(NOT_RUN) - shown - named
    for reason in NOT_RUN.values():
        assert all((ROOT / file).is_file() for file in re.findall(r"tests/[\w/]+\.py", reason)), reason


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
    """Targets of make; `python -c` is run."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in shell(page):
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif words[:2] == ["python", "-c"]:
            subprocess.run([sys.executable, "-c", words[2]], check=True, cwd=ROOT, capture_output=True)


def mentions(file: Path) -> Iterator[list[str]]:
    """Yield the words of every command that a page names outside its blocks of shell, cut at a redirection."""
    text = re.sub(r"^```(?!text)\w*.*?\n.*?^```$", "", file.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^(?: {4}|)((?:fpld|make|python) [a-z-].*)$", text, re.MULTILINE)
    for span in [
        *re.findall(r"`((?:fpld|make|python) [^`]+)`", text),
        *(re.split(r" {2,}| #", line)[0] for line in indented),
    ]:
        yield re.split(r" [>|&] ", " ".join(span.split()))[0].split()


def script(page: Path, words: list[str]) -> Path | None:
    """Return the file that a command of Python runs; None for code, and for a file that the page itself shows."""
    if words[1] == "-m":
        module = ROOT / words[2].replace(".", "/")
        return module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
    if words[1] == "-c" or f'title="{words[1]}"' in page.read_text("utf-8"):
        return None
    return next((path for path in (ROOT / words[1], page.parent / words[1]) if path.exists()), ROOT / words[1])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_scripts_of_python_exist_and_have_the_options(page: Path) -> None:
    named = [] if page.name == "wire.md" else [*mentions(page)]  # it has keys of hashes
    for words in [*shell(page), *named]:
        file = script(page, words) if words[0] == "python" else None
        if file is not None:
            assert file.is_file(), words
            text = file.read_text("utf-8")
            assert all(f'"{word}"' in text for word in words if word.startswith("--")), words


PRESET_COMMANDS = {"run", "check", "plan", "aggregator"}  # a plain word after them is a preset


def unknown_presets(words: list[str]) -> list[str]:
    """Return the plain word after a command that is no preset."""
    plain = words[1:2] if words[0] in PRESET_COMMANDS and re.fullmatch(r"[a-z][a-z0-9-]*", " ".join(words[1:2])) else []
    return [word for word in plain if word not in (*presets(), "status")]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_presets_that_a_page_names_exist(page: Path) -> None:
    named = [] if page.name == "wire.md" else [words[1:] for words in mentions(page) if words[0] == "fpld"]
    for words in [*commands(page), *named]:
        assert not unknown_presets(words), words


def test_a_preset_that_does_not_exist_is_found() -> None:
    assert unknown_presets(["run", "rival", "--seeds", "0"]) == ["rival"]
    assert not unknown_presets(["run", "rivals"])
    assert not unknown_presets(["run", "my.toml"])
    assert not unknown_presets(["aggregator", "status", "runs/one"])


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "wire.md"], ids=name)
def test_commands_that_a_page_names_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser takes them, but for arguments that they leave out; the options exist."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    choices = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    known = cast("dict[str, ArgumentParser]", choices)
    for words in mentions(page):
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif words[0] == "fpld" and not words[1].startswith("-"):
            assert words[1] in known, words
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert options <= set(known[words[1]]._option_string_actions), words
            try:
                parser().parse_args([re.sub(r"^[A-Z]$", "3", word) for word in words[1:] if word != "..."])
            except SystemExit:
                wrong = capsys.readouterr().err
                unfinished = words[-1].startswith("--") and "expected one argument" in wrong
                assert "arguments are required" in wrong or unfinished, (words, wrong)


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
                    names = NODE_ALIASES if section == "nodes" else {}
                    assert {names.get(key, key) for key in each} <= set(sections()[section].model_fields), (
                        section,
                        each,
                    )
