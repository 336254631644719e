"""Texts that stay in their files: the same documents and tokens as in memory, from an index and from the cache."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import logging
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld.data import (
    BpeTokenizer,
    ByteTokenizer,
    Document,
    by_label,
    dirichlet,
    hold_out,
    iid,
    read_documents,
    readers,
    stored,
    token_cache,
    token_stream,
)
from fpld.data.documents import document_groups, of_label, sample_documents, total_size
from fpld.data.stored import StoredDocument, StoredDocuments, document_texts
from fpld.data.token_cache import TokenCache, clear_texts
from fpld.data.token_stream import Segments, TokenPack, TokenStream, is_stream, join_tokens, open_text, text_arrays
from fpld.errors import InputError, StorageError
from fpld.node.writing import PrivateRuns
from fpld.privacy import cut_text
from fpld.storage.arrays import write_arrays

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fpld.types import Array

WORDS = ("snow\n\nfell,", "and", "the", "naïve", "wolf's", "12", "cubs\n", "", "slept", "—", "\r\nin", "3.14\t\nice")
PAST = time.time() - 60  # files that are old enough for their times to be trusted
BPE = BpeTokenizer.train([" ".join(WORDS) * 30], vocab=290)


def text(seed: int, count: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def lines(seeds: range) -> bytes:
    return "".join(json.dumps({"text": text(seed, 50)}) + "\n" for seed in seeds).encode() + b'{"text": " "}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a long text, short ones, records, and compressed files."""
    place = tmp_path / "texts"
    (place / "ward").mkdir(parents=True)
    files = {
        "a.txt": text(0, 80).encode(),
        "b.jsonl": lines(range(1, 30)),
        "c.jsonl.gz": gzip.compress(lines(range(30, 40))),
        "d.txt.xz": lzma.compress(text(41, 90).encode()),
        "ward/e.txt.bz2": bz2.compress(text(42, 70).encode()),
        "ward/f.txt": text(43, 9000).encode(),
    }
    for name, content in files.items():
        (place / name).write_bytes(content)
        os.utime(place / name, (PAST, PAST))
    return place


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all limits small: nothing is read into memory, and packs have a few thousand tokens."""
    monkeypatch.setattr(stored, "MAX_IN_MEMORY_BYTES", 1000)
    monkeypatch.setattr(readers, "MAX_WHOLE_CHARACTERS", 5000)
    monkeypatch.setattr(readers, "PART_CHARACTERS", 1000)
    monkeypatch.setattr(token_cache, "_PACK_TOKENS", 4000)


def encoded(documents: Sequence[Document]) -> Array:
    return np.concatenate([BPE.encode(document.text + "\n\n") for document in documents])


@pytest.fixture
def in_memory(folder: Path) -> Sequence[Document]:
    return read_documents(folder)


@pytest.mark.usefixtures("small")
def test_the_documents_and_tokens_are_those_of_a_text_in_memory(
    in_memory: Sequence[Document], folder: Path, tmp_path: Path
) -> None:
    documents = read_documents(folder, cache=tmp_path / "cache")
    assert all(isinstance(document, StoredDocument) for document in documents)
    assert documents == in_memory
    assert [document.size for document in documents] == [document.size for document in in_memory]
    assert "".join(document_texts(documents)) == "".join(document.text for document in in_memory)
    result = TokenCache(tmp_path / "cache", BPE).encode(documents[::-1])
    assert np.array_equal(np.asarray(result.tokens), encoded(in_memory[::-1]))
    assert result.lengths.tolist() == [len(encoded([document])) for document in in_memory[::-1]]
    assert len(list((tmp_path / "cache").rglob("*.u16"))) > 2
    again = TokenCache(tmp_path / "cache", ByteTokenizer()).encode([*documents, Document("x", "cut")])
    assert np.asarray(again.tokens).astype(np.uint8).tobytes().endswith(in_memory[-1].text.encode() + b"\n\ncut\n\n")


@pytest.mark.usefixtures("small")
def test_long_documents_are_cut_between_their_parts(folder: Path, tmp_path: Path) -> None:
    documents = read_documents(folder, cache=tmp_path / "cache")
    (long,) = (document for document in documents if isinstance(document, StoredDocument) and document.long)
    for pieces in (list(long.split(20_000)), long.cut(20)):
        assert "".join(piece.text for piece in pieces) == long.text
    assert len(long.cut(20)) == 20
    assert long.split(20_000)[0].size <= 20_000
    train, held = hold_out([long], fraction=0.15, seed=1)
    assert 0.1 < total_size(held) / long.size < 0.25
    assert total_size(train) + total_size(held) == long.size
    train, held = hold_out(documents, fraction=0.1, seed=1)
    assert 0.05 < total_size(held) / total_size(documents) < 0.25
    for most in (500, 20_000, 40_000):
        assert 0.5 * most < total_size(sample_documents(documents, most, seed=3)) <= most


@pytest.mark.usefixtures("small")
def test_a_file_that_has_changed_is_tokenized_alone(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fpld")
    cache = tmp_path / "cache"
    for changed in (None, None, folder / "b.jsonl"):
        if changed is not None:
            changed.write_bytes(lines(range(100, 110)))
        caplog.clear()
        documents = read_documents(folder, cache=cache)
        result = TokenCache(cache, BPE).encode(documents)
        assert np.array_equal(np.asarray(result.tokens), encoded(documents))
        messages = [record for record in caplog.records if "tokenizing" in record.message]
        sizes = [record.args[0] for record in messages if isinstance(record.args, tuple)]
        if changed is not None:
            assert sizes == [pytest.approx(sum(len(text(seed, 50).encode()) for seed in range(100, 110)) / 1e6)]
    assert clear_texts(cache) > 0
    assert not cache.exists()


@pytest.mark.usefixtures("small")
def test_what_is_in_the_cache_is_not_tokenized_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = read_documents(folder, cache=tmp_path / "cache")
    first = TokenCache(tmp_path / "cache", BPE).encode(documents[:5]).tokens

    def unreadable(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(stored, "_measure", unreadable)
    monkeypatch.setattr(stored, "read_parts", unreadable)
    documents = read_documents(folder, cache=tmp_path / "cache")
    same = TokenCache(tmp_path / "cache", BPE).encode(documents[:5]).tokens
    assert np.array_equal(np.asarray(first), np.asarray(same))
    with pytest.raises(AssertionError, match="read again"):
        TokenCache(tmp_path / "cache", BPE).encode(documents)


@pytest.mark.usefixtures("small")
def test_a_full_disk_is_said_and_leaves_whole_packs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = read_documents(folder, cache=tmp_path / "cache")
    synced: list[int] = []

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="no space left on the disk"):
            TokenCache(tmp_path / "cache", BPE).encode(documents)
    assert not list((tmp_path / "cache").rglob(".fpld-*"))
    result = TokenCache(tmp_path / "cache", BPE).encode(documents)
    assert np.array_equal(np.asarray(result.tokens), encoded(documents))


_KILLED = """
import os, sys
from pathlib import Path
from fpld.data import read_documents, readers, stored, token_cache, load_tokenizer
stored.MAX_IN_MEMORY_BYTES = 1000
token_cache._PACK_TOKENS = 1000
written = token_cache._PackWriter.add
def add(self, *arguments):
    written(self, *arguments)
    if self._number == 2 and self._file is not None:
        os.kill(os.getpid(), 9)
