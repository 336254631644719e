"""What a message takes, by kind (`fpld.federation.traffic`), and what Flower's records add to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fpld.engines.flower.payload import ARRAYS, FILES, FRAME, LETTER, STUDENT, TASK, content_bytes, names, unpack
from fpld.federation.traffic import array_kinds
from fpld.protocol.wire import OVERHEAD
from fpld.storage.arrays import parse_arrays

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from fpld.protocol.messages import Broadcast

_PIECE = 5 << 20  # bytes of an Array that Flower sends at a time
_FORMS = 100
_added: dict[tuple[tuple[str, str, int], ...], int] = {}


def down_kinds(content: RecordDict, broadcast: Broadcast) -> dict[str, int]:
    """Return the bytes of a message to a node by kind."""
    record = content.array_records.get(ARRAYS)
    arrays = {} if record is None else {name: len(array.data) for name, array in record.items()}
    if "task" in names(content):
        small, _ = parse_arrays(unpack(content, "task", TASK), "task")
        arrays |= {name: array.nbytes for name, array in small.items()}
    sizes = array_kinds(arrays, broadcast)
    sizes["weights"] += _size(content, "student", STUDENT)
    files = content.array_records.get(FILES)
    sizes["files"] = 0 if files is None else sum(len(array.data) for array in files.values())
    sizes["overhead"] = content_bytes(content) - sum(sizes.values())
    return {**sizes, "transport": transport_bytes(content)}


def up_kinds(content: RecordDict) -> dict[str, int]:
    """Return the bytes of a node's reply by kind."""
    frame, answers = _size(content, "frame", FRAME), _size(content, "letter", LETTER)
    overhead = min(frame, OVERHEAD)
    sizes = {"labels": frame - overhead, "answers": answers, "overhead": overhead}
    return {**sizes, "transport": transport_bytes(content)}


def transport_bytes(content: RecordDict) -> int:
    """Return about what Flower's records add to the bytes of a content; it depends on names and on pieces alone.

    Numbers in them have as many digits as the first content of that form had: a few bytes.
    """
    arrays = [(name, key, len(a.data)) for name, record in content.array_records.items() for key, a in record.items()]
    small = [(name, key, 0) for name, record in content.config_records.items() for key in record]
    form = tuple(sorted((name, key, -(-size // _PIECE)) for name, key, size in [*arrays, *small]))
    if form not in _added:
        items = get_all_nested_objects(content).values()
        _added[form] = sum(len(item.deflate()) for item in items) - content_bytes(content)
        while len(_added) > _FORMS:
            del _added[next(iter(_added))]
    return _added[form]


def _size(content: RecordDict, name: str, stype: str) -> int:
    return len(unpack(content, name, stype)) if name in names(content) else 0
