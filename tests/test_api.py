"""The front door: what `fpld.run` gives back, what it refuses, what an interrupt leaves, and what the rest reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fpld
from fpld.config import presets
from fpld.console import show_log
from fpld.federation.preflight import refuse
from fpld.planner import PlanInputs
from fpld.storage.run_folder import RunFolder
from tests.federation.conftest import CONFIG, config_file, write_texts

__all__ = ["config_file"]

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"run.rounds": 2, "baselines.methods": []}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fpld.Run:
    """A small federation, run once."""
    folder = tmp_path_factory.mktemp("front")
    write_texts(folder)
    (folder / "mine.toml").write_text(CONFIG.format(folder=folder))
    return fpld.run(folder / "mine.toml", out=folder / "run", seed=3, overrides=SMALL)


def test_a_run_has_typed_records_of_its_rounds_and_its_table(finished: fpld.Run) -> None:
    assert finished.state == "done"
    assert [record.round for record in finished.rounds] == [1, 2]
    assert all(isinstance(record, fpld.RoundRecord) for record in finished.rounds)
    assert finished.loss == finished.rounds[-1].heldout_loss
    assert finished.table[-1].method == "fpld"
    assert finished.table[-1].heldout_loss == finished.loss
    assert finished.table[-1].uplink_bytes == sum(record.sent for record in finished.rounds)
    assert "2 of 2 rounds" in repr(finished)


def test_seed_and_overrides_are_in_the_configuration_of_the_run(finished: fpld.Run) -> None:
    assert finished.config.run.seed == 3
    assert finished.config.run.rounds == 2
    assert finished.config.baselines.methods == []


def test_read_run_gives_the_same_run(finished: fpld.Run) -> None:
    again = fpld.read_run(str(finished.folder))
    assert again.rounds == finished.rounds
    assert again.table == finished.table


def test_a_run_gives_its_models(finished: fpld.Run, tmp_path: Path) -> None:
    tokens = finished.tokenizer.encode("snow and ice")
    assert finished.student("best").logits(tokens[None]).shape == (12, 256)
    text = finished.generate("snow ", tokens=8, seed=4)
    assert len(text) == 8
    assert text == finished.generate("snow ", tokens=8, seed=4)
    (tmp_path / "text.txt").write_text("rain river the of and tree " * 20)
    losses = {each.model: each.loss for each in finished.evaluate(tmp_path / "text.txt")}
    assert set(losses) == {"student", "best", "base"}
    held_out = {each.model: each.loss for each in finished.evaluate()}
    assert held_out["student"] == pytest.approx(finished.loss)
    with pytest.raises(fpld.InputError, match="'own'"):
        finished.student("own")


def test_a_run_is_exported(finished: fpld.Run, tmp_path: Path) -> None:
    assert {file.name for file in finished.export(tmp_path / "tables", "csv")} >= {"rounds.csv", "nodes.csv"}
    with pytest.raises(fpld.InputError, match="'xml'"):
        finished.export(tmp_path, "xml")
    with pytest.raises(fpld.InputError):  # an n-gram model has no form that other libraries read
        finished.export(tmp_path / "model")


def test_tables_are_frames_where_pandas_is_installed(finished: fpld.Run) -> None:
    pandas = pytest.importorskip("pandas")
    rounds = finished.frame()
    assert isinstance(rounds, pandas.DataFrame)
    assert rounds["heldout_loss"].tolist() == [record.heldout_loss for record in finished.rounds]
    assert len(finished.frame("nodes")) == 6
    assert finished.frame("results")["method"].tolist() == [row.method for row in finished.table]
    with pytest.raises(fpld.InputError, match="'rows'"):
        finished.frame("rows")


def test_without_pandas_a_frame_names_the_package(finished: fpld.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fpld.MissingExtraError, match="pip install pandas"):
        finished.frame("rounds")


def test_a_configuration_may_be_given_itself(finished: fpld.Run, tmp_path: Path) -> None:
    """The same configuration and seed give the same rounds, whatever they were read from."""
    run = fpld.run(finished.config, out=tmp_path / "run")
    assert [record.heldout_loss for record in run.rounds] == [record.heldout_loss for record in finished.rounds]


@pytest.mark.parametrize("name", presets())
def test_to_toml_writes_what_load_config_reads(name: str, tmp_path: Path) -> None:
    config = fpld.load_config(name)
    file = tmp_path / "copy.toml"
    file.write_text(config.to_toml())
    assert fpld.load_config(file) == config


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"local.stepz": 3}, "local.stepz"),
        ({"locl.steps": 3}, "locl"),
        ({"local.steps": "many"}, "local.steps"),
        ({"local.steps": 0}, "local.steps"),
        ({"local.steps": None}, "local.steps"),
        ({"local.steps": object()}, "local.steps"),
        ({"nodes[9].bits": 2.0}, "nodes[9].bits"),
        ({"run.seed.more": 2}, "run.seed.more"),
        ({"run.quorum": 9}, "run.quorum"),
    ],
)
def test_an_override_that_is_wrong_names_its_key(overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(fpld.InputError) as caught:
        fpld.load_config("tiny", overrides=overrides)
    assert key in str(caught.value)


def test_overrides_reach_keys_tables_and_nodes() -> None:
    changes = {
        "nodes[1].context_bits": 9.0,
        "tokenizer": {"kind": "bpe", "vocab": 300},
        "budget.deadline": 5,
        "base": None,
        "run.out": Path("elsewhere"),
    }
    config = fpld.load_config("tiny", overrides=changes)
    assert [node.context_bits for node in config.nodes] == [60.0, 9.0]
    assert config.tokenizer.vocab == 300
    assert config.budget.deadline == 5.0
    assert config.base is None
    assert config.run.out == "elsewhere"


def test_a_seed_must_be_one() -> None:
    with pytest.raises(fpld.InputError, match="seed"):
        fpld.load_config("tiny", seed=-1)


def test_check_lists_every_problem_and_what_a_run_takes(config_file: Path) -> None:
    assert not any(finding.wrong for finding in fpld.check(config_file))
    assert {finding.key for finding in fpld.check(config_file)} >= {"run.out", "engine.workers"}
    changes = {"run.rounds": 0, "nodes[0].name": "west", "local.rounds": 1}
    wrong = {finding.key for finding in fpld.check(config_file, overrides=changes) if finding.wrong}
    assert {"run.rounds", "nodes[0].name", "local.rounds"} <= wrong
    config = fpld.load_config(config_file)
    assert not any(finding.wrong for finding in fpld.check(config))


def test_plan_reads_configurations_runs_and_inputs(finished: fpld.Run) -> None:
    from_preset = fpld.plan("hospitals", total=120.0)
    assert from_preset.bits.sum() == pytest.approx(120.0)
    assert fpld.plan(fpld.load_config("hospitals"), total=120.0).bits.tolist() == from_preset.bits.tolist()
    assert isinstance(from_preset.inputs, PlanInputs)
    assert fpld.plan(from_preset.inputs, total=120.0).bits.tolist() == from_preset.bits.tolist()
    assert len(fpld.plan(finished.folder).bytes_sent) == 3
    sooner = fpld.plan("hospitals", overrides={"budget.deadline": 6.0})
    assert sooner.inputs.deadline == 6.0


def test_a_configuration_that_is_wrong_leaves_no_folder(config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(fpld.InputError, match="nodes"):
        fpld.run(config_file, out=tmp_path / "run", overrides={"nodes[0].name": "west"})
    assert not (tmp_path / "run").exists()


def test_a_start_that_is_refused_leaves_the_folder_of_the_run_that_works(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts share a folder that was not there when they began: the other makes it during this one's checks."""
    folder = RunFolder(tmp_path / "run")
    with ExitStack() as other:

        def refuse_beside_another_start(*arguments: Any, **keywords: Any) -> None:
            refuse(*arguments, **keywords)
            other.enter_context(folder.lock())
            folder.write("config.toml", b"the other's")

        monkeypatch.setattr("fpld.federation.preflight.refuse", refuse_beside_another_start)
        with pytest.raises(fpld.InputError, match="in use by another run"):
            fpld.run(config_file, out=folder.path, overrides=SMALL)
        assert (folder.path / "config.toml").read_bytes() == b"the other's"


