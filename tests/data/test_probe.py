from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpld.data import ByteTokenizer, ProbeSet
from fpld.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

BYTES = ByteTokenizer()
TEXT = BYTES.encode("".join(chr(33 + i % 90) for i in range(1000)))


def draw(tokens: Any = TEXT, *, contexts: int = 100, length: int = 16, seed: int = 0) -> ProbeSet:
    return ProbeSet.draw(tokens, contexts=contexts, length=length, tokenizer=BYTES, seed=seed)


@given(contexts=st.integers(1, 992), length=st.integers(1, 100), seed=st.integers(0, 99))
def test_whole_windows_of_the_text_without_repetition(contexts: int, length: int, seed: int) -> None:
    text = np.arange(1000) % 256
    if contexts > 1000 // length * length:
        return
    probe = draw(text, contexts=contexts, length=length, seed=seed)
    assert probe.contexts == -(-contexts // length) * length
    assert probe.sequences.dtype == np.int32
    windows = [tuple(row) for row in text[: 1000 // length * length].reshape(-1, length).tolist()]
    positions = []
    start = 0
    for row in probe.sequences.tolist():  # in text order, each window used at most once
        start = windows.index(tuple(row), start) + 1
        positions.append(start)
    assert positions == sorted(set(positions))


@given(row=st.integers(0, 6), column=st.integers(0, 15), value=st.integers(0, 255))
def test_any_other_token_gives_another_digest(row: int, column: int, value: int) -> None:
    probe = draw()
    other = probe.sequences.copy()
    other[row, column] = value
    changed = ProbeSet(other, probe.vocab, probe.tokenizer).digest != probe.digest
    assert changed == (value != probe.sequences[row, column])


def test_shape_vocabulary_and_tokenizer_are_in_the_digest() -> None:
    probe = draw(contexts=96)
    others = [
        ProbeSet(probe.sequences.reshape(3, 32), 256, probe.tokenizer),
        ProbeSet(probe.sequences, 257, probe.tokenizer),
        ProbeSet(probe.sequences, 256, hashlib.sha256(b"other").hexdigest()),
    ]
    assert len({probe.digest, *(other.digest for other in others)}) == 4


def test_golden_digest_does_not_depend_on_memory_layout() -> None:
    sequences: Any = np.arange(12).reshape(3, 4)
    golden = "f91803716f13e1b24ec369892171292f13130c11f333cd5587e6a59a8031e561"
    for layout in (
        sequences,
        np.asfortranarray(sequences),
        sequences.astype(">i8"),
        sequences.astype(np.uint8),
    ):
        assert ProbeSet(layout, 256, BYTES.digest).digest == golden


def test_seed_decides_and_the_same_seed_repeats() -> None:
    assert draw(seed=1).digest == draw(seed=1).digest != draw(seed=2).digest


def test_a_probe_set_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        draw().sequences[0, 0] = 1


def test_a_saved_probe_set_is_the_same(tmp_path: Path) -> None:
    probe = draw()
    probe.save(tmp_path / "probe.json")
    loaded = ProbeSet.load(tmp_path / "probe.json")
    assert loaded.digest == probe.digest
    assert np.array_equal(loaded.sequences, probe.sequences)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": [[1, 2], [3]]}, "not a whole probe set"),
        ({"sequences": [[1.5]]}, "must be integers"),
        ({"sequences": [[2**70]]}, "not a whole probe set"),
        ({"sequences": [[999]]}, r"0\.\.255, got 999"),
        ({"sequences": []}, "not a whole probe set"),
        ({"sequences": [[1, 2]]}, "damaged: its digest must be"),
        ({"tokenizer": 3}, "SHA-256"),
        ({"vocab": None}, "not a whole probe set"),
        ({"vocab": 0}, r"vocab must lie in 1\.\.2\^31, got 0"),
        ({"format": "x"}, "format 'fpld-probe-1', got 'x'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "probe.json"
    draw().save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=rf"probe\.json.*{message}"):
        ProbeSet.load(file)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw(length=1001), "has 1000 tokens, fewer than one sequence of 1001"),
        (lambda: draw(contexts=993), "contexts=993 is more than the public text offers: 992 contexts in 62"),
        (lambda: draw(contexts=0), "at least 1, got 0 and 16"),
        (lambda: draw(np.array([256] * 99)), r"0\.\.255, got 256"),
        (lambda: draw(TEXT.reshape(10, 100)), r"one stream \[N\], got shape \(10, 100\)"),
        (lambda: ProbeSet(TEXT, 256, BYTES.digest), r"non-empty array \[S, T\]"),
        (lambda: ProbeSet(TEXT[None], 256, "abc"), "64 hexadecimal digits, got 'abc'"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=message):
        call()
