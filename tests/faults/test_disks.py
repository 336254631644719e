"""What lies on disk may be damaged, foreign, half-written or another's: it is never used in silence, nor deleted."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import config as configuration
from fpld.cli import main
from fpld.engines.local import LocalEngine
from fpld.engines.pool import Inline
from fpld.errors import InputError
from fpld.federation.prepare import prepare
from fpld.federation.rounds import Federation
from fpld.federation.workers import evaluate_own
from fpld.node.training import read_kept_model
from fpld.storage.arrays import (
    MAX_HEADER_BYTES,
    dump_arrays,
    load_checkpoint,
    previous_file,
    read_arrays,
    read_checkpoint,
    write_arrays,
    write_checkpoint,
)
from fpld.storage.files import remove_half_written, write_atomic
from fpld.storage.run_folder import CHECKPOINT, HELDOUT, NODE_STATE, SEALS, RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ARRAYS: dict[str, np.ndarray[Any, Any]] = {"a": np.arange(40, dtype=np.float32), "b": np.ones(3, np.int64)}
REFINEMENT = '[codec]\nname = "uniform"\nagainst = "own"\n\n[engine]'


def federation(config_file: Path, *, out: str = "run", seed: int = 5) -> tuple[Federation, LocalEngine]:
    text = config_file.read_text().replace("seed = 5", f"seed = {seed}").replace("1.5", "4.0")
    config = configuration.parse_config(text.replace("[engine]", REFINEMENT), "test")
    store = RunFolder(config_file.parent / out)
    prepared = prepare(config, store)
    run = Federation(config, store, prepared, "fpld", pool=Inline())
    return run, LocalEngine(run, prepared.bytes_per_token)


def finished(config_file: Path, out: str) -> dict[str, bytes]:
    run, engine = federation(config_file, out=out)
    while not run.done:
        run.advance(engine)
    return {name: array.tobytes() for name, array in run.state.student.items()}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


@pytest.mark.slow
def test_every_flipped_bit_of_a_state_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_checkpoint(path, ARRAYS, {"round": 3}, run="this")
    arrays, meta = read_checkpoint(path, run="this")
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        flip(path, bit)
        with pytest.raises(InputError):
            read_checkpoint(path, run="this")
        path.write_bytes(good)
    assert meta == {"round": 3}
    assert arrays["a"].tobytes() == ARRAYS["a"].tobytes()


def test_a_state_cut_at_every_offset_and_one_of_another_run(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_checkpoint(path, ARRAYS, {"round": 3}, run="this")
    with pytest.raises(InputError, match=r"is of another run \(this\), this is another"):
        load_checkpoint(path, run="another")
    good = path.read_bytes()
    for end in range(len(good)):
        path.write_bytes(good[:end])
        with pytest.raises(InputError, match="start the run again"):
            load_checkpoint(path, run="this")


def test_the_state_before_is_used_with_a_message_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.safetensors"
    for round in (1, 2):
        write_checkpoint(path, ARRAYS, {"round": round}, run="this")
    flip(path, 8 * (path.stat().st_size - 9))
    with caplog.at_level(logging.WARNING):
        found = load_checkpoint(path, run="this")
    assert found is not None
    assert found[1] == {"round": 1}
    assert "digest does not match" in caplog.text
    assert "continuing from the one before it, state-previous.safetensors" in caplog.text
    write_checkpoint(path, ARRAYS, {"round": 2}, run="this")
    assert read_checkpoint(previous_file(path), run="this")[1] == {"round": 1}


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped in the arrays": lambda path: flip(path, 8 * (path.stat().st_size - 5)),
    "flipped in the header": lambda path: flip(path, 8 * 40),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "file"), [*((damage, CHECKPOINT) for damage in DAMAGE), ("cut", f"nodes/1/{NODE_STATE}")]
)
def test_a_run_goes_on_identically_from_the_file_before(
    damage: str, file: str, config_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With refinement, so that what a node codes against must be what the aggregator has."""
    expected = finished(config_file, "undisturbed")
    run, engine = federation(config_file)
    run.advance(engine)
    run.advance(engine)
    if file != CHECKPOINT:  # the checkpoint before asks for round 2 again, and a node's newest state is of that round
        (run.store.path / CHECKPOINT).unlink()
    DAMAGE[damage](run.store.path / file)
    with caplog.at_level(logging.WARNING):
        assert finished(config_file, "run") == expected
    assert "continuing from the one before it" in caplog.text


