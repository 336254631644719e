"""The folder of a run: what is in it, and writes that leave the old file or the new one, never a part.

config.toml            the configuration as used
versions.json          what ran it
tokenizer.json probe.json public.safetensors
                       for tokenizers of nodes: tokenizer-K.json, public-K.safetensors, private/heldout-K.safetensors
sources.json           digests of texts and models that a name of a hub stands for, if there are any
texts.json             how much of each text is used, and held out (`fpld.data.TextUse`)
seals.json             digests of what is made once, checked when the run is resumed
private/               the nodes' texts (a local run only: on real sites they stay there): text/N.safetensors are the
                       tokens of node N, heldout.safetensors the held-out ones; with the tokenizer anyone can read them
base-N.safetensors     models before the first round, one for each [student] table; base-0 is the student's;
                       base-N.device says where this machine computes it, if its table has a device
METHOD/                one federation: checkpoint.safetensors, trace.jsonl, progress.json, nodes/N/
student.safetensors    the result; student-best.safetensors is that of the round with the lowest held-out loss
trace.jsonl            one line a round
now.json curves.jsonl  what goes on, and the trainings' curves (`fpld.federation.telemetry`)
result.json            the table that `fpld run` prints
own.json               the nodes' own models on their own texts
tracking/              what trackers keep (`fpld.federation.tracking`), if there are any
privacy.json           what the nodes have spent of what they promise, where they do
"""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fpld.errors import InputError
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.storage.files import read_bytes, read_utf8, storage_error, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fpld.types import Arrays


# Files of a run, in its folder.
CONFIG = "config.toml"
VERSIONS = "versions.json"
TOKENIZER = "tokenizer.json"
PROBE = "probe.json"
PUBLIC = "public.safetensors"
PREPARED = "prepared.json"
TEXTS = "texts.json"
SOURCES = "sources.json"
SEALS = "seals.json"
STUDENT = "student.safetensors"
STUDENT_BEST = "student-best.safetensors"
RESULT = "result.json"
OWN_LOSSES = "own.json"
PRIVACY = "privacy.json"
WRITING = "written.json"
STATUS = "status.json"
HEARTBEAT = "heartbeat"
RESERVE = "reserve"
NOW = "now.json"
CURVES = "curves.jsonl"
LOG = "log.txt"
TRACKING = "tracking"
PRIVATE = "private"
HELDOUT = f"{PRIVATE}/heldout.safetensors"

# Files of one federation, in the folder of its method; the trace is in the run's folder too, once the run is done.
MAIN = "fpld"
CHECKPOINT = "checkpoint.safetensors"
TRACE = "trace.jsonl"
PROGRESS = "progress.json"
BEST_STUDENT = "best.safetensors"
PRIOR = "prior.i16"
WRITTEN_PRIOR = "written.i16"
WINDOWS = "windows.json"
BASE_LOSSES = "base.json"  # of the base model at the nodes, where they evaluate it with their first task

# Files of a node, in its folder of a federation.
NODE_FILE = "node.toml"
NODE_SPEC = "part.json"
NODE_STATE = "state.safetensors"
OWN_MODEL = "own.safetensors"
ALONE_MODEL = "alone.safetensors"
ADOPTED_MODEL = "adopted.safetensors"


def numbered(name: str, number: int) -> str:
    """Name the file that stands beside one of the run for another tokenizer; number 0 is the run's own.

    >>> numbered("tokenizer.json", 0), numbered("tokenizer.json", 2)
    ('tokenizer.json', 'tokenizer-2.json')
    """
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number}.{suffix}" if number else name


def text_file(node: int) -> str:
    """Name the file with the tokens of a node's text, in the folder of a local run."""
    return f"{PRIVATE}/text/{node}.safetensors"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run, and how they are written."""

    path: Path

    def write(self, name: str, content: bytes) -> None:
        """Write a file whole; a full disk or an unwritable folder is said as such, and the old file stays."""
        write_atomic(self.path / name, content)

    def write_json(self, name: str, value: Any) -> None:
        """Write JSON that a person can read."""
        self.write(name, (json.dumps(value, indent=1) + "\n").encode())

    def read_json(self, name: str) -> Any:
        """Read JSON that `write_json` wrote."""
        try:
            return json.loads(read_utf8(self.path / name))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.path / name} is damaged ({error}): start the run again") from None

    def write_arrays(self, name: str, arrays: Arrays, meta: dict[str, Any] | None = None) -> None:
        """Write arrays and a JSON object."""
        write_arrays(self.path / name, arrays, {"meta": json.dumps(meta or {})})

    def read_arrays(self, name: str) -> tuple[Arrays, dict[str, Any]]:
        """Read what `write_arrays` wrote."""
        arrays, metadata = read_arrays(self.path / name)
        try:
            meta = json.loads(metadata.get("meta", "{}"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.path / name} is damaged ({error}): start the run again") from None
        return arrays, meta

    def has(self, name: str) -> bool:
        """Return whether a file is there."""
        return (self.path / name).exists()

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the folder: a second run on it is refused. The lock ends with the process, however it ends.

        Yields
        ------
        bool
            Whether this call made the folder.
        """
        lock = FileLock(self.path / "lock", blocking=False)
        in_use = f"{self.path} is in use by another run: wait for it, or choose another folder"
        try:
            made = _make_folder(self.path)
            lock.acquire()
        except Timeout:
            raise InputError(in_use) from None
        except OSError as error:
            raise storage_error(self.path, error) from error
        try:
            # The holder before may have removed the folder, with the file that is locked now.
            if not self.has("lock"):
                raise InputError(in_use)
            yield made
        finally:
            lock.release()


def _make_folder(path: Path) -> bool:
    """Make a folder; return False if it is there already."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    return True


# `seals.json` holds the SHA-256 of each file that a run makes once and reads again when it is resumed. A file that is
# damaged, or of another run, is detected before it is used. One without a digest is left from a start that was cut off:
# it is made again. Several threads of a run record digests, hence the lock.
_digests_lock = threading.Lock()


def record_digests(store: RunFolder, *names: str) -> None:
    """Record the digests of files that were just written."""
    with _digests_lock:
        store.write_json(SEALS, _read(store) | {name: _digest(store, name) for name in names})


def is_complete(store: RunFolder, name: str) -> bool:
    """Return whether the digest of a file is recorded; raise InputError if the file does not match it."""
    with _digests_lock:
        recorded = _read(store).get(name)
    if recorded is None:
        return False
    if not store.has(name) or _digest(store, name) != recorded:
        raise InputError(f"{store.path / name} is damaged, or not the file of this run: start the run again")
    return True


def check_digests(store: RunFolder) -> None:
    """Check all files whose digests are recorded; raise InputError for the first that does not match."""
    for name in _read(store):
        is_complete(store, name)


def _read(store: RunFolder) -> dict[str, str]:
    if not store.has(SEALS):
        return {}
    digests = store.read_json(SEALS)
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise InputError(f"{store.path / SEALS} is damaged: start the run again")
    return digests


def _digest(store: RunFolder, name: str) -> str:
    return hashlib.sha256(read_bytes(store.path / name)).hexdigest()
