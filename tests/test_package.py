"""The package as a whole: a light import, a small front door, examples that run, and docs that tell the truth."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
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
HEAVY |= {"jinja2", "starlette", "uvicorn", "pyarrow", "tensorboardX", "tomlkit"}


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
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    presets = {f"fpld/presets/{path.name}" for path in (ROOT / "experiments").glob("*.toml")}
    sources = (path for path in (ROOT / "fpld").rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    assert presets
    assert found == presets | {str(path.relative_to(ROOT)) for path in sources}


def test_front_door_is_small_and_complete() -> None:
    assert len(fpld.__all__) <= 30
    assert all(hasattr(fpld, name) for name in fpld.__all__)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_one_round_is_near_what_theory_says() -> None:
    found = runpy.run_path(str(ROOT / "examples/one_round.py"))
    sigma2 = sum(float(each.variance.mean()) for each in found["decoded"]) / found["K"] ** 2
    # The law is of second order. Over 40 keys the ratio was 0.995 with a standard deviation of 0.008; five of them.
    assert found["kl"] == pytest.approx(0.995 * sigma2 / 2, rel=0.04)


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


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text())) <= targets


def test_every_extra_is_tried_alone() -> None:
    """`make extras` installs each into an empty environment; here, that it leaves none out."""
    found = runpy.run_path(str(ROOT / "docs/try_extras.py"))
    assert set(found["TRIED"]) == {"", *found["extras"]()}
