"""Arrays as bytes in the safetensors format: eight bytes with the header's length, a JSON header, then raw arrays.

The `safetensors` package parses, and checks that every array's place follows from its shape and the file's length.
Nothing in a file is ever executed. Writing is done here, since the package writes metadata in an order that changes
from call to call: messages are named by their digest, so the same arrays must give the same bytes. A file carries a
digest over everything in it, so that a bit changed by a disk is detected.

A checkpoint is a file of arrays and a JSON object, with the id of its run. The checkpoint before the newest is kept
beside it. If the newest one is damaged or of another run, a warning is logged and the previous one is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, deserialize

from fpld.errors import InputError, exhausted_resource
from fpld.storage.files import keep_copy, storage_error, write_atomic

if TYPE_CHECKING:
    from fpld.types import Arrays

log = logging.getLogger(__name__)

# The header of a student has a few kB; a file that claims more is refused before memory is allocated for it.
MAX_HEADER_BYTES = 1 << 20
_DIGEST = "digest"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dump_arrays(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """Return arrays and metadata as the bytes of one file or message."""
    return b"".join(_parts(arrays, metadata))


def write_arrays(path: str | Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write arrays and metadata to `path`: a reader sees the old file or the new one, never a part."""
    write_atomic(Path(path), dump_arrays(arrays, {**metadata, _DIGEST: _digest(arrays, metadata)}))


def read_arrays(path: str | Path, *, sealed: bool = False) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read (arrays, metadata) from a file.

    Parameters
    ----------
    sealed
        Refuse a file without a digest, such as another program writes.

    Raises
    ------
    InputError
        If the file is not whole and consistent.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        if exhausted_resource(error) is not None:  # of this machine, and nothing is wrong with the file
            raise storage_error(Path(path), error) from error
        raise InputError(f"{path}: must be a model file, but cannot be read: {error.strerror}") from error
    arrays, metadata = parse_arrays(data, str(path))
    digest = metadata.pop(_DIGEST, None)
    if digest is None and not sealed:
        return arrays, metadata
    if digest != _digest(arrays, metadata):
        raise InputError(f"{path} is damaged: its digest does not match its content; copy or make the file again")
    return arrays, metadata


def _parts(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> list[bytes]:
    """Return the bytes of a file in pieces: the header's length, the header, each array."""
    header: dict[str, Any] = {"__metadata__": metadata}
    parts = []
    offset = 0
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        dtype = _NAMES.get(array.dtype.newbyteorder("<"))
        if dtype is None:
            raise InputError(f"arrays[{name!r}] must be one of {sorted(_DTYPES)}, got {array.dtype}")
        parts.append(array.astype(_DTYPES[dtype], copy=False).tobytes())
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(parts[-1])],
        }
        offset += len(parts[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8
    if len(text) > MAX_HEADER_BYTES:
        raise InputError(f"names, shapes and metadata must take at most {MAX_HEADER_BYTES} bytes, got {len(text)}")
    return [len(text).to_bytes(8, "little"), text, *parts]


def _digest(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    """Return the digest of a file without the digest in it."""
    hashed = hashlib.sha256()
    for part in _parts(arrays, metadata):
        hashed.update(part)
    return hashed.hexdigest()


def parse_arrays(data: bytes, what: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Parse the bytes of a file or message; `what` names it in an InputError."""
    try:
        return _parse(data)
    except (SafetensorError, ValueError, OverflowError, RecursionError, TypeError, LookupError) as error:
        raise InputError(
            f"{what}: must be a whole safetensors file, but {error}; copy or make the file again"
        ) from error


def _parse(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > MAX_HEADER_BYTES or len(data) < 8 + size:
        raise ValueError(f"its header does not fit: {size} bytes announced, {max(len(data) - 8, 0)} there")
    arrays = {name: _array(name, entry) for name, entry in deserialize(data)}
    # `deserialize` has checked the header, and that metadata is text, but does not return it.
    return arrays, json.loads(data[8 : 8 + size]).get("__metadata__") or {}


def _array(name: str, entry: dict[str, Any]) -> np.ndarray:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"the dtype of {name!r} is {entry['dtype']}, not one of {', '.join(sorted(_DTYPES))}")
    return np.frombuffer(entry["data"], dtype).reshape(entry["shape"])


def previous_file(path: Path) -> Path:
    """Return the path of the checkpoint before the newest one.

    >>> from pathlib import Path
    >>> previous_file(Path("state.safetensors")).name
    'state-previous.safetensors'
    """
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def write_checkpoint(path: Path, arrays: Arrays, meta: dict[str, Any], *, run: str) -> None:
    """Write a checkpoint of a run; the one that is there becomes the previous one."""
    if path.exists():
        keep_copy(path, previous_file(path))
    write_arrays(path, arrays, {"meta": json.dumps(meta), "run": run})


def read_checkpoint(path: Path, *, run: str | None) -> tuple[Arrays, dict[str, Any]]:
    """Read one checkpoint; raise InputError if it is damaged, or of another run than `run` (None: of any)."""
    arrays, metadata = read_arrays(path, sealed=True)
    if run is not None and metadata.get("run") != run:
        raise InputError(f"{path} is of another run ({metadata.get('run')}), this is {run}")
    # The digest matched, so this is what `write_checkpoint` wrote.
    meta: dict[str, Any] = json.loads(metadata["meta"])
    return arrays, meta


def load_checkpoint(path: Path, *, run: str | None) -> tuple[Arrays, dict[str, Any]] | None:
    """Return the newest sound checkpoint, None if there never was one; log a warning if it is the previous one."""
    older = previous_file(path)
    if not path.exists() and not older.exists():
        return None
    try:
        return read_checkpoint(path, run=run)
    except InputError as error:
        try:
            checkpoint = read_checkpoint(older, run=run)
        except InputError:
            raise InputError(f"{error}; there is no sound file before it either: start the run again") from None
        log.warning("%s; continuing from the one before it, %s", error, older.name)
        # The sound one takes the place of the damaged one, which the next write would otherwise keep instead of it.
        keep_copy(older, path)
        return checkpoint
