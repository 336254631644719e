"""Payloads in Flower's records: raw bytes under names of our own, no pickle, no NumPy format.

Every object of a message is a request of its own at each hop, with a kilobyte of headers. So the small parts of a
message (order, task, frame, letter) go together in one ConfigRecord, `fpld`. Flower sends an Array by its content's
hash in chunks, and the same Array to many nodes only once: so what is large goes as Arrays, what all nodes get (the
student, combined logits, a prior) and what is too long for one piece. Their records are `shared`, `arrays`, `files`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fpld.errors import ProtocolError
from fpld.protocol.messages import Task
from fpld.storage.arrays import dump_arrays, parse_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FRAME = "fpld.frame/1"
LETTER = "fpld.letter/1"
TASK = "fpld.task/1"
STUDENT = "fpld.student/1"
FILE = "fpld.file/1"
ARRAY = "fpld.array/1"
SMALL, SHARED, ARRAYS, FILES = "fpld", "shared", "arrays", "files"
LONGEST_SMALL = 1 << 20  # bytes of a part that goes in one piece
LARGE_ARRAY = 1 << 16  # bytes of an array from which it is worth sending only once to all
_DTYPES = {
    "uint8": "|u1",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "int64": "<i8",
}


def bytes_array(data: bytes, stype: str) -> Array:
    """Return bytes as an Array of a type of ours."""
    return Array("uint8", (len(data),), stype, data)


def array_bytes(array: object, stype: str) -> bytes:
    """Return the bytes of an Array that `bytes_array` made; anything else is refused."""
    if not isinstance(array, Array) or array.stype != stype or array.dtype != "uint8":
        raise ProtocolError(f"bytes of type {stype} must come here, got {getattr(array, 'stype', type(array))}")
    if tuple(array.shape) != (len(array.data),):
        raise ProtocolError(f"{stype}: {len(array.data)} bytes came, its shape says {tuple(array.shape)}")
    return array.data


class Shelf:
    """Arrays that many messages hold: each is copied and hashed once, however many nodes get it."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[object, Array]] = {}

    def bytes_array(self, data: bytes, stype: str) -> Array:
        """Return bytes as an Array of a type of ours."""
        return self._once((id(data), stype), data, lambda: bytes_array(data, stype))

    def array(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        """Return an array as raw little-endian bytes."""
        place = array.__array_interface__
        key = place["data"][0], place["typestr"], place["shape"], place["strides"]
        return self._once(key, array, lambda: raw_array(name, array))

    def _once(self, key: tuple[object, ...], held: object, make: Callable[[], Array]) -> Array:
        if key not in self._made:
            self._made[key] = held, make()  # what is held keeps its place in memory
        return self._made[key][1]


def pack(**parts: tuple[bytes, str]) -> RecordDict:
    """Return a message's content: named bytes, each with its type."""
    content = RecordDict()
    for name, (data, stype) in parts.items():
        put(content, name, data, stype)
    return content


def put(content: RecordDict, name: str, data: bytes, stype: str, *, shared: Shelf | None = None) -> None:
    """Add named bytes to a message's content; those on a shelf are `shared` with other messages."""
    if shared is not None or not 0 < len(data) <= LONGEST_SMALL:
        record = content.array_records.get(SHARED, ArrayRecord())
        record[name] = (shared or Shelf()).bytes_array(data, stype)
        content[SHARED] = record
    else:
        small = content.config_records.get(SMALL, ConfigRecord())
        small[name] = data
        content[SMALL] = small


def names(content: RecordDict) -> set[str]:
    """Return the names of the bytes in a message's content, and of records that are none of ours."""
    small, shared = _records(content)
    return {*small, *shared, *(set(content) - {SMALL, SHARED})}


def unpack(content: RecordDict, name: str, stype: str) -> bytes:
    """Return the named bytes of a message's content."""
    small, shared = _records(content)
    if name in small:
        data = small[name]
        if not isinstance(data, bytes):
            raise ProtocolError(f"bytes of type {stype} must come here, got {type(data).__name__}")
        return data
    if name not in shared:
        raise ProtocolError(f"a message must hold {name!r}, got {sorted(names(content))}")
    return array_bytes(shared[name], stype)


def _records(content: RecordDict) -> tuple[ConfigRecord, ArrayRecord]:
    return content.config_records.get(SMALL, ConfigRecord()), content.array_records.get(SHARED, ArrayRecord())


def arrays_record(arrays: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    """Return arrays as a record of raw little-endian bytes."""
    return ArrayRecord({name: raw_array(name, array) for name, array in arrays.items()})


def raw_array(name: str, array: np.ndarray[Any, Any]) -> Array:
    """Return an array as raw little-endian bytes; its name is for the error."""
    kind = _DTYPES.get(array.dtype.name)
    if kind is None:
        raise ProtocolError(f"array {name!r} must be one of {sorted(_DTYPES)}, got {array.dtype}")
    return Array(array.dtype.name, array.shape, ARRAY, np.ascontiguousarray(array, kind).tobytes())


def record_arrays(record: ArrayRecord) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a record that `arrays_record` made; sizes must fit what is there."""
    arrays = {}
    for name, array in record.items():
        kind, shape = _DTYPES.get(array.dtype), tuple(array.shape)
        if array.stype != ARRAY or kind is None:
            raise ProtocolError(f"array {name!r} must be of type {ARRAY}, got {array.stype} of {array.dtype}")
        if min(shape, default=1) < 0 or math.prod(shape) * np.dtype(kind).itemsize != len(array.data):
            raise ProtocolError(f"array {name!r}: {len(array.data)} bytes do not fit the shape {shape}")
        arrays[name] = np.frombuffer(array.data, kind).reshape(shape).copy()
    return arrays


def pack_task(task: Task, *, arrays: bool = True, shelf: Shelf | None = None) -> RecordDict:
    """Return a task as a message's content, without what is broadcast if it goes in another way (the student)."""
    shelf = shelf or Shelf()
    found = (task if arrays else replace(task, arrays={})).all_arrays()
    large = {name: array for name, array in found.items() if array.nbytes >= LARGE_ARRAY}
    small = {name: array for name, array in found.items() if name not in large}
    content = pack(task=(dump_arrays(small, task.metadata()), TASK))
    if large:
        content[ARRAYS] = _record({name: shelf.array(name, array) for name, array in large.items()})
    return content


def unpack_task(content: RecordDict) -> Task:
    """Put a task together again; its bytes are those of the task that was packed, if all its arrays came along."""
    small, metadata = parse_arrays(unpack(content, "task", TASK), "task")
    record = content.array_records.get(ARRAYS)
    large = {} if record is None else record_arrays(record)
    if set(small) & set(large):
        raise ProtocolError(f"arrays of a task must come once, got twice: {sorted(set(small) & set(large))}")
    return Task.from_bytes(dump_arrays({**small, **large}, metadata))


def _record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record that holds these very Arrays: one made from a dictionary would copy and hash them anew."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = array
    return record


def content_bytes(content: RecordDict) -> int:
    """Return the bytes that parts and arrays of a message's content take; numbers and texts count as nothing."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    values = [value for record in content.config_records.values() for value in record.values()]
    return arrays + sum(len(value) for value in values if isinstance(value, bytes))


def pack_files(content: RecordDict, files: Mapping[str, bytes], shelf: Shelf) -> None:
    """Add files to a message's content, by their digests."""
    if files:
        content[FILES] = _record({name: shelf.bytes_array(data, FILE) for name, data in files.items()})


def unpack_files(content: RecordDict) -> dict[str, bytes]:
    """Return the files in a message's content, by the digests that they are said to have."""
    record = content.array_records.get(FILES)
    return {} if record is None else {name: array_bytes(array, FILE) for name, array in record.items()}
