"""Payloads in Flower's records: raw bytes with types of our own, no pickle, no NumPy format.

Flower sends an Array by its content's hash in chunks, and the same Array to many nodes only once: so what all nodes get
(weights, logits, a prior) goes as Arrays of its own, and what only one node gets in a few small ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fpld.errors import ProtocolError
from fpld.federation.traffic import array_kinds
from fpld.protocol.messages import Task
from fpld.protocol.wire import OVERHEAD
from fpld.storage.arrays import dump_arrays, parse_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.protocol.messages import Broadcast

FRAME = "fpld.frame/1"
LETTER = "fpld.letter/1"
TASK = "fpld.task/1"
STUDENT = "fpld.student/1"
FILE = "fpld.file/1"
ARRAY = "fpld.array/1"
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
_PIECE = 5 << 20  # bytes of an Array that Flower sends at a time
_FORMS = 100
_added: dict[tuple[tuple[str, str, int], ...], int] = {}


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


def pack(**parts: tuple[bytes, str]) -> RecordDict:
    """Return a message's content: named bytes, each with its type."""
    return RecordDict({name: ArrayRecord({"data": bytes_array(*part)}) for name, part in parts.items()})


def unpack(content: RecordDict, name: str, stype: str) -> bytes:
    """Return the named bytes of a message's content."""
    record = content.array_records.get(name)
    if record is None or set(record) != {"data"}:
        raise ProtocolError(f"a message must hold {name!r}, got {sorted(content)}")
    return array_bytes(record["data"], stype)


def arrays_record(arrays: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    """Return arrays as a record of raw little-endian bytes."""
    record = {}
    for name, array in arrays.items():
        kind = _DTYPES.get(array.dtype.name)
        if kind is None:
            raise ProtocolError(f"array {name!r} must be one of {sorted(_DTYPES)}, got {array.dtype}")
        record[name] = Array(array.dtype.name, array.shape, ARRAY, np.ascontiguousarray(array, kind).tobytes())
    return ArrayRecord(record)


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


def pack_task(task: Task, *, arrays: bool = True) -> RecordDict:
    """Return a task as a message's content: head and arrays, without the broadcast ones if the node has them."""
    lean = task if arrays else replace(task, arrays={})
    found, metadata = parse_arrays(lean.to_bytes(), "task")
    content = pack(task=(dump_arrays({}, metadata), TASK))
    if found:
        content["arrays"] = arrays_record(found)
    return content


def unpack_task(content: RecordDict) -> Task:
    """Put a task together again; its bytes are those of the task that was packed, if all its arrays came along."""
    _, metadata = parse_arrays(unpack(content, "task", TASK), "task")
    record = content.array_records.get("arrays")
    return Task.from_bytes(dump_arrays({} if record is None else record_arrays(record), metadata))


def with_student(task: Task, student: Mapping[str, np.ndarray[Any, Any]]) -> Task:
    """Return a task whose weights came beside it, packed."""
    return replace(task, arrays=dict(student)) if task.broadcast == "weights" and not task.arrays else task


def down_kinds(content: RecordDict, broadcast: Broadcast) -> dict[str, int]:
    """Return the bytes of a message to a node by kind (`fpld.federation.traffic`)."""
    record = content.array_records.get("arrays")
    sizes = array_kinds({name: len(array.data) for name, array in (record or {}).items()}, broadcast)
    sizes["weights"] += _record_bytes(content, "student")
    sizes["files"] = _record_bytes(content, "files")
    sizes["overhead"] = content_bytes(content) - sum(sizes.values())
    return {**sizes, "transport": transport_bytes(content)}


def up_kinds(content: RecordDict) -> dict[str, int]:
    """Return the bytes of a node's reply by kind."""
    frame, answers = _record_bytes(content, "frame"), _record_bytes(content, "letter")
    overhead = min(frame, OVERHEAD)
    sizes = {"labels": frame - overhead, "answers": answers, "overhead": overhead}
    return {**sizes, "transport": transport_bytes(content)}


def transport_bytes(content: RecordDict) -> int:
    """Return about what Flower's records add to the bytes of a content; it depends on names and on pieces alone.

    Numbers in them have as many digits as the first content of that form had: a few bytes.
    """
    form = tuple(
        (name, key, -(-len(array.data) // _PIECE))
        for name, record in sorted(content.array_records.items())
        for key, array in sorted(record.items())
    )
    if form not in _added:
        items = get_all_nested_objects(content).values()
        _added[form] = sum(len(item.deflate()) for item in items) - content_bytes(content)
        while len(_added) > _FORMS:
            del _added[next(iter(_added))]
    return _added[form]


def _record_bytes(content: RecordDict, name: str) -> int:
    record = content.array_records.get(name)
    return 0 if record is None else sum(len(array.data) for array in record.values())


def content_bytes(content: RecordDict) -> int:
    """Return the bytes that the arrays of a message's content take."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def pack_files(content: RecordDict, files: Mapping[str, bytes]) -> None:
    """Add files to a message's content, by their digests."""
    if files:
        content["files"] = ArrayRecord({name: bytes_array(data, FILE) for name, data in files.items()})


def unpack_files(content: RecordDict) -> dict[str, bytes]:
    """Return the files in a message's content, by the digests that they are said to have."""
    record = content.array_records.get("files")
    return {} if record is None else {name: array_bytes(array, FILE) for name, array in record.items()}
