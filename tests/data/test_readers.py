"""Texts in the formats that sites have them in: one file of each, a dataset as Hugging Face saves and keeps it."""

from __future__ import annotations

import gzip
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from fpld.data import Document, hold_out, read_documents
from fpld.data.documents import cut_document
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = ["snow, and\nice", 'a "quoted" naïve wolf', "the end"]


def table(**more: Any) -> Any:
    return pa.table({"note": TEXTS, "ward": [1, 2, 3], **more})


def zst(path: Path, content: bytes) -> None:
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(content)


def arrow(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, pa.ipc.new_stream(file, table().schema) as writer:
        writer.write_table(table(), max_chunksize=2)


LINES = "".join(json.dumps({"note": text}) + "\n" for text in TEXTS).encode()
CSV = b'ward,note\n1,"snow, and\nice"\n2,"a ""quoted"" na\xc3\xafve wolf"\n3,the end\n'
WRITERS: dict[str, Callable[[Path], object]] = {
    "n.jsonl": lambda path: path.write_bytes(LINES),
    "n.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES, mtime=0)),
    "n.ndjson.zst": lambda path: zst(path, LINES),
    "n.json": lambda path: path.write_text(json.dumps([{"note": text} for text in TEXTS])),
    "n.csv": lambda path: path.write_bytes(CSV),
    "n.csv.gz": lambda path: path.write_bytes(gzip.compress(CSV, mtime=0)),
    "n.parquet": lambda path: parquet.write_table(table(), path),
    "n.arrow": arrow,
}


@pytest.mark.parametrize("name", WRITERS)
def test_records_give_their_texts_in_order(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    for place in (tmp_path / name, tmp_path):
        assert [document.text for document in read_documents(place, field="note")] == TEXTS
    with pytest.raises(InputError, match=r"has no field 'text' for the text: its fields are \["):
        read_documents(tmp_path / name)


@pytest.mark.parametrize("name", ["n.txt.gz", "n.txt.zst"])
def test_packed_text(name: str, tmp_path: Path) -> None:
    content = TEXTS[1].encode()
    if name.endswith("gz"):
        (tmp_path / name).write_bytes(gzip.compress(content, mtime=0))
    else:
        zst(tmp_path / name, content)
    assert read_documents(tmp_path / name) == [Document(name, TEXTS[1])]


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    """As `DatasetDict.save_to_disk` leaves it: a folder for each split, Arrow's stream format, JSON beside."""
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    for split in ("train", "test"):
        arrow(tmp_path / split / "data-00000-of-00001.arrow")
        (tmp_path / split / "dataset_info.json").write_text("{}")
        (tmp_path / split / "state.json").write_text('{"_data_files": []}')
    found = read_documents(tmp_path, field="note")
    assert [document.text for document in found] == TEXTS * 2
    assert [document.label for document in found] == ["test"] * 3 + ["train"] * 3


def test_a_folder_as_a_hub_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "data").mkdir()
    parquet.write_table(table(), tmp_path / "data/train-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A dataset")
    (tmp_path / ".gitattributes").write_text("*.parquet filter=lfs")
    (tmp_path / "loader.py").write_text("raise SystemExit")
    with caplog.at_level(logging.WARNING, "fpld"):
        assert [document.text for document in read_documents(tmp_path, field="note")] == TEXTS
    assert "skipped, since they are no text: README.md, loader.py" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("n.gz", b"no gzip", r"n\.gz must be a whole \.gz file"),
        ("n.txt.gz", gzip.compress(b"a" * 999, mtime=0)[:-9], r"must be a whole \.gz file"),
        ("n.jsonl.zst", b"no zstd", r"must be a whole \.zst file"),
        ("n.parquet", b"PAR1", r"n\.parquet must be a whole table"),
        ("n.arrow", b"none", r"n\.arrow must be a whole table"),
        ("n.json", b"[1]", r"n\.json:1 must be a JSON object, got int"),
        ("n.json", b"{", r"n\.json must be JSON"),
        ("n.csv", b"text\n\xff\n", r"must be UTF-8"),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_documents(tmp_path / name)


@pytest.mark.parametrize("text", ["a line of words\n" * 200, "para\ngraph\n\n" * 200, "one long line of words " * 100])
def test_a_single_document_is_cut_for_holding_out(text: str) -> None:
    parts = cut_document(Document("notes.txt", text, "ward"))
    assert "".join(part.text for part in parts) == text
    assert len(parts) == 20
    assert max(part.size for part in parts) < 2 * len(text) / 20
    train, held = hold_out([Document("notes.txt", text)], fraction=0.15, seed=1)
    assert 0.1 < sum(part.size for part in held) / len(text) < 0.25
    assert {part.name for part in train}.isdisjoint(part.name for part in held)


def test_a_document_of_one_word_cannot_be_cut() -> None:
    assert [part.text for part in cut_document(Document("x", "word\n"))] == ["word\n"]
    with pytest.raises(InputError, match="at least two groups"):
        hold_out([Document("x", "word")], fraction=0.1, seed=0)
