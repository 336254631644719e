"""The job that distils: a student that has learnt nothing, or worse, is not broadcast."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.errors import InputError
from fpld.federation import workers
from fpld.students import NGram, NGramConfig
from fpld.target import Target

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.types import Tokens

VOCAB = 16
SEQUENCES = np.random.default_rng(0).integers(VOCAB, size=(4, 8))


OPTIONS = {"steps": 3, "seed": 0, "rate": 1.0}

Given = tuple["Path", dict[str, Any], "Tokens", Target]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """Return the first arguments of the job, with a target that asks for no change."""
    student = NGram(NGramConfig(vocab=VOCAB))
    student.save(tmp_path / "base.safetensors")
    sequences = SEQUENCES.astype(np.int32)
    return tmp_path / "base.safetensors", student.state(), sequences, Target.unchanged(SEQUENCES.size, VOCAB)


@pytest.mark.parametrize("worse", [0.0, 0.9 * workers.NOISE_NATS])
def test_a_student_that_has_learnt_nothing_stays_as_it_was(
    given: Given, worse: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "divergence", lambda *_: worse)
    with caplog.at_level(logging.WARNING, "fpld"):
        state, found = workers.distill(*given, OPTIONS, None)
    assert found == 0.0
    assert "has learnt nothing" in caplog.text
    for name, value in given[1].items():
        assert np.array_equal(state[name], value)


@pytest.mark.parametrize("worse", [1.1 * workers.NOISE_NATS, 5.0, float("nan")])
def test_a_student_that_is_far_worse_has_diverged(given: Given, worse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "divergence", lambda *_: worse)
    with pytest.raises(InputError, match="diverged"):
        workers.distill(*given, OPTIONS, None)


def test_a_student_that_has_learnt_is_new(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "divergence", lambda *_: -0.1)
    state, found = workers.distill(*given, OPTIONS, None)
    assert found == -0.1
    assert set(state) == set(given[1])
