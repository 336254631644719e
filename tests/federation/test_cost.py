"""Estimates of time: the work that is counted against the work of a run, and the seconds against what a run takes.

Seconds are those of the processor: other work on the machine counts little. The runs of one process take some seconds
each, and everything that is done once in a process has been done before: imports, kernels, PyTorch's first step.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fpld
from fpld.baselines import baseline_work
from fpld.federation import cost
from fpld.federation.cost import (
    MAX_TIMED_PARAMETERS,
    Work,
    estimate_deployment,
    estimate_time,
    expected_cost,
    federation_work,
    node_work,
    relative_size,
    run_work,
)
from fpld.federation.preflight import Preflight
from fpld.federation.rates import ModelSize, Rates, measure_rates, pretrained_size, scaled_rates
from fpld.node.training import make_student
from fpld.protocol.fast_paths import warm_up_all
from fpld.students.configs import HuggingFaceConfig, TransformerConfig
from fpld.students.ngram import NGram
from fpld.students.shapes import MODELS, read_shape
from tests.tiny_llama import make_llama

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.config import Config
    from fpld.students.base import Student

log = logging.getLogger(__name__)

FACTOR = 2.0  # between an estimate and what a run takes
REPEATS = 3  # timings of steps, of which the middle one counts
RATES = Rates(step=1.0, distillation=10.0, predicted=0.01, written=0.1, labelled=0.001)
SHORT = {"data.heldout_tokens": 512, "data.limit": 100_000, "probe.limit": 100_000, "run.continuations": 0}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"base.steps": 600, "local.steps": 600, "distill.steps": 600},
    "demo": {
        **SHORT,
        "base.steps": 20,
        "local.steps": 20,
        "distill.steps": 60,
        "written.contexts": 2048,
        "probe.contexts": 2048,
        "baselines.methods": ["alone", "fedavg", "ensemble"],
        "baselines.rounds": [1],
    },
    "heterogeneous-models": {
        **SHORT,
        "base.steps": 40,
        "local.steps": 40,
        "distill.steps": 40,
        "probe.contexts": 2048,
        "baselines.methods": ["alone"],
    },
}
# Three nodes, two rounds; a transformer of 2 layers, and at one node an n-gram model.
SMALL: dict[str, Any] = {
    "run": {"rounds": 2, "out": "unused"},
    "data": {"corpus": "sotu", "heldout_tokens": 100},
    "probe": {"source": "1940-1969", "contexts": 1000, "length": 10},
    "tokenizer": {"kind": "bytes"},
    "nodes": [
        {"name": "1790-1849", "context_bits": 20.0},
        {"name": "1850-1899", "context_bits": 20.0},
        {"name": "2000-2026", "context_bits": 20.0, "student": {"kind": "ngram", "order": 1, "buckets": 64}},
    ],
    "codec": {"name": "samples"},
    "combine": {"rule": "mixture"},
    "student": {"kind": "transformer", "width": 16, "heads": 2, "batch": 4, "length": 10},
    "base": {"steps": 70},
    "local": {"steps": 40},
    "distill": {"steps": 50},
    "baselines": {"methods": []},
}


def small(**changes: Any) -> Config:
    return fpld.Config.model_validate({**SMALL, **changes})


def test_the_work_of_a_node_is_that_of_its_rounds() -> None:
    config = small(written={"contexts": 200})
    assert node_work(config, 0) == Work(steps=80, predicted=2 * 1400, written=400, labelled=2400)
    assert relative_size(config, 2) == 0  # it looks its logits up
    # Before the second round, and after it, the other model learns from the student.
    assert node_work(config, 2).predicted == 2 * 1400 + 2 * 50 * 4 * 10


def test_the_work_before_the_rounds_has_a_base_of_each_kind() -> None:
    assert run_work(small()).before.steps == 70
    wide = {"kind": "transformer", "width": 32, "heads": 2, "batch": 4, "length": 10}
    nodes = [*SMALL["nodes"][:2], {**SMALL["nodes"][2], "student": wide, "effort": 0.5}]
    config = small(nodes=nodes)
    size = relative_size(config, 2)
    assert 3 < size < 4.5  # twice as wide
    assert run_work(config).before.steps == 70 * (1 + size)
    assert node_work(config, 2).steps == pytest.approx(size * 2 * 20)  # with half the effort


def test_who_is_not_asked_does_not_work() -> None:
    all_work = federation_work(small()).nodes
    asked = federation_work(small(run={**SMALL["run"], "fraction": 2 / 3})).nodes
    assert asked.steps == pytest.approx(all_work.steps * 2 / 3)


def test_updates_are_trained_and_written_at_the_aggregator() -> None:
    nodes = SMALL["nodes"][:2]
    config = small(nodes=nodes, send={"updates": 2.0}, written={"contexts": 300})
    work = federation_work(config)
    assert work.nodes == Work(steps=2 * 2 * 40)
    assert work.aggregator.taught == 2 * 50
    assert work.aggregator.written == 2 * 2 * 300
    assert work.aggregator.distilled == 0


def test_workers_share_what_nodes_do_and_the_aggregator_goes_alone() -> None:
    config = small(nodes=SMALL["nodes"][:2], engine={"workers": 0})
    work = run_work(config)
    one = estimate_time(config, RATES, Work())
    assert one.nodes == RATES.seconds(work.nodes)
    assert one.aggregator == pytest.approx(2 * 50 * 10 + 0.01 * work.aggregator.predicted)
    assert one.all >= one.before + one.nodes + one.aggregator
    deployed = estimate_deployment(config, RATES)
    assert deployed.slowest == "1790-1849"
    assert deployed.node == pytest.approx(one.nodes / 2)  # on a machine of its own


def test_steps_that_a_run_takes_are_those_that_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run of n-gram models, every step and every context that is predicted is counted as it is computed."""
    computed = {"steps": 0, "distilled": 0, "written": 0}
    finetune = NGram._finetune
    distill = NGram._distill

    def count_training(self: NGram, tokens: Any, steps: int, *rest: Any) -> float:
        computed["steps"] += steps
        return finetune(self, tokens, steps, *rest)

    def count_distillation(self: NGram, sequences: Any, target: Any, reference: Any, how: Any) -> float:
        computed["distilled"] += how.steps
        return distill(self, sequences, target, reference, how)

    monkeypatch.setattr(NGram, "_finetune", count_training)
    monkeypatch.setattr(NGram, "_distill", count_distillation)
    config = fpld.load_config("tiny", overrides={"baselines.methods": ["alone", "pooled"]})
    work = run_work(config)
    expected = work.before + work.nodes + work.aggregator + baseline_work(config)
    fpld.run(config, out=tmp_path / "run")
    assert computed["steps"] == expected.steps == 30 + 2 * 2 * 40 + (2 + 1) * 2 * 40
    assert computed["distilled"] == expected.distilled == 2 * 60