@pytest.mark.slow
def test_nodes_that_are_a_round_ahead_send_the_same_frames_again(config_file: Path) -> None:
    """Killed in round 3 after the nodes had answered, and the checkpoint of round 2 is damaged."""
    expected = finished(config_file, "undisturbed")
    run, engine = federation(config_file)
    run.advance(engine)
    run.advance(engine)
    engine.collect(run.open(), run.deliver)
    flip(run.store.path / CHECKPOINT, 8 * 900)
    assert finished(config_file, "run") == expected


def test_the_checkpoint_of_another_run_is_refused(config_file: Path) -> None:
    for out, seed in (("one", 5), ("two", 6)):
        run, engine = federation(config_file, out=out, seed=seed)
        run.advance(engine)
    shutil.copy(config_file.parent / "one/fpld" / CHECKPOINT, config_file.parent / "two/fpld" / CHECKPOINT)
    with pytest.raises(InputError, match=r"is of another run .* start the run again"):
        federation(config_file, out="two", seed=6)


def test_resume_deletes_only_its_own_half_written_files(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    few = config_file.read_text().replace("rounds = 3", "rounds = 1")
    config_file.write_text(few + "\n[baselines]\nmethods = []\n")
    assert main(["run", str(config_file), "--out", str(out)]) == 0
    others = [".env", ".gitignore", ".git/objects/ab/cdef", "fpld/.notes", ".checkpoint.safetensors.x", "inner/.fpld-x"]
    others += [".fpld-notes", "fpld/.fpld-result.json.bak", ".fpld-half-written", "fpld/.fpld-my-notes.half-written.md"]
    half = [
        ".fpld-result.json.ab_c0.half-written",
        "fpld/.fpld-checkpoint.safetensors.q.half-written",
        "fpld/nodes/0/.fpld-state.previous.safetensors.kept.half-written",
    ]
    for name in (*others, *half, "inner/lock"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    (out / ".fpld-link").symlink_to(tmp_path / "elsewhere")
    assert main(["run", str(config_file), "--out", str(out), "--resume"]) == 0
    capsys.readouterr()
    assert all((out / name).read_text() == "mine" for name in others)
    assert not any((out / name).exists() for name in half)
    assert (out / ".fpld-link").is_symlink()


def test_half_written_files_have_the_prefix_that_resume_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def stop(_handle: int) -> None:
        seen.extend(file.name for file in tmp_path.iterdir())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", stop)
    with pytest.raises(Exception, match="no space left on the disk"):
        write_atomic(tmp_path / "a.json", b"{}")
    assert len(seen) == 1
    (tmp_path / seen[0]).touch()
    remove_half_written(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_header_that_no_reader_would_take_is_not_written() -> None:
    with pytest.raises(InputError, match=f"must take at most {MAX_HEADER_BYTES} bytes"):
        dump_arrays({}, {"text": "x" * MAX_HEADER_BYTES})


def test_a_checkpoint_does_not_grow_with_the_rounds(config_file: Path) -> None:
    """The trace is a file of its own: what a node says in errors is not in the checkpoint."""
    run, engine = federation(config_file)
    sizes = []
    for _ in range(2):
        run.advance(engine)
        sizes.append((run.store.path / CHECKPOINT).stat().st_size)
    assert sizes[0] == sizes[1]
    meta = read_checkpoint(run.store.path / CHECKPOINT, run=run.identity)[1]
    assert set(meta) == {"round", "agree", "trace"}  # of the trace its digest
    assert len(json.dumps(meta)) < 200
    assert len(hashlib.sha256(b"").hexdigest()) == len(run.identity)


def test_what_a_run_makes_once_is_sealed(config_file: Path) -> None:
    """One bit of any of it, or the file of a run with another seed, is an error and no other student."""
    run, _ = federation(config_file)
    federation(config_file, out="another", seed=6)
    folder = run.setup.run.path
    names = set(json.loads((folder / SEALS).read_text()))
    texts = {f"private/text/{node}.safetensors" for node in range(3)}
    public = {"tokenizer.json", "public.safetensors", "probe.json", "prepared.json", "base-0.safetensors"}
    assert names == {*texts, *public, "private/heldout.safetensors"}
    for name in sorted(names | {SEALS}):
        good = (folder / name).read_bytes()
        foreign = (folder.parent / "another" / name).read_bytes()
        flipped = good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :]
        for bad in (flipped, foreign, b""):
            if bad != good:  # a tokenizer of bytes is the same in every run
                (folder / name).write_bytes(bad)
                with pytest.raises(InputError, match="damaged"):
                    federation(config_file)
        (folder / name).write_bytes(good)
    federation(config_file)
    (folder / SEALS).unlink()  # as in a start that was cut off before anything was whole: all is made anew
    federation(config_file)
    assert set(json.loads((folder / SEALS).read_text())) == names


def test_another_number_in_the_trace_is_found(config_file: Path) -> None:
    run, engine = federation(config_file)
    line = run.advance(engine)
    path = run.store.path / "trace.jsonl"
    good = path.read_text()
    path.write_text(good.replace(f'"payload_bytes": {line.payload_bytes}', '"payload_bytes": 7'))
    with pytest.raises(InputError, match="it is not the trace of checkpoint"):
        federation(config_file)
    path.write_text(good.replace(f'"heldout_loss": {line.heldout_loss}', '"heldout_loss": 0.5'))
    assert path.read_text() != good
    assert federation(config_file)[0].trace == run.trace  # a mean follows from the rest


def test_a_model_whose_bits_have_changed_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_arrays(path, ARRAYS, {"kind": "ngram"})
    flip(path, 8 * (path.stat().st_size - 60))
    with pytest.raises(InputError, match="is damaged: its digest does not match"):
        read_arrays(path)
    path.write_bytes(dump_arrays(ARRAYS, {"kind": "ngram"}))  # another program's file has no digest
    assert read_arrays(path)[1] == {"kind": "ngram"}


@pytest.mark.slow
def test_with_json_too_a_damaged_state_is_said(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = config_file.parent / "run"
    text = config_file.read_text().replace("rounds = 3", "rounds = 2").replace("steps = 60", "steps = 2")
    config_file.write_text(text + "\n[baselines]\nmethods = []\n")
    command = ["run", str(config_file), "--out", str(out), "--json"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert first.err == ""
    flip(out / "fpld" / CHECKPOINT, 8 * 3000)
    assert main([*command, "--resume"]) == 0
    again = capsys.readouterr()
    assert "continuing from the one before it" in again.err
    assert again.out == first.out


@pytest.mark.parametrize("file", ["nodes/1/own.safetensors", "nodes/1/alone.safetensors", "best.safetensors"])
def test_models_that_are_kept_are_of_this_run(file: str, config_file: Path) -> None:
    """They go into own.json, the ensemble and student-best: another run's would be used in silence."""
    run, engine = federation(config_file)
    other, others = federation(config_file, out="another", seed=6)
    run.advance(engine)
    other.advance(others)
    name = run.identity if file == "best.safetensors" else run.run_id
    assert read_kept_model(run.store.path / file, name)
    shutil.copy(other.store.path / file, run.store.path / file)
    with pytest.raises(InputError, match="is not of this run"):
        read_kept_model(run.store.path / file, name)
    if file != "best.safetensors":
        heldout = [run.setup.run.path / HELDOUT] * len(run.names)
        with pytest.raises(InputError, match="is not of this run"):
            evaluate_own(run.store.path / "nodes", heldout, 16, run.run_id, everywhere=False)
