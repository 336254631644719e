"""Typed errors for whatever a person or a disk hands in: never a traceback, never after an hour of training."""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from fpld import config as configuration
from fpld.budget.policy import Budget
from fpld.cli import main
from fpld.cli.output import Output
from fpld.console import LogLines
from fpld.engines.pool import make_pool
from fpld.errors import InputError, ResourceError, StorageError
from fpld.federation.state import _read_trace
from fpld.protocol import Settings
from fpld.protocol.spool import Spool
from fpld.report.page import run_section, template_environment
from fpld.report.run import read_run_data
from fpld.storage.arrays import parse_arrays
from fpld.storage.run_folder import TRACE, RunFolder
from fpld.students import load
from fpld.web.state import RunIndex
from tests.fuzz.files import LINE, folders_of
from tests.helpers import make_plan
from tests.tiny_llama import make_llama

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


@pytest.mark.parametrize(
    "text",
    ["a=" + "[" * 100_000, "a=" + "9" * 5000, "a=" + "{a=" * 20_000, "\x00", "a=0x", ".".join("a" * 50_000) + " = 1"],
)
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


def check_rows(capsys: pytest.CaptureFixture[str], text: str, folder: Path) -> dict[str, str]:
    """Return what `fpld check` says of a configuration that is wrong, by key."""
    (folder / "wrong.toml").write_text(text)
    assert main(["check", str(folder / "wrong.toml"), "--json"]) == 2
    return {row["key"]: row["says"] for row in json.loads(capsys.readouterr().out)["rows"]}


def test_of_very_many_problems_the_first_are_named(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config_file.read_text() + "".join(f"\n[t{number}]" for number in range(50_000))
    rows = check_rows(capsys, text, tmp_path)
    assert rows["t99"] == "unknown key"
    assert "49,900 more" in rows["and"]
    assert main(["run", str(tmp_path / "wrong.toml"), "--out", str(tmp_path / "run")]) == 2
    assert len(capsys.readouterr().err) < 20_000


@pytest.mark.parametrize("number", [65_537, 10**9, 10**400])
def test_sizes_that_no_machine_has_are_refused(
    number: int, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config_file.read_text()
    assert (
        "at most 65536"
        in check_rows(capsys, text.replace("batch = 128", f"batch = {number}"), tmp_path)["student.batch"]
    )
    rows = check_rows(capsys, text.replace("workers = 0", f"workers = {number}"), tmp_path)
    assert "1024" in rows["engine.workers"]


def test_a_device_is_no_text(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config_file.read_text().replace('"north"', '"north"\ndata = "/dev/zero"')
    assert "is a device" in check_rows(capsys, text, tmp_path)["nodes[0].data"]
    with pytest.raises(InputError, match="is a device"):
        configuration.read_config("/dev/zero")


def test_a_trace_of_nested_braces_is_damaged(tmp_path: Path) -> None:
    (tmp_path / TRACE).write_text('{"a":' * 50_000)
    with pytest.raises(InputError, match="is damaged"):
        _read_trace(RunFolder(tmp_path), 1)


@pytest.mark.parametrize("kill", [True, False])
def test_a_lost_worker_is_said(kill: bool) -> None:
    with make_pool(1) as pool:
        lost = (
            pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL) if kill else pool.submit(os._exit, 3)
        )
        with pytest.raises(ResourceError, match="worker process"):
            lost.result()
        with pytest.raises(ResourceError, match="worker process"):
            pool.submit(os.getpid)


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(12, "no"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")]
)
def test_a_command_without_memory_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("fpld.api.check", no_memory)
    assert main(["check", "demo"]) == 2
    assert capsys.readouterr().err.startswith("fpld check: error: memory ran out: ")


def test_a_run_without_address_space_says_so(config_file: Path, tmp_path: Path) -> None:
    """As under `ulimit -v`: a model of 512 MB, and about 1 GB in all."""
    text = config_file.read_text().replace("order = 2", "order = 1").replace("buckets = 256", "buckets = 500_000")
    config_file.write_text(text)
    command = [sys.executable, "-m", "fpld", "run", str(config_file), "--out", str(tmp_path / "run")]
    limits = (1 << 30, 1 << 30)
    stopped = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # whatever the machine: each takes some
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits),
    )
    assert stopped.returncode == 2
    assert "memory ran out" in stopped.stderr
    assert "Traceback" not in stopped.stderr


