"""The presets: every one parses; each runs to the end when it is made small."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import config as configuration
from fpld.engines.local import run_local
from fpld.node.training import make_student
from fpld.protocol.wire import OVERHEAD_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.config import Config
    from fpld.students.configs import StudentChoice

WORDS = [
    "patient",
    "was",
    "given",
    "treatment",
    "and",
    "after",
    "some",
    "days",
    "the",
    "fever",
    "fell",
    "while",
    "blood",
]
SMALL = {"width": 16, "heads": 2, "length": 16, "batch": 4}


@pytest.mark.parametrize("name", configuration.presets())
def test_every_preset_parses_and_says_what_it_is_for(name: str) -> None:
    config, text = configuration.read_config(name)
    assert text.startswith("#")
    assert config.run.out == f"runs/{name}"


def test_the_presets_of_the_documentation_are_there() -> None:
    assert {"demo", "hospitals", "heterogeneous-models", "refinement", "adaptive"} <= set(configuration.presets())


def test_the_demonstration_may_send_less_than_a_twentieth_of_fedavgs_weights() -> None:
    """FedAvg in two rounds or more; in one round it sends half of that."""
    config, _ = configuration.read_config("demo")
    contexts = config.probe.contexts + config.written_contexts
    labels = sum(node.context_bits or math.inf for node in config.nodes) * contexts / 8
    parameters = make_student(config.student, config.tokenizer.vocab, seed=0).config.parameters
    assert labels + len(config.nodes) * OVERHEAD_BYTES < 0.05 * 2 * 4 * parameters * len(config.nodes)


def comparable(name: str, *others: str) -> dict[str, Any]:
    """A preset without what two presets of one demonstration differ in."""
    config = configuration.read_config(name)[0].model_dump()
    del config["run"]["out"]
    for other in others:
        section, _, key = other.partition(".")
        if key:
            del config[section][key]
        else:
            del config[section]
    return config


PUBLIC_LABELS = ("probe.contexts", "distill.steps", "baselines.methods", "written")
"""In what a preset whose nodes label public text alone differs from the demonstration."""


def test_uniform_is_the_demonstration_with_another_channel() -> None:
    presets = [comparable(name, "codec.name", *PUBLIC_LABELS) for name in ("demo", "uniform")]
    for config in presets:
        for node in config["nodes"]:
            del node["bits"], node["context_bits"]
    assert presets[0] == presets[1]


def test_rivals_is_the_demonstration_with_labels_alone_beside_more_of_fedavg() -> None:
    other = ("baselines.rounds", "baselines.fedavg_rate", *PUBLIC_LABELS)
    presets = [comparable(name, *other) for name in ("demo", "rivals")]
    assert presets[0] == presets[1]
    demo, rivals = (configuration.read_config(name)[0] for name in ("demo", "rivals"))
    assert demo.probe.contexts + demo.written_contexts == rivals.probe.contexts


def test_policies_is_the_demonstration_beside_others() -> None:
    presets = [comparable(name, "baselines") for name in ("demo", "policies")]
    assert presets[0] == presets[1]


def test_hospitals_have_metropolitan_and_satellite_uplinks() -> None:
    nodes = configuration.read_config("hospitals")[0].nodes
    assert sum((node.uplink or 0) >= 1e6 for node in nodes) == 2
    assert sum((node.uplink or 1e6) < 1e6 for node in nodes) >= 2


def texts(folder: Path, labels: list[str]) -> Path:
    """Write a few documents for each label, a folder each: sentences of the same words, in another order."""
    for k, label in enumerate(labels):
        for document in range(6):
            words = [WORDS[(i * (k + 2) + i * i + document) % len(WORDS)] for i in range(400)]
            file = folder / label / f"{document}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(" ".join(words))
    return folder


def shrink(config: Config, folder: Path) -> Config:
    """Make a run of seconds, on text of the test: two rounds of a few steps, few contexts, small models."""
    labels = [node.label or node.name for node in config.nodes]
    steps = {"base": 4, "local": 3, "distill": 3}
    sections: dict[str, Any] = {
        name: getattr(config, name).model_copy(update={"steps": count}) for name, count in steps.items()
    }
    rounds = config.run.rounds
    sections["run"] = config.run.model_copy(update={"rounds": min(rounds, 2)})
    if config.baselines.rounds is not None:
        sections["baselines"] = config.baselines.model_copy(update={"rounds": [1, 3]})
    sections["data"] = config.data.model_copy(
        update={"corpus": None, "path": str(texts(folder, [*labels, config.probe.source])), "heldout_tokens": 256}
    )
    sections["probe"] = config.probe.model_copy(update={"contexts": 64, "length": 16})
    if config.written is not None:
        sections["written"] = config.written.model_copy(update={"contexts": 64})
    sections["tokenizer"] = config.tokenizer.model_copy(update={"vocab": 272})
    sections["engine"] = config.engine.model_copy(update={"workers": 0})
    sections["student"] = small(config.student)
    sections["nodes"] = [
        node.model_copy(update={"student": small(node.student), "uplink": _scaled(node.uplink, config)})
        for node in config.nodes
    ]
    return config.model_copy(update=sections)


def small(student: StudentChoice | None) -> StudentChoice | None:
    """Return a small student of the same kind; of two transformers that differ, the small ones differ too."""
    if student is None or student.kind == "ngram":
        return student and student.changed(buckets=64, batch=16)
    return student.changed(**SMALL)


def _scaled(uplink: float | None, config: Config) -> float | None:
    """Keep bits per context as they are in the preset, with 64 public contexts, and 64 written ones if nodes write."""
    if uplink is None:
        return None
    return uplink * (64 if config.written is None else 128) / (config.probe.contexts + config.written_contexts)


@pytest.mark.parametrize(
    "name",
    [
        "demo",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("adaptive", "refinement", "hospitals", "wikipedia", "heterogeneous-models")
        ),
    ],
)
def test_preset_runs_to_the_end(name: str, tmp_path: Path) -> None:
    config, text = configuration.read_config(name)
    ready = shrink(config, tmp_path / "texts")
    rows = run_local(ready, text, tmp_path / "run", resume=False)
    loss = {row["method"]: row["heldout_loss"] for row in rows}
    rivals = {"float32 logits"} if config.run.rounds > 1 else {"fedavg, 3 rounds", "fedavg-1bit, 1 round", "ensemble"}
    if name == "heterogeneous-models":  # after the federation, and without it
        whose = ("own", "alone", "alone longer")
        rivals = {f"{what}: {node.name}" for what in whose for node in config.nodes} | {"ensemble"}
    assert {"base", "fpld", *rivals} <= loss.keys()
    assert all(0 < value < 10 for value in loss.values())
    trace = [json.loads(line) for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    assert len(trace) == min(config.run.rounds, 2)
    assert all(not line["refused"] for line in trace)
    if config.budget.total is not None:
        assert all(sum(line["bits_allotted"]) == pytest.approx(config.budget.total) for line in trace)
    if name == "heterogeneous-models":
        own = json.loads((tmp_path / "run" / "own.json").read_text())
        assert [row["own_all"] for row in own] == [loss[f"own: {node.name}"] for node in config.nodes]
        assert all(row["own"] != row["alone"] and row["own_all"] != row["alone_all"] for row in own)
    if name == "adaptive":  # a uniform warm-up, then two bits more for four times the clip
        assert trace[0]["bits_allotted"] == pytest.approx([5.0] * 4)
        assert trace[1]["bits_allotted"] == pytest.approx([4.0, 4.0, 6.0, 6.0], abs=0.1)
    if name == "hospitals":  # the satellite links bind, the metropolitan ones share the rest
        bits = np.array(trace[0]["bits_allotted"]) * 272
        assert bits.sum() == pytest.approx(180.0)
        assert bits[0] == bits[1] > 45 > bits[2] > bits[3] == bits[4]