@pytest.fixture(scope="module")
def _warm() -> None:
    """Do in this process what is done once: compile kernels, import PyTorch, take its first step."""
    list(warm_up_all())
    student = make_student(fpld.load_config("demo").student, 300, 0)
    student.finetune(np.zeros(100, np.int32), steps=1, seed=0)


def median_rates(config: Config, student: Student) -> Rates:
    timed = [measure_rates(config, student, clock=time.process_time) for _ in range(REPEATS)]
    return Rates(*(float(np.median(column)) for column in zip(*timed, strict=True)))


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_takes_the_time_that_is_estimated_within_a_factor_of_two(preset: str, tmp_path: Path) -> None:
    config = fpld.load_config(preset, overrides={"engine.workers": 0, **PRESETS[preset]})
    vocab = Preflight(config, local=False).vocab
    rates = median_rates(config, make_student(config.student, vocab, 0))
    estimate = estimate_time(config, rates, baseline_work(config))
    started = time.process_time()
    fpld.run(config, out=tmp_path / "run")
    took = time.process_time() - started
    expected = estimate.before + estimate.nodes + estimate.aggregator + estimate.baselines
    log.info("%s: %.1f s expected, %.1f s taken, ratio %.2f", preset, expected, took, expected / took)
    assert 1 / FACTOR < expected / took < FACTOR, f"{expected:.1f} s are expected, {took:.1f} s are taken"


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
def test_rates_that_are_scaled_from_a_size_are_near_those_of_the_model(tmp_path: Path) -> None:
    student: dict[str, Any] = {"kind": "transformer", "width": 256, "heads": 4, "layers": 2, "length": 32, "batch": 8}
    config = fpld.load_config("demo").model_copy(update={"student": small(student=student).student})
    made = make_student(config.student, 1024, 0)
    size = ModelSize(1024, made.parameters, 0, made.parameters, made.parameters)
    check_scaled(config, size, made)
    folder = make_llama(tmp_path / "llama", 1024, hidden_size=256, intermediate_size=768)
    table = {"kind": "huggingface", "path": str(folder), "length": 32, "batch": 8, "micro": 8}
    adapted = config.model_copy(update={"student": small(student=table).student})
    settings = adapted.student.settings
    made = make_student(adapted.student, 0, 0)
    size = pretrained_size(settings, read_shape(folder))
    assert size.trained == made.parameters
    check_scaled(adapted, size, made)