@pytest.mark.parametrize("content", ["{}", "no JSON", '{"model": 3}', "[" * 50_000])
def test_a_model_with_a_bad_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from fpld.students.pretrained import model_tokenizer

    make_llama(tmp_path, 270, text="some words to merge " * 9)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match="tokenizer"):
        model_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../model.safetensors", "a/b.safetensors", 3])
def test_an_index_names_safetensors_beside_it_alone(name: object, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from fpld.students.pretrained import load_model

    make_llama(tmp_path / "model", 270)
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"must name \*\.safetensors files beside it"):
        load_model(tmp_path / "model")
    (tmp_path / "model/adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(InputError, match="is an adapter of another"):
        load_model(tmp_path / "model")


HOSTILE = "a\x1b[2J\u202eb"


def test_keys_and_values_reach_a_terminal_without_escape_sequences_and_cut(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hostile.toml"
    quoted = '"a\\u001b[2J\\u202eb[/bold]'
    long = "x" * 5_000_000
    for tail in (f'\n[{quoted}"]', f'\n[{quoted}{long}"]', f'\n[combine]\nrule = {quoted}{long}"'):
        file.write_text(config_file.read_text() + tail)
        for command in (["run", str(file), "--out", str(tmp_path / "out")], ["check", str(file)]):
            assert main(command) == 2
            printed = "".join(capsys.readouterr())
            assert "[2J" in printed or tail.endswith('x"')
            assert not {"\x1b", "\u202e"} & set(printed)
            assert len(printed) < 20_000


def test_texts_reach_a_terminal_without_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(json=False)
    output.note(f"{HOSTILE}\nnext line, a\u200cb")
    output.table([{"name": f"{HOSTILE}[/bold]", "number": 1.5}], title=f"{HOSTILE}[/bold]")
    console = Console(file=io.StringIO())
    LogLines(console).emit(logging.makeLogRecord({"msg": HOSTILE}))
    assert isinstance(console.file, io.StringIO)
    printed = capsys.readouterr().out + console.file.getvalue()
    assert printed.count("a\ufffd[2J\ufffdb") == 4
    assert "\nnext line, a\u200cb" in printed
    assert not {"\x1b", "\u202e"} & set(printed)


def test_texts_reach_a_page_without_marks_that_turn_them() -> None:
    template = template_environment().get_template("message.html.j2")
    page = template.render(name=HOSTILE, message=f"<b>{HOSTILE}")
    assert page.count("a\ufffd[2J\ufffdb") == 2
    assert "&lt;b&gt;" in page
    assert not {"\x1b", "\u202e"} & set(page)


def test_what_a_student_writes_reaches_no_terminal_and_no_page_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `fpld generate`, the report and the data of the live page: escape sequences, marks that turn text, tags."""
    folder = folders_of(tmp_path) / "one"
    sample = {"prompt": HOSTILE, "text": f"<script>{HOSTILE}</script>"}
    (folder / TRACE).write_text(json.dumps(LINE | {"continuations": [sample]}) + "\n")
    page = run_section(read_run_data(folder), "run")
    assert "&lt;script&gt;" in page
    assert "<script>a" not in page
    live = json.dumps(RunIndex(folder.parent).run("one"), ensure_ascii=False)
    for shown in (page, live):
        assert "a\ufffd[2J\ufffdb" in shown
        assert not {"\x1b", "\u202e"} & set(shown)
        assert "\\u001b" not in shown


def test_generated_text_reaches_a_terminal_without_escape_sequences(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config_file.read_text().replace("rounds = 3", "rounds = 1").replace("steps = 60", "steps = 2")
    config_file.write_text(text + "\n[baselines]\nmethods = []\n")
    assert main(["run", str(config_file), "--out", str(tmp_path / "run")]) == 0
    file = tmp_path / "run/student.safetensors"
    student = load(file)
    # All that this model writes is ESC: its bias says so.
    state = {name: np.zeros_like(array) for name, array in student.state().items()}
    state["bias"][0x1B] = 50.0
    student.load_state(state)
    student.save(file)
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "run"), "--prompt", HOSTILE, "--tokens", "8"]) == 0
    printed = "".join(capsys.readouterr())
    assert printed.count("\ufffd") >= 9
    assert not {"\x1b", "\u202e"} & set(printed)
