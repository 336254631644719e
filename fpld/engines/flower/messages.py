"""Payloads in Flower's records: raw bytes under names of our own, no pickle, no NumPy format.

Every object of a message is a request of its own at each hop, with a kilobyte of headers. So the small fields of a
message (signed message, task, frame) go together in one ConfigRecord, `fpld`. Flower sends an Array by its content's
hash, in chunks, and the same Array to many nodes only once. So what all nodes get (the student, combined logits, a
prior), and what is too long for one piece, goes as Arrays, in the records `shared`, `arrays` and `files`.

Flower has no limit on the size of a message. But SuperLink, SuperNode and the apps hold a message whole, some of them
several times. So a run whose messages would be too large is refused before any node is asked.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fpld.config.sections import MOST_MESSAGE
from fpld.engines.flower.site.ledger import MAX_LOSS_MESSAGE_BYTES
from fpld.errors import ProtocolError, SizeError
from fpld.federation.record import array_kinds
from fpld.protocol.messages import Task
from fpld.protocol.updates import UPDATES
from fpld.protocol.wire import OVERHEAD_BYTES, payload_of
from fpld.protocol.written import text_bytes
from fpld.storage.arrays import dump_arrays, parse_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fpld.config import Config
    from fpld.node.spec import NodeSpec
    from fpld.protocol import Settings
    from fpld.protocol.messages import Broadcast
    from fpld.types import Arrays

# Types of the bytes of a field.
FRAME = "fpld.frame/1"
SIGNED_MESSAGE = "fpld.letter/1"
TASK = "fpld.task/1"
STUDENT = "fpld.student/1"
FILE = "fpld.file/1"
ARRAY = "fpld.array/1"
# Names of records.
SMALL = "fpld"
SHARED = "shared"
ARRAYS = "arrays"
FILES = "files"
MAX_FIELD_BYTES = 1 << 20  # of a field in the record of small ones
SHARED_ARRAY_BYTES = 1 << 16  # arrays of a task from this size on are sent to all nodes once
_CHUNK_BYTES = 5 << 20  # of an Array that Flower sends at a time
_MAX_OVERHEAD_FORMS = 100
_SMALLER_STUDENT = "choose a smaller student, adapters, or combine.weight_bits = 16"
_FEWER_BITS = "choose fewer probe contexts or fewer bits"
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
# Flower's overhead of a content, by its form: names of records and fields, and numbers of chunks.
_overheads: dict[tuple[tuple[str, str, int], ...], int] = {}


def bytes_array(data: bytes, stype: str) -> Array:
    """Return bytes as an Array of one of the types above."""
    return Array("uint8", (len(data),), stype, data)


def array_bytes(array: object, stype: str) -> bytes:
    """Return the bytes of an Array that `bytes_array` made; raise `ProtocolError` for any other."""
    if not isinstance(array, Array) or array.stype != stype or array.dtype != "uint8":
        raise ProtocolError(f"bytes of type {stype} must come here, got {getattr(array, 'stype', type(array))}")
    if tuple(array.shape) != (len(array.data),):
        raise ProtocolError(f"{stype}: {len(array.data)} bytes came, its shape says {tuple(array.shape)}")
    return array.data


class SharedArrays:
    """Arrays that several messages share: each is copied and hashed once, however many nodes get it."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[object, ...], tuple[object, Array]] = {}

    def bytes_array(self, data: bytes, stype: str) -> Array:
        """Return bytes as an Array of one of the types above."""
        return self._once((id(data), stype), data, lambda: bytes_array(data, stype))

    def array(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        """Return an array as raw little-endian bytes."""
        memory = array.__array_interface__
        key = memory["data"][0], memory["typestr"], memory["shape"], memory["strides"]
        return self._once(key, array, lambda: raw_array(name, array))

    def _once(self, key: tuple[object, ...], source: object, make: Callable[[], Array]) -> Array:
        # The source is kept: as long as it lives, no other object has its address, which is part of the key.
        if key not in self._arrays:
            self._arrays[key] = source, make()
        return self._arrays[key][1]


def pack_fields(**fields: tuple[bytes, str]) -> RecordDict:
    """Return a message's content from fields: named bytes, each with its type."""
    content = RecordDict()
    for name, (data, stype) in fields.items():
        add_field(content, name, data, stype)
    return content


def add_field(content: RecordDict, name: str, data: bytes, stype: str, *, shared: SharedArrays | None = None) -> None:
    """Add a field to a message's content. With `shared` it is one Array for all messages that hold it."""
    if shared is not None or not 0 < len(data) <= MAX_FIELD_BYTES:
        record = content.array_records.get(SHARED, ArrayRecord())
        record[name] = (shared or SharedArrays()).bytes_array(data, stype)
        content[SHARED] = record
    else:
        small = content.config_records.get(SMALL, ConfigRecord())
        small[name] = data
        content[SMALL] = small


def field_names(content: RecordDict) -> set[str]:
    """Return the names of the fields in a message's content, and of records that are not ours."""
    small, shared = _records(content)
    return {*small, *shared, *(set(content) - {SMALL, SHARED})}


def read_field(content: RecordDict, name: str, stype: str) -> bytes:
    """Return a field of a message's content; raise `ProtocolError` if it is missing, or of another type."""
    small, shared = _records(content)
    if name in small:
        data = small[name]
        if not isinstance(data, bytes):
            raise ProtocolError(f"bytes of type {stype} must come here, got {type(data).__name__}")
        return data
    if name not in shared:
        raise ProtocolError(f"a message must hold {name!r}, got {sorted(field_names(content))}")
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
    """Return the arrays of a record that `arrays_record` made; raise `ProtocolError` if sizes do not fit."""
    arrays = {}
    for name, array in record.items():
        kind = _DTYPES.get(array.dtype)
        shape = tuple(array.shape)
        if array.stype != ARRAY or kind is None:
            raise ProtocolError(f"array {name!r} must be of type {ARRAY}, got {array.stype} of {array.dtype}")
        if min(shape, default=1) < 0 or math.prod(shape) * np.dtype(kind).itemsize != len(array.data):
            raise ProtocolError(f"array {name!r}: {len(array.data)} bytes do not fit the shape {shape}")
        arrays[name] = np.frombuffer(array.data, kind).reshape(shape).copy()
    return arrays


def pack_task(task: Task, *, arrays: bool = True, shared: SharedArrays | None = None) -> RecordDict:
    """Return a task as a message's content; without the broadcast arrays if these travel separately (the student)."""
    shared = shared or SharedArrays()
    contents = (task if arrays else replace(task, arrays={})).all_arrays()
    large = {name: array for name, array in contents.items() if array.nbytes >= SHARED_ARRAY_BYTES}
    small = {name: array for name, array in contents.items() if name not in large}
    content = pack_fields(task=(dump_arrays(small, task.metadata()), TASK))
    if large:
        content[ARRAYS] = _record({name: shared.array(name, array) for name, array in large.items()})
    return content


def unpack_task(content: RecordDict) -> Task:
    """Return the task in a message's content, with the bytes of the one that was packed if all its arrays are here."""
    small, metadata = parse_arrays(read_field(content, "task", TASK), "task")
    record = content.array_records.get(ARRAYS)
    large = {} if record is None else record_arrays(record)
    if set(small) & set(large):
        raise ProtocolError(f"arrays of a task must come once, got twice: {sorted(set(small) & set(large))}")
    return Task.from_bytes(dump_arrays({**small, **large}, metadata))


def _record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record of these very Arrays: `ArrayRecord(arrays)` would copy and hash them anew."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = array
    return record


def content_bytes(content: RecordDict) -> int:
    """Return the size of a message's content: bytes of its fields and arrays; numbers and texts count as nothing."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    values = [value for record in content.config_records.values() for value in record.values()]
    return arrays + sum(len(value) for value in values if isinstance(value, bytes))


def pack_files(content: RecordDict, files: Mapping[str, bytes], shared: SharedArrays) -> None:
    """Add files to a message's content, by their digests."""
    if files:
        content[FILES] = _record({name: shared.bytes_array(data, FILE) for name, data in files.items()})


def unpack_files(content: RecordDict) -> dict[str, bytes]:
    """Return the files in a message's content, by their digests; these are not checked here."""
    record = content.array_records.get(FILES)
    return {} if record is None else {name: array_bytes(array, FILE) for name, array in record.items()}


def downlink_by_kind(content: RecordDict, broadcast: Broadcast) -> dict[str, int]:
    """Return the bytes of a message to a node by kind (`fpld.federation.record`)."""
    record = content.array_records.get(ARRAYS)
    arrays = {} if record is None else {name: len(array.data) for name, array in record.items()}
    if "task" in field_names(content):
        small, _ = parse_arrays(read_field(content, "task", TASK), "task")
        arrays |= {name: array.nbytes for name, array in small.items()}
    sizes = array_kinds(arrays, broadcast)
    sizes["weights"] += _size(content, "student", STUDENT)
    files = content.array_records.get(FILES)
    sizes["files"] = 0 if files is None else sum(len(array.data) for array in files.values())
    sizes["overhead"] = content_bytes(content) - sum(sizes.values())
    return {**sizes, "transport": transport_bytes(content)}


def uplink_by_kind(content: RecordDict, task: Task | None = None) -> dict[str, int]:
    """Return the bytes of a node's reply, to a task or to a question, by kind (`fpld.federation.record`)."""
    sizes = {"answers": _size(content, "letter", SIGNED_MESSAGE), "transport": transport_bytes(content)}
    if task is None:
        return sizes
    frame = read_field(content, "frame", FRAME)
    payload = payload_of(memoryview(frame))
    text = text_bytes(payload, task.plan)
    sizes["updates" if task.codec == UPDATES else "labels"] = len(payload) - text
    return {**sizes, "text": text, "overhead": len(frame) - len(payload)}


def transport_bytes(content: RecordDict) -> int:
    """Return the bytes that Flower's records add to a content, up to a few.

    They depend on the content's form, and by a few bytes on the digits of sizes: those of the first one are taken.
    """
    arrays = [(name, key, len(a.data)) for name, record in content.array_records.items() for key, a in record.items()]
    small = [(name, key, 0) for name, record in content.config_records.items() for key in record]
    form = tuple(sorted((name, key, -(-size // _CHUNK_BYTES)) for name, key, size in [*arrays, *small]))
    if form not in _overheads:
        _overheads[form] = _serialized_bytes(content) - content_bytes(content)
        while len(_overheads) > _MAX_OVERHEAD_FORMS:
            del _overheads[next(iter(_overheads))]
    return _overheads[form]


def _serialized_bytes(content: RecordDict) -> int:
    """Return how many bytes Flower sends for a content: it is a tree of objects, of which equal ones are sent once."""
    sizes: dict[str, int] = {}
    left: list[Any] = [content]
    while left:
        item = left.pop()
        sizes[item.object_id] = len(item.deflate())
        left += (item.children or {}).values()
    return sum(sizes.values())


def _size(content: RecordDict, name: str, stype: str) -> int:
    return len(read_field(content, name, stype)) if name in field_names(content) else 0


def max_message_bytes(config: Config) -> int:
    """Return the largest size of a message in a run."""
    return MOST_MESSAGE if config.flower is None else config.flower.most_message


def check_message_size(name: str, size: int, max_bytes: int) -> None:
    """Raise `SizeError` if a message to a node is too large."""
    if size > max_bytes:
        raise SizeError(f"a message to {name}", size, max_bytes, _SMALLER_STUDENT)


def check_message_sizes(
    config: Config, settings: Settings, parts: Sequence[NodeSpec], files: Mapping[str, bytes], student: Arrays
) -> None:
    """Raise `SizeError` if messages of a run would be too large, before it begins.

    A node's first message has all files, later ones have the student or combined logits; its reply is a frame.
    """
    max_bytes = max_message_bytes(config)
    coordinates = settings.contexts * settings.vocab
    sent = 6 * coordinates if config.combine.broadcast == "logits" else sum(array.nbytes for array in student.values())
    for part, cap in zip(parts, settings.budget.caps, strict=True):
        check_message_size(part.name, sum(len(files[name]) for name in part.files.names()), max_bytes)
        check_message_size(part.name, sent, max_bytes)
        frame = OVERHEAD_BYTES + MAX_LOSS_MESSAGE_BYTES + int(cap * (settings.contexts + settings.written) / 8)
        if frame > max_bytes:
            raise SizeError(f"a frame of {part.name}", frame, max_bytes, _FEWER_BITS)