def check_scaled(config: Config, size: ModelSize, student: Student) -> None:
    measured = median_rates(config, student)
    scaled = scaled_rates(config, size, clock=time.process_time)
    for name in ("step", "distillation", "predicted"):
        ratio = getattr(scaled, name) / getattr(measured, name)
        assert 1 / FACTOR < ratio < FACTOR, f"{name}: {ratio:.2f}"
    assert 0.2 < scaled.written / measured.written < 5


def test_adapters_of_a_large_model_take_no_gradients_of_its_weights() -> None:
    shape = MODELS["smollm2-1.7b"]
    every = pretrained_size(HuggingFaceConfig("x"), shape)
    assert every.trained == shape.adapters(8)
    assert every.frozen == 4 * shape.parameters
    assert every.learning == every.multiplied == shape.parameters  # the embedding is the read-out
    last = pretrained_size(HuggingFaceConfig("x", lora_layers=6, dtype="bfloat16"), shape)
    assert last.frozen == 2 * shape.parameters
    assert last.learning < every.learning / 2
    whole = pretrained_size(HuggingFaceConfig("x", lora=0), shape)
    assert whole.trained == shape.parameters
    assert MODELS["llama-3.1-8b"].multiplied == MODELS["llama-3.1-8b"].parameters - 4096 * 128256


@pytest.fixture
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed where memory is short, as it may be here."""
    monkeypatch.setattr(cost, "_free_memory", lambda: None)


@pytest.mark.usefixtures("enough_memory")
def test_a_check_says_the_time_of_a_model_that_is_too_large_to_be_made() -> None:
    student = {"kind": "transformer", "width": 1024, "heads": 16, "layers": 24, "length": 10}
    config = small(student=student, engine={"workers": 0})
    assert config.student.settings.parameters > MAX_TIMED_PARAMETERS
    started = time.process_time()
    findings = {finding.key: finding.says for finding in expected_cost(config, baselines=Work())}
    assert time.process_time() - started < 5
    assert "time: about " in findings["run.rounds"]
    assert "steps are scaled from the rate of a matrix product" in findings["run.rounds"]
    assert "memory: about " in findings["engine.workers"]


@pytest.mark.usefixtures("enough_memory")
def test_a_check_says_the_time_of_a_large_pretrained_model_without_reading_its_weights(tmp_path: Path) -> None:
    shape = MODELS["smollm2-1.7b"]
    sizes = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2 * shape.parameters)  # holes, which take no room
    student = {"kind": "huggingface", "path": str(tmp_path), "dtype": "bfloat16", "length": 10, "batch": 4}
    config = small(student=student, nodes=SMALL["nodes"][:2], engine={"workers": 0})
    findings = {finding.key: finding.says for finding in expected_cost(config, baselines=Work())}
    assert f"the model is large ({shape.parameters:,} weights)" in findings["run.rounds"]
    assert "time: about " in findings["run.rounds"]


def test_a_step_costs_more_with_more_to_learn_and_in_a_larger_minibatch() -> None:
    config = small()
    size = ModelSize(vocab=300, trained=0, frozen=0, multiplied=10**6, learning=0)
    clock = Clock()
    frozen = scaled_rates(config, size, clock)
    whole = scaled_rates(config, size._replace(trained=10**6, learning=10**6), clock)
    assert whole.step == pytest.approx(3 * frozen.step)
    assert whole.predicted == frozen.predicted
    settings = config.student.settings
    assert isinstance(settings, TransformerConfig)
    wide = replace(config.student, settings=replace(settings, batch=8))
    assert scaled_rates(config.model_copy(update={"student": wide}), size, clock).step == pytest.approx(2 * frozen.step)


class Clock:
    """A clock that goes a second on with each look at it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds
