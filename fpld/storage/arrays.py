"""Arrays as bytes in the safetensors format (a JSON header, then raw arrays), without a dependency.

The format is small enough to hold here: eight bytes with the header's length, a JSON object that gives each
array's dtype, shape and place, and the arrays themselves. Nothing in a file is ever executed. Files made here
are read by the `safetensors` package, and files made by it are read here; a test binds the two.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from fpld.errors import InputError
from fpld.storage.files import write_atomic

# A header of a student is a few kB; a file that claims more is not one, and must not make us allocate.
MAX_HEADER = 1 << 20
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
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, offset = [], 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
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
    text += b" " * (-len(text) % 8)  # keeps the arrays aligned, as the format asks
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def write_arrays(path: str | Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write arrays and metadata to `path`: a reader sees the old file or the new one, never a part."""
    write_atomic(Path(path), dump_arrays(arrays, metadata))


def read_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read (arrays, metadata) from `path`; a file that is not whole and consistent raises InputError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: must be a model file, but cannot be read: {error.strerror}") from error
    return parse_arrays(data, str(path))


def parse_arrays(data: bytes, what: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Split the bytes of a file or message that is called `what`; anything unsound raises InputError."""
    try:
        return _parse(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise InputError(
            f"{what}: must be a whole safetensors file, but {error}; copy or make the file again"
        ) from error


def _parse(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Split the bytes of a file; any doubt raises one of the errors that `parse_arrays` turns into its own."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > MAX_HEADER or len(data) < 8 + size:
        raise ValueError(f"its header does not fit: {size} bytes announced, {max(len(data) - 8, 0)} there")
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not text")
    body, arrays, end = memoryview(data)[8 + size :], {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"the shape of {name!r} is {list(shape)}")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the place of {name!r} does not follow from its shape")
        if stop > len(body):
            raise ValueError(f"it ends within {name!r}")
        arrays[name] = np.frombuffer(body[start:stop], dtype).reshape(shape).copy()
        end = stop
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes follow the last array")
    return arrays, metadata