token_cache._PackWriter.add = add
place = Path(sys.argv[1])
documents = read_documents(place / "texts", cache=place / "cache")
token_cache.TokenCache(place / "cache", load_tokenizer(place / "bpe.json")).encode(documents)
"""


def test_preparing_goes_on_after_a_kill(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: Sequence[Document]
) -> None:
    BPE.save(tmp_path / "bpe.json")
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    cache = tmp_path / "cache"
    packs = {path: path.stat().st_mtime_ns for path in cache.rglob("*.u16")}
    assert len(packs) == 2
    assert list(cache.rglob(".fpld-*"))
    monkeypatch.setattr(stored, "MAX_IN_MEMORY_BYTES", 1000)
    result = TokenCache(cache, BPE).encode(read_documents(folder, cache=cache))
    assert np.array_equal(np.asarray(result.tokens), encoded(in_memory))
    assert packs == {path: path.stat().st_mtime_ns for path in packs}
    assert not list(cache.rglob(".fpld-*"))


_PREPARED = """
import sys, time
from pathlib import Path
from fpld.data import ByteTokenizer, read_documents, token_cache
token_cache._PACK_TOKENS = 1_000_000
place = Path(sys.argv[1])
most = int(sys.argv[2])
packs = []
write_arrays = token_cache.write_arrays
def write(*arguments):
    write_arrays(*arguments)
    packs.append(arguments[0])
    if len(packs) == most:
        time.sleep(600)
