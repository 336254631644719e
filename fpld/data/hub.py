"""Models and texts of a Hugging Face hub: named with the commit, read from this machine's own cache.

    HuggingFaceTB/SmolLM2-135M@<commit>       a model: student.path, tokenizer.path
    allenai/c4:en@<commit>                    a folder of a dataset: data.path, probe.source, a node's data
    allenai/c4:en[:1%]@<commit>               the first files of it, by name, that have together that share of the bytes
    allenai/c4:en[:200MB]@<commit>            the same with a size; files stay whole, the last one reaches the limit

A run never connects to a hub. It reads what is in the cache, and a name that is not there is an error that has the
command to bring it. `fetch_from_hub` brings it, with the cache, endpoint and token of whoever calls it (`HF_HOME`,
`HF_ENDPOINT`, `HF_TOKEN`). So each site decides by itself what it downloads, and a deployment needs no hub.

The commit has all 40 digits: a branch would be another model tomorrow. A name without one can be fetched: what is
returned is the name with the commit that the hub has then. Files that can hold code or a pickle are neither fetched nor
read. A share of a dataset is kept in the package's cache, with a list of its files, beside no others.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fpld.data.fetch import FetchError, cache_folder, sha256_file
from fpld.errors import InputError, MissingExtraError
from fpld.storage.files import canonical_json, read_json, write_atomic
from fpld.units import parse_size
from fpld.validation import printable, shown

Kind = Literal["model", "dataset"]
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_UNPINNED = re.compile(rf"({_PART}/{_PART})(?::([^@\[]*))?(?:\[([^@]*)\])?")
_NAME = re.compile(rf"{_UNPINNED.pattern}@([^@/\\]*)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FOLDER = re.compile(rf"{_PART}(/{_PART})*")
_FILES = "files"  # of a share, beside the list of them
_MANIFEST = "fetched.json"
_FORMAT = "fpld-hub-share-1"
_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "README.md", "LICENSE*"]
_TEXT_SUFFIXES = ("txt", "md", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "gz", "zst")

log = logging.getLogger(__name__)


class HubName(NamedTuple):
    """A repository of a hub at a commit; of a dataset perhaps one folder alone, and a share of its files."""

    repository: str
    commit: str
    folder: str = ""
    share: str = ""

    def __str__(self) -> str:
        folder = f":{self.folder}" if self.folder else ""
        return f"{self.repository}{folder}{f'[{self.share}]' if self.share else ''}@{self.commit}"

    def most_bytes(self, total: int) -> float:
        """Return how many of so many bytes its share is."""
        if not self.share:
            return total
        size = self.share.removeprefix(":")
        return total * float(size[:-1]) / 100 if size.endswith("%") else parse_size(size)

    def patterns(self, kind: Kind) -> list[str]:
        """Return which files of the repository are wanted."""
        if kind == "model":
            return _MODEL_FILES
        return [f"{self.folder}/*.{suffix}" if self.folder else f"*.{suffix}" for suffix in _TEXT_SUFFIXES]


class FetchedRepository(NamedTuple):
    """What was brought into the cache: its name, the folder, files and bytes, and the SHA-256 over all of them."""

    name: str
    folder: Path
    files: int
    bytes: int
    sha256: str


def parse_hub_name(text: str) -> HubName | None:
    """Return the name of a repository of a hub; None if a text is a path.

    Raises
    ------
    InputError
        If it is such a name without a whole commit, or with a share that is none.

    >>> parse_hub_name("allenai/c4:en@" + 40 * "a").folder
    'en'
    >>> parse_hub_name("texts/news") is None
    True
    """
    match = _NAME.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    repository, folder, share, commit = match.groups()
    if not _COMMIT.fullmatch(commit):
        raise InputError(
            f"{shown(text)} must name a commit of {repository} with its 40 digits after the @, as the page of the "
            "repository shows them: a branch or a tag may be another one tomorrow"
        )
    if folder is not None and not _FOLDER.fullmatch(folder):
        raise InputError(f"{shown(text)} must name a folder of the repository between : and @")
    name = HubName(repository, commit, folder or "", share or "")
    if share is not None and not _is_share(share):
        raise InputError(f"{shown(text)} must have a share such as [:1%] or [:200MB], of whole files")
    return name


def _is_share(share: str) -> bool:
    if not share.startswith(":"):
        return False
    try:
        most = HubName("", "", "", share).most_bytes(100)
    except ValueError:
        return False
    return 0 < most <= 100 if share.endswith("%") else 0 < most < math.inf


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
    if name.share:
        _check_share(name, kind)
        folder = _share_root(name) / _FILES / name.folder
        if not (_share_root(name) / _MANIFEST).is_file():
            raise InputError(f"{name} is not in the cache of this machine: `fpld data fetch '{name}'` brings it")
        return folder
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

    A name without a commit is that of the newest commit, which the result names.

    Raises
    ------
    FetchError
        If the hub cannot be reached, or does not have it.
    InputError
        If the text is no name of a hub.
    """
    if not is_hub_name(text) and not _UNPINNED.fullmatch(text):
        raise InputError(
            f"a name on a hub must be OWNER/NAME or OWNER/NAME:FOLDER, with @COMMIT or without, got {shown(text)}"
        )
    library = _hub_library(connect=True)
    try:
        return _fetch(library, text, kind)
    except (InputError, FetchError):
        raise
    except Exception as error:  # of the hub's library, of its transport, of the system
        first = printable(str(error).strip().partition("\n")[0])
        raise FetchError(
            f"{text} cannot be fetched ({type(error).__name__}: {first}): check the name, the network, HF_ENDPOINT, "
            "and HF_TOKEN for a repository that is not public"
        ) from error


