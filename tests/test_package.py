"""The package as a whole: a light import, a small front door, examples that run, and docs that tell the truth."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import fpld
from fpld import registry
from fpld.protocol import wire

ROOT = Path(__file__).parent.parent
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
HEAVY = {"torch", "flwr", "transformers", "matplotlib", "rich", "scipy", "numba", "pandas"}
HEAVY |= {"jinja2", "starlette", "uvicorn", "pyarrow", "tensorboardX", "tomlkit", "numpy", "pydantic"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_import_is_light() -> None:
    code = "import sys, fpld; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert not HEAVY & set(loaded)


def test_the_wheel_holds_the_package_and_the_presets_and_no_scripts(tmp_path: Path) -> None:
    """What `pip install` gets: every file of `fpld/`, and of `experiments/` the TOML files alone."""
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    presets = {f"fpld/presets/{path.name}" for path in (ROOT / "experiments").glob("*.toml")}
    sources = (path for path in (ROOT / "fpld").rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    assert presets
    assert packed == presets | {str(path.relative_to(ROOT)) for path in sources}


@pytest.mark.slow
def test_wheel_and_source_distribution_are_ready_for_an_index(tmp_path: Path) -> None:
    """`make package` installs the wheel too; here, that both are built, sound, and give the same package."""
    script = [sys.executable, str(ROOT / "docs/try_package.py"), "--no-install", "--out", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.suffix for path in tmp_path.iterdir()} == {".whl", ".gz"}


def test_front_door_is_small_and_complete() -> None:
    assert len(fpld.__all__) <= 30
    assert all(hasattr(fpld, name) for name in fpld.__all__)
    assert set(fpld.__all__) <= set(dir(fpld))
    assert set(fpld.__all__) == {*fpld._DEFINED_IN, *fpld._SUBMODULES}
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fpld.no_such_name


@pytest.mark.parametrize("name", sorted(fpld.__all__))
def test_functions_of_the_front_door_say_what_goes_in_and_out(name: str) -> None:
    function = getattr(fpld, name)
    if inspect.isfunction(function) and function.__module__ == "fpld.api":
        text = inspect.getdoc(function) or ""
        sections = ("Parameters", "Returns", "Raises")
        assert all(f"\n{section}\n{'-' * len(section)}\n" in text for section in sections)
        assert ">>> " in text
        for parameter in inspect.signature(function).parameters:
            assert re.search(rf"^(\w+, )*{parameter}(, \w+)*$", text, re.MULTILINE), parameter


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(
    example: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_one_round_is_near_what_theory_says() -> None:
    values = runpy.run_path(str(ROOT / "examples/one_round.py"))
    sigma2 = sum(float(each.variance.mean()) for each in values["decoded"]) / values["K"] ** 2
    # The law is of second order. Over 40 keys the ratio was 0.995 with a standard deviation of 0.008; five of them.
    assert values["kl"] == pytest.approx(0.995 * sigma2 / 2, rel=0.04)


@pytest.mark.parametrize("page", DOCS, ids=_name)
def test_links_to_files_resolve(page: Path) -> None:
    """Pages of reference/ that are made while the site is built have no file; `make docs` checks links to them."""
    made = {ROOT / f"docs/reference/{name}.md" for name in ("commands", "configuration", "presets")}
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists() or (page.parent / target).resolve() in made, target


@pytest.mark.parametrize("page", DOCS, ids=_name)
def test_names_of_code_in_the_docs_exist(page: Path) -> None:
    """Every `fpld.module.name` in backticks can be imported."""
    for dotted in re.findall(r"`(fpld\.[a-z_0-9.]+[A-Za-z_0-9]*)`", page.read_text()):
        if dotted.split(".")[1] in vars(registry) and dotted.count(".") == 1:
            continue  # groups of entry points
        module, _, name = dotted.rpartition(".")
        try:
            __import__(dotted)
        except ImportError:
            assert hasattr(__import__(module, fromlist=[name]), name), dotted


def test_version_stands_in_the_changelog_with_that_of_the_wire() -> None:
    release = (ROOT / "CHANGELOG.md").read_text().partition(f"## {fpld.__version__}\n")[2].partition("\n## ")[0]
    assert f"Wire format version {wire.VERSION}." in release
    assert f"version: {fpld.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_version_stands_in_one_place() -> None:
    """Wheel and sdist read it from the package; the project's file names none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"] == {"path": "fpld/__init__.py"}


def test_the_workflow_runs_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    runs = re.findall(r"^ +- run: make (.+)$", (ROOT / ".github/workflows/test.yml").read_text(), re.MULTILINE)
    made = {target for run in runs for target in run.split()}
    assert made <= targets
    assert made >= {"lint", "types", "test", "docs", "compat", "package"}


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text())) <= targets


def test_every_extra_is_tried_alone() -> None:
    """`make extras` installs each into an empty environment; here, that it leaves none out."""
    found = runpy.run_path(str(ROOT / "docs/try_extras.py"))
    assert set(found["TRIED"]) == {"", *found["extras"]()}