token_cache.write_arrays = write
documents = read_documents(place / "texts", cache=place / "cache")
token_cache.TokenCache(place / "cache", ByteTokenizer()).encode(documents)
"""


def long_texts(folder: Path, *, files: int) -> Array:
    """Write files of 9 MB, and return the tokens of all of them, which are bytes."""
    folder.mkdir()
    block = text(9, 200_000).encode()
    expected = []
    for number in range(files):
        content = (b"%d " % number + block * 10)[:9_000_000].decode("utf-8", "ignore").encode()
        (folder / f"{number}.txt").write_bytes(content)
        os.utime(folder / f"{number}.txt", (PAST, PAST))
        expected.append(content + b"\n\n")
    return np.frombuffer(b"".join(expected), np.uint8)


def indexes(cache: Path) -> list[Path]:
    return list(cache.glob("tokens/*/*.safetensors"))


@pytest.mark.slow
def test_sigkill_at_any_moment_of_preparing_loses_only_what_was_not_whole(tmp_path: Path) -> None:
    """From outside: as soon as there is a pack more than before the start, and some milliseconds later.

    After 8 packs the process waits, so that it is still there to be killed, however late this one is scheduled.
    """
    expected = long_texts(tmp_path / "texts", files=3)
    cache = tmp_path / "cache"
    packs: dict[Path, int] = {}
    for delay in (0.0, 0.01, 0.05):
        running = subprocess.Popen([sys.executable, "-c", _PREPARED, str(tmp_path), "8"])
        end = time.monotonic() + 60
        while len(indexes(cache)) <= len(packs) and running.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(delay)
        running.kill()
        assert running.wait() == -signal.SIGKILL
        there = {index: index.stat().st_mtime_ns for index in indexes(cache)}
        assert packs.items() <= there.items()
        packs = there
    assert 0 < len(packs) < 27
    subprocess.run([sys.executable, "-c", _PREPARED, str(tmp_path), "0"], check=True)
    assert packs.items() <= {index: index.stat().st_mtime_ns for index in indexes(cache)}.items()
    assert not list(cache.rglob(".fpld-*"))
    tokens = TokenCache(cache, ByteTokenizer()).encode(read_documents(tmp_path / "texts", cache=cache)).tokens
    assert np.array_equal(np.asarray(tokens), expected)


def mounted(*options: str) -> bool:
    command = ["mount", *options]
    return (
        shutil.which("mount") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 6 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if not mounted("-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)):
        pytest.skip("only root may mount a file system")
    yield place
    command = ["umount", str(place)]
    subprocess.run(command, check=True)


def test_a_disk_that_fills_up_while_a_text_is_prepared(
    tiny_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is made larger: what was whole is used, and nothing else was left."""
    monkeypatch.setattr(token_cache, "_PACK_TOKENS", 1_000_000)
    expected = long_texts(tmp_path / "texts", files=1)
    cache = tiny_disk / "cache"
    documents = read_documents(tmp_path / "texts", cache=cache)
    with pytest.raises(StorageError, match="no space left on the disk"):
        TokenCache(cache, ByteTokenizer()).encode(documents)
    assert not list(cache.rglob(".fpld-*"))
    packs = {path: path.stat().st_mtime_ns for path in cache.rglob("*.u8")}
    assert 0 < len(packs) < 9
    assert len(indexes(cache)) == len(packs)
    assert mounted("-o", "remount,size=40m", str(tiny_disk))
    tokens = TokenCache(cache, ByteTokenizer()).encode(documents).tokens
    assert np.array_equal(np.asarray(tokens), expected)
    assert packs.items() <= {path: path.stat().st_mtime_ns for path in cache.rglob("*.u8")}.items()


