"""Hashes of the tested versions, and the bill of materials of what a node runs on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from docs.dependencies import HASHES, UNHASHED, bill_of_materials, chosen_files, pins

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def test_every_tested_version_has_hashes_and_nothing_else_has() -> None:
    text = HASHES.read_text()
    found = {(name, number) for name, number, _ in ENTRY.findall(text)}
    assert found == {tuple(pin) for pin in pins((ROOT / "constraints.txt").read_text()) if pin.name not in UNHASHED}, (
        "constraints.txt has changed: run `make hashes`"
    )
    assert ENTRY.sub("", text).replace("#", "").count("==") == 0  # every line belongs to an entry


def test_files_are_chosen_for_linux_or_any_machine() -> None:
    names = [
        "a-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a-1.0-cp39-abi3-manylinux_2_28_aarch64.whl",
        "a-1.0-cp310-cp310-manylinux_2_17_x86_64.whl",
        "a-1.0-cp311-cp311-macosx_11_0_arm64.whl",
        "a-1.0-cp312-cp312-musllinux_1_2_x86_64.whl",
        "a-1.0.post1-py3-none-any.whl",
        "a-1.0.tar.gz",
        "a-1.0.exe",
    ]
    assert chosen_files(names, "1.0") == names[:2]


def test_a_hash_that_differs_is_refused(tmp_path: Path) -> None:
    """By pip, without any index: the file of a package of our own, under the hash of another."""
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    wheel.write_bytes(b"no wheel")
    (tmp_path / "hashes.txt").write_text(f"tiny==1 \\\n    --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--require-hashes", "--no-deps"]
    command += ["--find-links", str(tmp_path), "-r", str(tmp_path / "hashes.txt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_setup_by_hashes_builds_with_what_has_a_hash_and_starts_anew(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hashes.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    command = ["make", "-C", str(tmp_path), "setup", "HASHES=1"]
    planned = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout
    (editable,) = (line for line in planned.splitlines() if line.endswith("-e '.[dev]'"))
    assert "--no-build-isolation" in editable
    assert "hatchling==" in HASHES.read_text()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed").touch()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "made without hashes" in done.stdout


def test_the_bill_of_materials_has_what_a_node_needs_at_the_installed_versions() -> None:
    bill = bill_of_materials()
    assert bill == bill_of_materials()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    parts = {each["name"]: each for each in bill["components"]}
    assert {"numpy", "torch", "flwr", "cryptography", "safetensors"} <= parts.keys()
    assert not {"pytest", "ruff", "mkdocs-material"} & parts.keys()  # what development needs is no part of a node
    for name in ("numpy", "flwr", "cryptography"):
        assert parts[name]["version"] == version(name)
        assert parts[name]["purl"] == f"pkg:pypi/{name}@{version(name)}"
    references = {each["bom-ref"] for each in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in bill["dependencies"]} == references
    assert all(set(each["dependsOn"]) <= references for each in bill["dependencies"])
    own = next(each for each in bill["dependencies"] if each["ref"] == bill["metadata"]["component"]["bom-ref"])
    assert any(each.startswith("pkg:pypi/numpy@") for each in own["dependsOn"])
    assert str(ROOT) not in json.dumps(bill)


def test_a_bill_of_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def gone(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("docs.dependencies.distribution", gone)
    with pytest.raises(SystemExit, match="not installed"):
        bill_of_materials()
