"""The checkpoint is the state, the trace stands beside it: what is read back, and what a crash between them leaves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import config as configuration
from fpld.config.sections import RunSection
from fpld.engines.local import LocalEngine
from fpld.engines.pool import Inline
from fpld.errors import InputError
from fpld.federation import state
from fpld.federation.prepare import prepare
from fpld.federation.record import RoundRecord
from fpld.federation.rounds import Federation
from fpld.federation.state import State, asked_nodes, commit, recall
from fpld.protocol.aggregator import AggregatorState
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import CHECKPOINT, TRACE, RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.types import Arrays

VARIANTS = {
    "weights": "",
    "refinement": '[codec]\nname = "uniform"\nagainst = "own"\n\n',
    "logits": '[combine]\nbroadcast = "logits"\n\n[baselines]\nmethods = []\n\n',
}


def made(round: int, target: bool = True) -> State:
    student: Arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.full(2, round, np.int64)}
    logits = np.ones((3, 4), np.float32) if target else None
    return State(student, AggregatorState({"moments": np.array([1.5, 2.5])}, {"round": round, "agree": True}), logits)


def records(count: int) -> list[RoundRecord]:
    return [RoundRecord(t, ["north"], [1.0], [1.0], 9, 1, kl=t / 7) for t in range(1, count + 1)]


def lines(count: int) -> list[dict[str, Any]]:
    return [record.to_json() for record in records(count)]


@pytest.mark.parametrize("target", [True, False])
def test_what_is_committed_is_recalled(target: bool, tmp_path: Path) -> None:
    store = RunFolder(tmp_path)
    assert recall(store, run="run") is None
    committed = made(2, target)
    commit(store, committed, records(2), run="run")
    found = recall(store, run="run")
    assert found is not None
    again, trace, pending = found
    assert (again.round, again.aggregator.meta, trace) == (2, committed.aggregator.meta, records(2))
    assert pending is None
    assert again.student.keys() == committed.student.keys()
    for name, value in committed.student.items():
        assert np.array_equal(again.student[name], value)
        assert again.student[name].dtype == value.dtype
    assert again.aggregator.arrays.keys() == {"moments"}
    assert (again.target is not None) is target


def test_every_node_is_asked_equally_often() -> None:
    """A twentieth of 40 nodes over 2000 rounds: each 100 +- 9.7 times. False alarms at five sigma: below 40 * 6e-7."""
    run = RunSection(fraction=0.05, seed=7)
    counts = np.bincount([node for round in range(2000) for node in asked_nodes(run, 40, round)], minlength=40)
    assert counts.sum() == 2000 * 2
    assert np.abs(counts - 100).max() < 5 * 9.75
    assert asked_nodes(RunSection(), 3, 1) == [0, 1, 2]
    assert asked_nodes(RunSection(fraction=1e-9), 3, 1) in ([0], [1], [2])


def test_lines_of_rounds_that_never_ended_are_dropped(tmp_path: Path) -> None:
    store = RunFolder(tmp_path)
    commit(store, made(1), records(1), run="run")
    store.write(TRACE, "".join(json.dumps(line) + "\n" for line in lines(2)).encode())
    found = recall(store, run="run")
    assert found is not None
    assert found.trace == records(1)
    assert len((tmp_path / TRACE).read_text().splitlines()) == 1  # whoever looks on does not see it either


def test_a_round_that_is_still_to_be_evaluated_is_recalled_as_such(tmp_path: Path) -> None:
    """Its line is in the checkpoint, whatever became of the one in the trace since; those before it are checked."""
    store = RunFolder(tmp_path)
    commit(store, made(2), records(2), run="run", pending=True)
    filled = [*lines(1), {**lines(2)[1], "heldout_loss": 9.0}, {"round": 3}]
    store.write(TRACE, "".join(json.dumps(line) + "\n" for line in filled).encode())
    found = recall(store, run="run")
    assert found is not None
    state, trace, pending = found
    assert (state.round, trace, pending) == (2, records(1), records(2)[1])
    shown = [json.loads(line) for line in (tmp_path / TRACE).read_text().splitlines()]
    assert shown == lines(2)
    store.write(TRACE, (json.dumps({**lines(1)[0], "kl": 5.0}) + "\n").encode())
    with pytest.raises(InputError, match="is damaged"):
        recall(store, run="run")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must have a line for each of rounds 1 to 2"),
        ('{"round": 2}\n', "must have a line for each of rounds 1 to 2"),
        ('{"round": 1}\n{"round"', "is damaged"),
        ('{"kl": 1}\n', "is damaged"),
        ("[1]\n[2]\n", "is damaged"),
    ],
)
def test_a_trace_that_does_not_fit_its_checkpoint_is_an_error(content: str, message: str, tmp_path: Path) -> None:
    store = RunFolder(tmp_path)
    commit(store, made(2), records(2), run="run")
    store.write(TRACE, content.encode())
    with pytest.raises(InputError, match=rf"trace\.jsonl {message}.*start the run again"):
        recall(store, run="run")


def federation(config_file: Path, variant: str, name: str) -> tuple[Federation, LocalEngine]:
    text = config_file.read_text().replace("[engine]", f"{VARIANTS[variant]}[engine]").replace("1.5", "4.0")
    config = configuration.parse_config(text, "test")
    store = RunFolder(config_file.parent / "run")
    prepared = prepare(config, store)
    made = Federation(config, store, prepared, name, pool=Inline())
    return made, LocalEngine(made, prepared.bytes_per_token)


def timeless(run: Federation) -> list[dict[str, Any]]:
    return [{**record.to_json(), "seconds": None} for record in run.trace]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] * (name != "refinement")) for name in VARIANTS]
)
def test_a_crash_between_trace_and_checkpoint(variant: str, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 2 is in the trace and has no checkpoint: it is made again, and the end is that of an undisturbed run."""
    undisturbed, engine = federation(config_file, variant, "undisturbed")
    while not undisturbed.done:
        undisturbed.advance(engine)
    broken, engine = federation(config_file, variant, "broken")
    broken.advance(engine)

    def crash(*_arguments: Any, **_named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state, "write_checkpoint", crash)
        with pytest.raises(KeyboardInterrupt):
            broken.advance(engine)
    assert len((broken.store.path / TRACE).read_text().splitlines()) == 2
    resumed, engine = federation(config_file, variant, "broken")
    assert (resumed.state.round, len(resumed.trace)) == (1, 1)
    while not resumed.done:
        resumed.advance(engine)
    assert timeless(resumed) == timeless(undisturbed)
    for name, value in undisturbed.state.student.items():
        assert np.array_equal(resumed.state.student[name], value)
    files = [(run.store.path / CHECKPOINT) for run in (resumed, undisturbed)]
    arrays, others = (read_arrays(file)[0] for file in files)
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in others.items()
    }
    assert b'"seconds"' not in files[0].read_bytes()  # nothing of the trace is in the state