@pytest.mark.usefixtures("small")
def test_damaged_packs_are_made_again_or_said(folder: Path, tmp_path: Path) -> None:
    documents = read_documents(folder, cache=tmp_path / "cache")
    tokens = TokenCache(tmp_path / "cache", BPE).encode(documents).tokens
    write_arrays(tmp_path / "text.safetensors", text_arrays(tokens), {})
    opened = open_text(tmp_path / "text.safetensors").tokens
    assert np.array_equal(np.asarray(opened), np.asarray(tokens))
    first, *_ = sorted((tmp_path / "cache").rglob("*.u16"))
    first.write_bytes(first.read_bytes()[:-2])
    with pytest.raises(InputError, match="start the run again"):
        open_text(tmp_path / "text.safetensors").tokens[:3]
    again = TokenCache(tmp_path / "cache", BPE).encode(documents).tokens
    assert np.array_equal(np.asarray(again), encoded(documents))
    (whole,) = {path for path in (tmp_path / "cache").rglob("*.u16") if path.stem == "000002"}
    whole.write_bytes(b"\xff" * whole.stat().st_size)
    with pytest.raises(InputError, match="is damaged"):
        np.asarray(again)


@pytest.mark.usefixtures("small")
def test_a_file_that_changes_meanwhile_is_refused(folder: Path, tmp_path: Path) -> None:
    documents = read_documents(folder, cache=tmp_path / "cache")
    (folder / "a.txt").write_text("other words")
    with pytest.raises(InputError, match=r"a\.txt has changed"):
        TokenCache(tmp_path / "cache", BPE).encode(documents)