def _fetch(library: Any, text: str, kind: Kind) -> FetchedRepository:
    pinned = text if is_hub_name(text) else f"{text}@{_newest_commit(library, text, kind)}"
    name = parse_hub_name(pinned)
    if name is None:
        raise InputError(f"{shown(pinned)} is a folder here: call from another one")
    if name.share:
        _check_share(name, kind)
        return _fetch_share(library, name)
    root = library.snapshot_download(
        name.repository,
        revision=name.commit,
        repo_type=kind,
        allow_patterns=name.patterns(kind),
    )
    return describe_repository(Path(root, name.folder), name)


def _newest_commit(library: Any, text: str, kind: Kind) -> str:
    repository = text.partition(":")[0].partition("[")[0]
    return str(library.HfApi(library_name="fpld").repo_info(repository, repo_type=kind).sha)


def _check_share(name: HubName, kind: Kind) -> None:
    if kind != "dataset":
        raise InputError(f"{name} must have no share: that is for a dataset, with --repo-type dataset")


def _share_root(name: HubName) -> Path:
    """Return the folder of a share in the package's cache."""
    digest = hashlib.sha256(str(name).encode()).hexdigest()[:16]
    return cache_folder() / "hub" / f"{name.repository.replace('/', '--')}-{digest}"


def _fetch_share(library: Any, name: HubName) -> FetchedRepository:
    """Bring the first files of a dataset into a folder of their own; the list of them is written last."""
    where = {"repo_id": name.repository, "repo_type": "dataset", "revision": name.commit}
    listed = library.HfApi(library_name="fpld").list_repo_tree(
        path_in_repo=name.folder or None, recursive=True, **where
    )
    sizes = {entry.path: entry.size for entry in listed if hasattr(entry, "size")}
    wanted = [path for path in sorted(sizes) if path.rpartition(".")[2] in _TEXT_SUFFIXES]
    total = sum(sizes[path] for path in wanted)
    most = name.most_bytes(total)
    chosen: list[str] = []
    while len(chosen) < len(wanted) and sum(sizes[path] for path in chosen) < most:
        chosen.append(wanted[len(chosen)])
    root = _share_root(name)
    for number, path in enumerate(chosen, 1):
        log.info("file %d of %d: %s (%.1f MB)", number, len(chosen), printable(path), sizes[path] / 1e6)
        library.hf_hub_download(filename=path, local_dir=root / _FILES, **where)
    fetched = describe_repository(root / _FILES / name.folder, name)
    manifest = {
        "format": _FORMAT,
        **fetched._asdict(),
        "folder": name.folder,
        "of_files": len(wanted),
        "of_bytes": total,
    }
    write_atomic(root / _MANIFEST, canonical_json(manifest))
    return fetched


def describe_source(text: str, kind: Kind) -> FetchedRepository | None:
    """Return what a name of a hub is on this machine, with its digest; None if the text is a path.

    Raises
    ------
    InputError
        If it is not in the cache, or a share of it is not as it was fetched.
    """
    name = parse_hub_name(text)
    folder = hub_folder(text, kind)
    if name is None or folder is None:
        return None
    described = describe_repository(folder, name)
    if name.share:
        fetched = read_json(_share_root(name) / _MANIFEST, _FORMAT)
        if fetched.get("sha256") != described.sha256:
            raise InputError(f"{name} is not as it was fetched: delete {_share_root(name)} and fetch it again")
    return described


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


def describe_repository(folder: Path, name: HubName) -> FetchedRepository:
    """Count the files of a folder of the cache, and compute the SHA-256 over their names and contents."""
    there = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
    # What the hub's library notes for itself is in hidden folders.
    files = [file for file in there if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    if not files:
        raise FetchError(f"{name} has no files that can be read: text, tables, or a model in safetensors")
    hashed = hashlib.sha256()
    for file in files:
        hashed.update(f"{file.relative_to(folder).as_posix()} {sha256_file(file)}\n".encode())
    size = sum(file.stat().st_size for file in files)
    return FetchedRepository(str(name), folder, len(files), size, hashed.hexdigest())


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
