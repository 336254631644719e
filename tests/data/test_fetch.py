from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fpld.data import fetch as fetch_function
from fpld.data.fetch import ARCHIVES, Archive, FetchError, cache_folder, fetch, sha256_file
from fpld.errors import InputError

CONTENT = b"the bytes of the archive"
TOY = Archive("toy", "1.0", "toy-1.0-py3-none-any.whl", hashlib.sha256(CONTENT).hexdigest())


class FakePip:
    """Stand in for pip: write `content` as pip would, or fail."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: No matching distribution\n")
        folder = Path(command[command.index("--dest") + 1])
        requirement = Path(command[command.index("--requirement") + 1]).read_text()
        assert requirement == f"toy==1.0 --hash=sha256:{TOY.sha256}\n"
        (folder / TOY.filename).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(CONTENT)
    monkeypatch.setitem(ARCHIVES, "toy", TOY)
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def test_downloads_once_checks_and_leaves_nothing_else(pip: FakePip, tmp_path: Path) -> None:
    first = fetch("toy", tmp_path / "cache")
    second = fetch("toy", tmp_path / "cache")
    assert first == second
    assert first.read_bytes() == CONTENT
    assert len(pip.commands) == 1
    assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(pip.commands[0])
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_a_corrupt_cache_is_named_and_not_used(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / TOY.filename).write_bytes(CONTENT[:-1])
    with pytest.raises(FetchError, match=r"toy-1\.0-py3-none-any\.whl is corrupt .*delete it and run again"):
        fetch("toy", tmp_path)
    assert not pip.commands


def test_offline_says_what_to_do(pip: FakePip, tmp_path: Path) -> None:
    pip.content = None
    with pytest.raises(FetchError, match=r"toy 1\.0 \(ERROR: No matching distribution\).*`pip download .* copy toy-1"):
        fetch("toy", tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_bytes_from_the_index_are_refused(pip: FakePip, tmp_path: Path) -> None:
    pip.content = b"something else"
    with pytest.raises(FetchError, match="gave other bytes"):
        fetch("toy", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_named(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"cannot be written .*FPLD_CACHE"):
        fetch("toy", tmp_path / "file")


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="one of enwik8, pubmed, smollm2, stories15m, wikipedia, got 'x'"):
        fetch_function("x")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FPLD_CACHE", raising=False)
    assert cache_folder() == tmp_path / "fpld"
    monkeypatch.setenv("FPLD_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert cache_folder("given") == Path("given")


def test_npm_packs_a_package_without_running_its_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = []

    def npm(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[command.index("--pack-destination") + 1], "toy-1.0.tgz").write_bytes(CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setitem(ARCHIVES, "toy", Archive("toy", "1.0", "toy-1.0.tgz", TOY.sha256, client="npm"))
    monkeypatch.setattr(subprocess, "run", npm)
    monkeypatch.setattr(shutil, "which", lambda name: f"bin/{name}")
    assert fetch("toy", tmp_path).read_bytes() == CONTENT
    assert {"bin/npm", "pack", "toy@1.0", "--ignore-scripts"} <= set(commands[0])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FetchError, match="there is no npm here"):
        fetch("toy", tmp_path / "other")


@pytest.mark.slow
def test_a_real_download(tmp_path: Path) -> None:
    assert sha256_file(fetch("wikipedia", tmp_path)) == ARCHIVES["wikipedia"].sha256