@pytest.mark.usefixtures("small")
def test_windows_units_and_runs_are_those_of_an_array(folder: Path, tmp_path: Path) -> None:
    documents = read_documents(folder, cache=tmp_path / "cache")
    stream, lengths, _ = TokenCache(tmp_path / "cache", BPE).encode(documents)
    assert is_stream(stream)
    array = np.asarray(stream)
    places = np.random.default_rng(0).integers(len(array), size=(6, 9))
    assert np.array_equal(stream[places], array[places])
    joined = join_tokens([stream, array[:50]])
    places = np.random.default_rng(0).integers(len(array) + 50, size=(6, 9))
    assert np.array_equal(joined[places], np.concatenate([array, array[:50]])[places])
    groups = np.arange(len(lengths)) % 7
    read = cut_text(stream, lengths, groups, 15)
    held = cut_text(array, lengths, groups, 15)
    every = np.arange(len(read.windows))
    assert np.array_equal(read.windows[every], held.windows[every])
    assert np.array_equal(read.starts, held.starts)
    random = np.random.default_rng(1).integers(290, size=(8, 32))
    sequences = np.concatenate([array[500:756].reshape(8, 32), random])
    public = array[2000:2320].reshape(10, 32)
    assert (
        PrivateRuns(stream, public, 6).stand_in(sequences).tolist()
        == PrivateRuns(array, public, 6).stand_in(sequences).tolist()
        == [True] * 8 + [False] * 8
    )


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is looked up in /proc")
def test_a_text_that_is_read_through_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Of a mapped file all 60 MB would be resident in the end; 20 MB are left to the allocator."""
    count = 30_000_000
    path = tmp_path / "000001.u16"
    with path.open("wb") as file:
        file.truncate(2 * count)
    segments = Segments(np.array([0]), np.array([0]), np.array([count]))
    stream = TokenStream([TokenPack(path, "<u2", count)], segments, 256)
    assert len(next(stream.blocks())) < count
    before = resident_bytes()
    random = np.random.default_rng(0)
    for _ in range(400):
        windows = stream[random.integers(count - 33, size=16)[:, None] + np.arange(33)]
        assert windows.shape == (16, 33)
    assert sum(len(block) for block in stream.blocks()) == count
    assert resident_bytes() - before < 20_000_000


def test_many_packs_need_few_file_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "_MAX_OPEN_PACKS", 4)
    packs = []
    for number in range(20):
        path = tmp_path / f"{number}.u8"
        path.write_bytes(bytes(range(number, number + 8)))
        packs.append(TokenPack(path, "|u1", 8))
    segments = Segments(np.arange(20), np.zeros(20, np.int64), np.full(20, 8))
    stream = TokenStream(packs, segments, 256)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    expected = np.concatenate([np.arange(number, number + 8) for number in range(20)])
    assert stream[:].tolist() == expected.tolist()
    assert stream[[3, 3, 3, 2, 100, 101]].tolist() == expected[[3, 3, 3, 2, 100, 101]].tolist()
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after - before <= 4
    os.truncate(packs[0].path, 5)
    with pytest.raises(InputError, match=r"0\.u8, .* must have 8 bytes, not 5"):
        TokenStream(packs, segments, 256)[:]


@pytest.mark.usefixtures("small")
def test_columns_of_documents_are_dealt_as_a_list_of_them(folder: Path, tmp_path: Path) -> None:
    columns = read_documents(folder, cache=tmp_path / "cache")
    assert isinstance(columns, StoredDocuments)
    listed = list(columns)
    assert columns == listed
    assert columns[-1] == listed[-1]
    assert of_label(columns, "ward") == of_label(listed, "ward")
    assert len(of_label(columns, "ward", others=True)) + len(of_label(columns, "ward")) == len(columns)
    for deal in (
        by_label,
        lambda documents: iid(documents, ["a", "b"], seed=1),
        lambda documents: dirichlet(documents, ["a", "b"], alpha=5.0, seed=1),
    ):
        assert deal(columns) == deal(listed)
    for most in (700, 9_000, 60_000):
        assert sample_documents(columns, most, seed=3) == sample_documents(listed, most, seed=3)
    sample = sample_documents(columns, 9_000, seed=3)
    for sides in (hold_out(sample, fraction=0.1, seed=2), hold_out(columns, fraction=0.1, seed=1)):
        for side in sides:
            assert isinstance(side, StoredDocuments)
            tokens = TokenCache(tmp_path / "cache", BPE).encode(side).tokens
            expected = TokenCache(tmp_path / "cache", BPE).encode(list(side)).tokens
            assert np.array_equal(np.asarray(tokens), np.asarray(expected))
    assert sorted(document.name for side in sides for document in side) >= sorted(each.name for each in columns)
    assert np.sort(document_groups(columns)).tolist() == list(range(len(columns)))


@pytest.mark.usefixtures("small")
def test_a_document_takes_less_than_four_hundred_bytes_of_memory(tmp_path: Path) -> None:
    """Objects with names took more than that; measured from 2,000 documents on to 10,000."""
    peaks = []
    for count in (2_000, 10_000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(f'{{"text": "record {number}"}}\n' for number in range(count)))
        tracemalloc.start()
        train, held = hold_out(read_documents(path, cache=tmp_path / "cache"), fraction=0.15, seed=0)
        tokens = TokenCache(tmp_path / "cache", ByteTokenizer()).encode(train)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(tokens.lengths) == len(train) == count - len(held)
    assert (peaks[1] - peaks[0]) / 8_000 < 400


@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()])
def test_pieces_have_the_tokens_of_the_text(tokenizer: BpeTokenizer | ByteTokenizer) -> None:
    whole = text(7, 60_000)
    assert len(whole) > 3 << 16
    (pieces,) = tokenizer.encode_batch([whole])
    assert np.array_equal(pieces, tokenizer.encode(whole))
