"""Typed errors for whatever a person or a disk hands in: never a traceback, never after an hour of training."""

from __future__ import annotations

import json
import struct
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import config as configuration
from fpld.budget.policy import Budget
from fpld.cli import main
from fpld.errors import InputError, StorageError
from fpld.protocol import Settings
from fpld.protocol.spool import Spool
from fpld.storage.arrays import parse_arrays
from tests.helpers import make_plan

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [0], "data_offsets": []},
        {"dtype": "F32", "shape": [], "data_offsets": [0]},
        {"dtype": 5, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        [],
        None,
    ],
)
def test_array_headers_that_are_not_sound(entry: Any) -> None:
    head = json.dumps({"a": entry}).encode()
    with pytest.raises(InputError, match="must be a whole safetensors file"):
        parse_arrays(struct.pack("<Q", len(head)) + head + bytes(4), "file")


@pytest.mark.parametrize("text", ["a=" + "[" * 100_000, "a=" + "9" * 5000, "a=" + "{a=" * 20_000, "\x00", "a=0x"])
def test_toml_that_no_parser_likes(text: str) -> None:
    with pytest.raises(InputError):
        configuration.parse_config(text, "file")


def test_a_budget_beyond_reason_allocates_nothing() -> None:
    for bits in (1e8, 1e15, 1e300):
        with pytest.raises(InputError, match="bits must be at most 1024 for each of 50 tokens"):
            make_plan(bits=bits)


def settings(**changes: Any) -> Settings:
    caps = np.full(2, 100.0)
    fixed: dict[str, Any] = {"run_key": bytes(16), "probe": bytes(32), "contexts": 4, "vocab": 50, "rounds": 1}
    budget = Budget(caps=caps, floors=np.zeros(2), vocab=50)
    return Settings(names=["a", "b"], budget=budget, clips=[None] * 2, **{**fixed, "quorum": 2, **changes})


def test_rules_and_codecs_that_cannot_work_are_found_before_a_round() -> None:
    with pytest.raises(InputError, match="rule must be one of"):
        settings(rule="wish")
    with pytest.raises(InputError, match="codec must be one of"):
        settings(codec="wish")
    with pytest.raises(InputError, match=r"rule .trimmed. needs at least 3 nodes in every round: quorum"):
        settings(rule="trimmed")
    assert settings(rule="median").rule == "median"


def test_a_full_disk_under_the_spool_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, **_named: Any) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with pytest.raises(StorageError, match="no space left on the disk; what was written before is intact"):
        Spool(limit=0).put(0, b"frame")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("prepared.json", b"{}", "is damaged, or not the file of this run"),
        ("prepared.json", b"[", "is damaged"),
        ("prepared.json", b"[" * 100_000, "is damaged"),
        ("config.toml", b"\xff\xfe", "must be UTF-8"),
        ("public.safetensors", b"", "is damaged, or not the file of this run"),
        ("probe.json", b"{}", "is damaged, or not the file of this run"),
        ("base-0.safetensors", b"", "is damaged, or not the file of this run"),
        ("private/text/1.safetensors", b"", "is damaged, or not the file of this run"),
        ("seals.json", b"", "is damaged"),
        ("seals.json", b"[]", "is damaged"),
        ("fpld/trace.jsonl", b"", "must have a line for each"),
    ],
)
def test_a_damaged_run_is_resumed_or_refused_in_one_line(
    file: str, content: bytes, message: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    text = config_file.read_text().replace("rounds = 3", "rounds = 1").replace("steps = 60", "steps = 2")
    config_file.write_text(text + "\n[baselines]\nmethods = []\n")
    assert main(["run", str(config_file), "--out", str(out)]) == 0
    (out / file).write_bytes(content)
    capsys.readouterr()
    assert main(["run", str(config_file), "--out", str(out), "--resume"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
