"""Models and texts of a Hugging Face hub: named with the commit, read from this machine's own cache.

    HuggingFaceTB/SmolLM2-135M@<commit>       a model: student.path, tokenizer.path
    allenai/c4:en@<commit>                    a folder of a dataset: data.path, probe.source, a node's data

A run never connects to a hub. It reads what is in the cache, and a name that is not there is an error that has the
command to bring it. `fetch_from_hub` brings it, with the cache, endpoint and token of whoever calls it (`HF_HOME`,
`HF_ENDPOINT`, `HF_TOKEN`). So each site decides by itself what it downloads, and a deployment needs no hub.

The commit has all 40 digits: a branch would be another model tomorrow. Files that can hold code or a pickle are neither
fetched nor read.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fpld.data.fetch import FetchError
from fpld.errors import InputError, MissingExtraError
from fpld.validation import printable, shown

Kind = Literal["model", "dataset"]
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"({_PART}/{_PART})(?::([^@]*))?@([^@/\\]*)")
_UNPINNED = re.compile(rf"({_PART}/{_PART})(?::([^@]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FOLDER = re.compile(rf"{_PART}(/{_PART})*")
_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "README.md", "LICENSE*"]
_TEXT_SUFFIXES = ("txt", "md", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "gz", "zst")


class HubName(NamedTuple):
    """A repository of a hub at a commit; of a dataset perhaps one folder alone."""

    repository: str
    commit: str
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.repository}{f':{self.folder}' if self.folder else ''}@{self.commit}"

    def patterns(self, kind: Kind) -> list[str]:
        """Return which files of the repository are wanted."""
        if kind == "model":
            return _MODEL_FILES
        return [f"{self.folder}/*.{suffix}" if self.folder else f"*.{suffix}" for suffix in _TEXT_SUFFIXES]


class FetchedRepository(NamedTuple):
    """What was brought into the cache: the folder, how many files and bytes, and the SHA-256 over all of them."""

    folder: Path
    files: int
    bytes: int
    sha256: str


def parse_hub_name(text: str) -> HubName | None:
    """Return the name of a repository of a hub; None if a text is a path.

    Raises
    ------
    InputError
        If it is such a name without a whole commit, or with a slice in place of a folder.

    >>> parse_hub_name("allenai/c4:en@" + 40 * "a").folder
    'en'
    >>> parse_hub_name("texts/news") is None
    True
    """
    match = _NAME.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    repository, folder, commit = match.groups()
    if not _COMMIT.fullmatch(commit):
        raise InputError(
            f"{shown(text)} must name a commit of {repository} with its 40 digits after the @, as the page of the "
            "repository shows them: a branch or a tag may be another one tomorrow"
        )
    if folder is not None and not _FOLDER.fullmatch(folder):
        raise InputError(
            f"{shown(text)} must name a folder of the repository between : and @; for a share of the text set "
            "data.limit or probe.limit"
        )
    return HubName(repository, commit, folder or "")


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a name of a hub, sound or not.

    >>> is_hub_name("allenai/c4:en@main"), is_hub_name("texts/news")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


def hub_hint(path: str, kind: Kind) -> str:
    """Return what to add to an error about a missing path that looks like the name of a repository.

    >>> hub_hint("/nowhere/allenai/c4:en", "dataset")
    '; a repository of a hub needs its commit: `fpld data fetch allenai/c4:en --repo-type dataset` prints the name'
    >>> hub_hint("texts", "dataset")
    ''
    """
    place = Path(path)
    name = "/".join(place.parts[-2:])
    if not _UNPINNED.fullmatch(name) or place.parent.exists():
        return ""
    return f"; a repository of a hub needs its commit: `fpld data fetch {name}{_of_kind(kind)}` prints the name"


def _of_kind(kind: Kind) -> str:
    return " --repo-type dataset" if kind == "dataset" else ""


def hub_folder(text: str, kind: Kind) -> Path | None:
    """Return the folder of a name of a hub in this machine's cache; None if the text is a path.

    Raises
    ------
    InputError
        With the commands that bring it, if the cache does not have it.
    """
    name = parse_hub_name(text)
    if name is None:
        return None
    library = _hub_library()
    try:
        root = library.snapshot_download(
            name.repository,
            revision=name.commit,
            repo_type=kind,
            allow_patterns=name.patterns(kind),
            local_files_only=True,
        )
    except FileNotFoundError:  # the library's own LocalEntryNotFoundError is one
        root = ""
    folder = Path(root, name.folder)
    if not root or not folder.is_dir():
        of_kind = " --repo-type dataset" if kind == "dataset" else ""
        raise InputError(
            f"{name} is not in the cache of this machine: `fpld data fetch {name}{of_kind}` brings it, or `hf download "
            f"{name.repository}{of_kind} --revision {name.commit}`, or a copy of the cache of another machine (HF_HOME)"
        )
    return folder


def text_folder(path: str | os.PathLike[str]) -> Path:
    """Return where a text is: the folder in the cache of a name of a hub, or the path itself."""
    return hub_folder(os.fspath(path), "dataset") or Path(path)


def fetch_from_hub(text: str, kind: Kind) -> FetchedRepository:
    """Bring a repository into this machine's cache; what is there already is not loaded again.

    Raises
    ------
    FetchError
        If the hub cannot be reached, or does not have it.
    InputError
        If the text is no name of a hub with a commit.
    """
    name = parse_hub_name(text)
    if name is None:
        raise InputError(f"a name on a hub must be OWNER/NAME@COMMIT or OWNER/NAME:FOLDER@COMMIT, got {shown(text)}")
    library = _hub_library(connect=True)
    try:
        root = library.snapshot_download(
            name.repository,
            revision=name.commit,
            repo_type=kind,
            allow_patterns=name.patterns(kind),
        )
    except Exception as error:  # of the hub's library, of its transport, of the system
        first = printable(str(error).strip().partition("\n")[0])
        raise FetchError(
            f"{name} cannot be fetched ({type(error).__name__}: {first}): check the name, the network, HF_ENDPOINT, "
            "and HF_TOKEN for a repository that is not public"
        ) from error
    return _described(Path(root, name.folder), name)


def push_to_hub(folder: Path, repository: str, *, public: bool = False) -> str:
    """Upload an exported model to a hub, with the token of whoever calls it; return the address of the commit.

    Parameters
    ----------
    folder
        What `fpld export` wrote, model card and all.
    repository
        OWNER/NAME. It is made if it is not there.
    public
        Whether a repository that is made is for everyone.

    Raises
    ------
    FetchError
        If the hub cannot be reached, or does not take it.
    """
    if not re.fullmatch(f"{_PART}/{_PART}", repository):
        raise InputError(f"--push must be OWNER/NAME, got {shown(repository)}")
    library = _hub_library(connect=True)
    hub = library.HfApi(library_name="fpld")
    try:
        hub.create_repo(repository, private=not public, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Export of fpld")
    except Exception as error:  # of the hub's library, of its transport
        first = printable(str(error).strip().partition("\n")[0])
        raise FetchError(
            f"{repository} cannot be pushed ({type(error).__name__}: {first}): check the name, the network, and "
            f"HF_TOKEN; the files are in {folder}"
        ) from error
    return str(commit.commit_url)


def _described(folder: Path, name: HubName) -> FetchedRepository:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if not files:
        raise FetchError(f"{name} has no files that can be read: text, tables, or a model in safetensors")
    hashed = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        hashed.update(f"{file.relative_to(folder).as_posix()} {digest}\n".encode())
    return FetchedRepository(folder, len(files), sum(file.stat().st_size for file in files), hashed.hexdigest())


def _hub_library(*, connect: bool = False) -> Any:
    """Import huggingface_hub: offline, unless this process was asked to fetch."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in {"1", "true", "yes", "on"}
    if connect and offline:
        raise FetchError("HF_HUB_OFFLINE is set: unset it to fetch from a hub")
    if not connect:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise MissingExtraError("a name on a Hugging Face hub", "huggingface") from error
