"""Files of arrays: the same bytes for the same arrays, a round trip, and nothing but InputError for hostile bytes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

from fpld import InputError
from fpld.errors import StorageError
from fpld.storage.arrays import MAX_HEADER_BYTES, dump_arrays, parse_arrays, read_arrays, write_arrays

DTYPES = ["<f2", "<f4", "<f8", "<i2", "<i4", "<i8", "u1", "<u2"]
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "b": np.arange(3, dtype=np.int16),
    "a": np.ones((2, 2), np.float32),
    "empty": np.zeros((0, 3), np.uint8),
}
METADATA = {"format": "x", "task": '{"a": "é"}'}
GOLDEN = (
    b'\xe8\0\0\0\0\0\0\0{"__metadata__":{"format":"x","task":"{\\"a\\": \\"\\u00e9\\"}"},'
    b'"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"I16","shape":[3],"data_offsets":[16,22]},'
    b'"empty":{"dtype":"U8","shape":[0,3],"data_offsets":[22,22]}} '
    b"\0\0\x80?\0\0\x80?\0\0\x80?\0\0\x80?\0\0\1\0\2\0"
)


def array_of(dtype: str) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    return hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.sampled_from(DTYPES).flatmap(array_of),
        max_size=4,
    ),
    st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4),
)
def test_round_trip_here_and_by_the_package(arrays: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]) -> None:
    data = dump_arrays(arrays, metadata)
    back, found = parse_arrays(data, "file")
    assert found == metadata
    theirs, _ = parse_arrays(save(arrays, metadata or None), "theirs")
    for each in (back, theirs, load(data)):
        assert each.keys() == arrays.keys()
        for name, array in arrays.items():
            assert (each[name].shape, each[name].dtype) == (array.shape, array.dtype)
            assert each[name].tobytes() == array.tobytes()
    assert all(array.flags.writeable for array in back.values())


def test_the_bytes_do_not_depend_on_order_or_on_layout() -> None:
    data = dump_arrays(ARRAYS, METADATA)
    assert data == dump_arrays(dict(reversed(ARRAYS.items())), METADATA)
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert dump_arrays({"a": matrix}, {}) == dump_arrays({"a": np.asfortranarray(matrix)}, {})
    assert dump_arrays({"a": matrix}, {}) == dump_arrays({"a": matrix.astype(">f4")}, {})


def test_golden_bytes() -> None:
    """A task is named by the digest of these bytes, at both ends."""
    assert dump_arrays(ARRAYS, METADATA) == GOLDEN


@pytest.mark.parametrize("array", [np.ones(2, bool), np.ones(2, complex), np.array(["a"]), np.ones(2, np.uint64)])
def test_other_dtypes_are_not_written(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InputError, match=r"arrays\['a'\] must be one of"):
        dump_arrays({"a": array}, {})


def file_of(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: str = "U8", shape: tuple[Any, ...] = (1,), offsets: tuple[Any, ...] = (0, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "nothing": b"",
    "no header": bytes(8),
    "a header that is not there": (100).to_bytes(8, "little") + b"{}",
    "a header of 2^64 bytes": b"\xff" * 16,
    "a large header": file_of(b"{}" + b" " * MAX_HEADER_BYTES),
    "no JSON": file_of(b"{"),
    "deep JSON": file_of(b"[" * 100_000 + b"]" * 100_000),
    "a list": file_of([]),
    "bytes after the last array": file_of({}, b"1"),
    "an array beyond the end": file_of({"a": entry()}),
    "an array that overlaps": file_of({"a": entry(), "b": entry()}, b"1"),
    "a hole": file_of({"a": entry(), "b": entry(offsets=(2, 3))}, b"123"),
    "another size than the shape's": file_of({"a": entry(shape=(2,))}, b"1"),
    "a size that overflows": file_of({"a": entry("F32", (2**62, 4), (0, 4))}, b"1234"),
    "no entries, and a dimension that overflows": file_of({"a": entry(shape=(0, 2**63), offsets=(0, 0))}),
    "too many dimensions": file_of({"a": entry(shape=(1,) * 65)}, b"1"),
    "a negative dimension": file_of({"a": entry(shape=(-1, -1))}, b"1"),
    "a fraction": file_of({"a": entry(shape=(1.5,))}, b"1"),
    "bfloat16": file_of({"a": entry("BF16", (1,), (0, 2))}, b"12"),
    "half bytes": file_of({"a": entry("F4", (2,))}, b"1"),
    "no such dtype": file_of({"a": entry("object")}, b"1"),
    "no offsets": file_of({"a": {"dtype": "U8", "shape": [1]}}, b"1"),
    "metadata that is no object": file_of({"__metadata__": 3}),
    "metadata that is no text": file_of({"__metadata__": {"a": 1}}),
    "half a character": file_of(b'{"__metadata__":{"a":"\\ud800"}}'),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    path = tmp_path / "student.safetensors"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(InputError, match=r"student\.safetensors: must be a whole safetensors file, but .+; copy"):
        read_arrays(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.safetensors: .* cannot be read"):
        read_arrays(tmp_path / "none.safetensors")


SOUND = dump_arrays(ARRAYS, METADATA)


@pytest.mark.slow
@settings(max_examples=2000)
@given(
    st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.binary(max_size=3)), min_size=1, max_size=4),
    st.integers(0, len(SOUND)),
    st.binary(max_size=9),
)
@example([(0, b"\xff")], len(SOUND), b"")
def test_a_mutated_file_parses_or_raises_inputerror(edits: list[tuple[int, bytes]], end: int, tail: bytes) -> None:
    """Bytes overwritten, put in or left out at random: InputError and no other, or sound arrays."""
    data = bytearray(SOUND)
    for place, new in edits:
        data[place : place + 1] = new
    for mutant in (bytes(data), bytes(data[:end]) + tail):
        try:
            arrays, metadata = parse_arrays(mutant, "name.safetensors")
        except InputError:
            continue
        assert sum(array.nbytes for array in arrays.values()) <= len(mutant)
        assert all(isinstance(text, str) for pair in metadata.items() for text in pair)


def test_written_and_read_again(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", ARRAYS, METADATA)
    arrays, metadata = read_arrays(tmp_path / "a")
    assert metadata == METADATA
    assert all(np.array_equal(arrays[name], array) for name, array in ARRAYS.items())


def test_a_machine_without_file_handles_is_not_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_arrays(tmp_path / "model.safetensors", {"a": np.zeros(3, np.float32)}, {})

    def no_handles(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", no_handles)
    with pytest.raises(StorageError, match="file handles"):
        read_arrays(tmp_path / "model.safetensors")