def test_a_failed_start_removes_only_a_folder_that_it_made(config_file: Path, tmp_path: Path) -> None:
    wrong = {"tokenizer.kind": "bpe", "tokenizer.vocab": 60000}
    for made_before in (False, True):
        with pytest.raises(fpld.InputError, match="merges"):
            fpld.run(config_file, out=tmp_path / "run", overrides=SMALL | wrong)
        assert (tmp_path / "run").exists() == made_before
        assert not list(tmp_path.glob(".*"))
        (tmp_path / "run").mkdir(exist_ok=True)


def test_a_folder_that_holds_a_run_is_not_overwritten(finished: fpld.Run) -> None:
    before = (finished.folder / "result.json").read_bytes()
    with pytest.raises(fpld.InputError, match="holds a run"):
        fpld.run(finished.config, out=finished.folder)
    assert (finished.folder / "result.json").read_bytes() == before


def test_without_a_folder_a_free_one_is_taken(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/run").mkdir(parents=True)
    run = fpld.run(config_file, overrides={"run.rounds": 1, "baselines.methods": []})
    assert run.folder == Path("runs/run-2")


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(fpld.InputError, match="no run"):
        fpld.resume(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_leaves_a_run_that_resumes_to_the_same_result(
    workers: int, config_file: Path, tmp_path: Path
) -> None:
    """A real SIGINT in the middle of a round, as Ctrl-C or a notebook's stop button sends it."""
    overrides = {**SMALL, "run.rounds": 3, "local.steps": 400, "engine.workers": workers}
    whole = fpld.run(config_file, out=tmp_path / "whole", overrides=overrides | {"engine.workers": 0})
    out = tmp_path / "cut"
    script = tmp_path / "script.py"
    script.write_text(
        f"import fpld\nif __name__ == '__main__':\n    fpld.run({str(config_file)!r}, out={str(out)!r}, "
        f"overrides={overrides!r})\n"
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    trace = out / "fpld/trace.jsonl"
    deadline = time.monotonic() + 120
    while not (trace.exists() and trace.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown = process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGINT, shown
    assert f"fpld.resume({str(out)!r})" in shown
    cut = fpld.read_run(out)
    assert cut.state == "stopped"
    assert 1 <= len(cut.rounds) < 3
    resumed = fpld.resume(out)
    assert resumed.state == "done"
    assert [record.heldout_loss for record in resumed.rounds] == [record.heldout_loss for record in whole.rounds]
    assert (out / "student.safetensors").read_bytes() == (tmp_path / "whole/student.safetensors").read_bytes()


def progress_of(config_file: Path, progress: bool | None, capsys: pytest.CaptureFixture[str]) -> str:
    out = config_file.parent / f"run-{progress}"
    fpld.run(config_file, out=out, overrides={"run.rounds": 1, "baselines.methods": []}, progress=progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_progress_is_lines_if_asked_for_and_nothing_by_default_where_there_is_no_terminal(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress_of(config_file, None, capsys) == ""
    assert progress_of(config_file, False, capsys) == ""
    assert "round 1" in progress_of(config_file, True, capsys)


NOTEBOOK = """
import builtins, logging, sys

class ZMQInteractiveShell:
    pass

builtins.get_ipython = ZMQInteractiveShell
from fpld.console import show_log

with show_log():
    logging.getLogger("fpld.test").debug("", extra={"done": 2, "total": 5})
    logging.getLogger("fpld.test").info("round 1: distilling")
    logging.getLogger("fpld.test").warning("a node was late")
"""


def test_a_notebook_shows_a_bar_of_one_line_without_widgets() -> None:
    """A notebook's shell is known by its name; what it gets is text that overwrites itself after a carriage return."""
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "a node was late" in done.stderr
    assert "2/5" in done.stderr
    assert "ipywidgets" not in done.stderr
    assert "\x1b[1A" not in done.stderr  # no move of the cursor to a line above: notebooks have none


def test_nothing_is_shown_if_nothing_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with show_log(progress=False):
        pass
    assert capsys.readouterr() == ("", "")


def test_the_command_prints_the_table_of_the_run(
    finished: fpld.Run, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fpld.cli import main

    assert main(["run", str(config_file), "--out", str(tmp_path / "run"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    run = fpld.read_run(tmp_path / "run")
    assert [row["method"] for row in rows] == [result.method for result in run.table]
    assert [row["heldout_loss"] for row in rows] == [result.heldout_loss for result in run.table]
