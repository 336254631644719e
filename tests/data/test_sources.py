from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fpld.data import Document, read_documents
from fpld.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_is_read_in_sorted_order_with_its_folders_as_labels(tmp_path: Path) -> None:
    for name in ["b/2.txt", "b/1.txt", "a/x/deep.md", "top.txt", ".hidden/no.txt", "b/.no.txt", "b/no.bin"]:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text of {name}", "utf-8")
    (tmp_path / "b/empty.txt").write_text(" \n")
    (tmp_path / "a/lines.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert [(document.name, document.label) for document in read_documents(tmp_path)] == [
        ("a/lines.jsonl:1", "a"),
        ("a/lines.jsonl:3", "a"),
        ("a/x/deep.md", "a"),
        ("b/1.txt", "b"),
        ("b/2.txt", "b"),
        ("top.txt", ""),
    ]


def test_a_single_file_of_any_suffix_is_text_without_its_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "notes.log"
    file.write_bytes(b"\xef\xbb\xbfline\r\n")
    assert read_documents(file) == [Document("notes.log", "line\r\n")]


def test_json_lines_with_a_chosen_field(tmp_path: Path) -> None:
    file = tmp_path / "notes.ndjson"
    file.write_text('{"body": "a\u2028b", "ward": "x"}\r\n{"body": "", "ward": "y"}\n', "utf-8", newline="")
    assert read_documents(file, field="body") == [Document("notes.ndjson:1", "a\u2028b", "")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"body": "b"}\n', r"n\.jsonl:2 has no field 'text'.*\['body'\]"),
        (b'{"text": 3}\n', r"n\.jsonl:1: field 'text' must be a string, got int"),
        (b"[1]\n", r"n\.jsonl:1 must be a JSON object, got list"),
        (b"\n{]\n", r"n\.jsonl:2 must be one JSON object"),
        (b"[" * 100_000, r"n\.jsonl:1 must be one JSON object"),
        (b'{"text": "\\ud800"}\n', r"n\.jsonl:1: .*surrogate"),
        (b'{"text": "a\xff"}\n', r"n\.jsonl must be UTF-8, but byte 11 is 0xff"),
        (b'{"text": " "}\n', "holds only empty documents"),
        (b"", "holds only empty documents"),
    ],
)
def test_bad_json_lines_name_the_file_and_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "n.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_documents(file)


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        read_documents(tmp_path / "nowhere")


def test_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match=r"holds no text: it needs at least one file of .*\.txt"):
        read_documents(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("x")
    file.chmod(0)
    with pytest.raises(InputError, match=r"secret\.txt cannot be read"):
        read_documents(file)
