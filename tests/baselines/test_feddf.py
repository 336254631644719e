"""FedDF: rows with measured bytes, a student that is the mixture's, and text that the models themselves write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pydantic import ValidationError

from fpld import config as configuration
from fpld import students
from fpld.baselines import baseline_jobs, baseline_work, feddf
from fpld.codecs.updates import decode_update, encode_update, update_bytes
from fpld.config.sections import BaselinesSection
from fpld.engines.local import run_local
from fpld.errors import InputError
from fpld.node.training import average
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.seeds import derive_seed
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import HELDOUT, OWN_MODEL, PREPARED, PUBLIC, RunFolder
from fpld.students.generate import write_sequences
from fpld.students.heldout import heldout_losses
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]

METHODS = '["pooled", "pooled-all", "feddf", "feddf-kbit", "feddf-written"]'
SECTION = f"""
[baselines]
methods = {METHODS}
feddf_steps = [20, 80]
update_bits = [3, 32]
"""
LENGTH = 16
NODES = 3


def parsed(file: Path, section: str, rounds: int = 1) -> configuration.Config:
    text = file.read_text().replace("rounds = 3", f"rounds = {rounds}")
    return configuration.parse_config(text + section, "test")


def rebuilt(models: list[students.Student], start: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Send the models' updates in 3 bits per weight."""
    states = []
    for node, model in enumerate(models):
        state = model.state()
        key = derive_seed(seed, "feddf update", node)
        update = {name: state[name] - value for name, value in start.items()}
        received = decode_update(encode_update(update, bits=3, seed=key), start, seed=key)
        states.append({name: value + received[name] for name, value in start.items()})
    return states


@pytest.fixture
def small_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models write little where there is no [written]."""
    monkeypatch.setattr(feddf, "WRITTEN_CONTEXTS", 20 * LENGTH - 3)


@pytest.mark.usefixtures("small_writing")
def test_rows_are_those_of_students_distilled_from_what_was_sent(config_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = parsed(config_file, SECTION)
    rows = {row["method"]: row for row in run_local(config, "", out, resume=False)}
    bits = ("feddf", "feddf, 3 bits", "feddf, written", "feddf, written, 3 bits")
    assert {name for name in rows if name.startswith("feddf")} == {f"{m}, {n} steps" for m in bits for n in (20, 80)}
    base = students.load(out / "base-0.safetensors")
    start = base.state()
    models = [students.load(out / f"fpld/nodes/{node}/{OWN_MODEL}") for node in range(NODES)]
    texts = [read_arrays(out / HELDOUT)[0][str(node)] for node in range(NODES)]
    tokens = read_arrays(out / PUBLIC)[0]["tokens"]
    weights = 4 * base.parameters
    few = sum(len(encode_update(start, bits=3, seed=node)) for node in range(NODES))
    for name, row in rows.items():
        if name.startswith("feddf"):
            assert row["downlink_bytes"] == NODES * weights
            assert row["uplink_bytes"] == (pytest.approx(few, rel=0.01) if "3 bits" in name else NODES * weights)
            assert row["heldout_loss"] < rows["base"]["heldout_loss"]

    windows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    own = [model.state() for model in models]
    few_bits = rebuilt(models, start, config.run.seed)
    equal = np.full((len(windows), NODES), 1 / NODES)
    for method, states in (("feddf", own), ("feddf, 3 bits", few_bits)):
        check_row(rows[f"{method}, 80 steps"], base, states, windows, equal, config, texts)
    for method, states in (("feddf, written", own), ("feddf, written, 3 bits", few_bits)):
        written = []
        for node, state in enumerate(states):
            seed = derive_seed(config.run.seed, "feddf written", node)
            base.load_state(state)
            first = np.random.default_rng(seed).choice(tokens, 20)
            written.append(write_sequences(base, first, LENGTH, seed=seed))
        one_hot = np.repeat(np.eye(NODES), 20, axis=0)
        check_row(rows[f"{method}, 80 steps"], base, states, np.concatenate(written), one_hot, config, texts)
    # As many steps as all nodes make together, on text that is sent.
    private_bytes = RunFolder(out).read_json(PREPARED)["private_bytes"]
    assert rows["pooled-all"]["uplink_bytes"] == rows["pooled"]["uplink_bytes"] == private_bytes
    assert rows["pooled-all"]["heldout_loss"] < rows["pooled"]["heldout_loss"]


def check_row(
    row: dict[str, Any],
    student: students.Student,
    states: list[dict[str, Any]],
    sequences: np.ndarray,
    shares: np.ndarray,
    config: configuration.Config,
    texts: list[np.ndarray],
) -> None:
    """Distil a student from the average of the states, and compare its loss on held-out text."""
    student.load_state(average(states))
    student.distill_from_models(sequences, states, shares, steps=80, seed=derive_seed(config.run.seed, "feddf"))
    assert row["heldout_loss"] == pytest.approx(np.mean(heldout_losses(student, texts, LENGTH)), rel=1e-6)


def test_steps_and_names_follow_the_configuration(config_file: Path) -> None:
    config = parsed(config_file, '\n[baselines]\nmethods = ["feddf"]\n', rounds=3)
    assert feddf.step_counts(config) == [config.distill.steps]
    # With several rounds the nodes are trained anew, in one.
    assert baseline_jobs(config) == 2 + NODES
    work = baseline_work(config)
    assert (work.taught, work.steps) == (config.distill.steps, NODES * config.local_steps)


def test_each_model_writes_the_contexts_of_the_written_section(config_file: Path) -> None:
    section = "\n[written]\ncontexts = 33\n"
    assert feddf.written_windows(parsed(config_file, section)) == 3
    assert feddf.written_windows(parsed(config_file, "")) == feddf.WRITTEN_CONTEXTS // LENGTH


def test_keys_that_are_not_given_are_no_part_of_a_runs_identity() -> None:
    """Runs of versions without these keys must be resumed."""
    assert {"feddf_steps", "update_bits"}.isdisjoint(BaselinesSection().model_dump())
    given = BaselinesSection(feddf_steps=[7], update_bits=[2.0])
    assert BaselinesSection(**given.model_dump()) == given


@pytest.mark.parametrize("value", [[0.5], [9.0], [16.0], []])
def test_bits_that_no_update_can_have_are_refused(value: list[float]) -> None:
    with pytest.raises(ValidationError) as caught:
        BaselinesSection(update_bits=value)
    assert {error["loc"][0] for error in caught.value.errors()} == {"update_bits"}


@pytest.mark.parametrize("method", ["feddf", "feddf-kbit", "feddf-written"])
def test_models_of_other_kinds_have_no_average(method: str, config_file: Path) -> None:
    section = f'\n[combine]\nbroadcast = "logits"\n[baselines]\nmethods = ["{method}"]\n'
    with pytest.raises(InputError, match=rf"baselines\.methods.*{method}"):
        parsed(config_file, section)


def test_the_same_federation_with_updates_has_a_row_with_its_bytes(config_file: Path, tmp_path: Path) -> None:
    config = parsed(config_file, '\n[baselines]\nmethods = ["updates"]\nupdate_bits = [2]\n')
    rows = {row["method"]: row for row in run_local(config, "", tmp_path / "run", resume=False)}
    count = students.load(tmp_path / "run/base-0.safetensors").parameters
    row = rows["updates, 2 bits"]
    assert row["uplink_bytes"] <= NODES * (update_bytes(count, 2) + OVERHEAD_BYTES)
    assert row["heldout_loss"] < rows["base"]["heldout_loss"]
