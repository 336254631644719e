"""How a student is judged: against the exact identity."""

from __future__ import annotations

import numpy as np
import pytest

from fpld.federation.training import blank_kl
from fpld.numerics import kl
from fpld.students import Target, divergence
from fpld.students.ngram import NGram, NGramConfig


def test_divergences_are_those_of_the_identity() -> None:
    rng = np.random.default_rng(0)
    student = NGram(NGramConfig(vocab=700))
    sequences = rng.integers(0, 700, (9, 11)).astype(np.int32)
    student.finetune(rng.integers(0, 700, 5000), steps=1, seed=0)
    target = rng.normal(0, 4, (99, 700)).astype(np.float32)
    assert divergence(student, sequences, Target.dense(target)) == pytest.approx(
        kl(target, student.logits(sequences) - target).mean(), rel=1e-5
    )
    assert blank_kl(target) == pytest.approx(kl(target, -target).mean(), rel=1e-5)
    assert blank_kl(np.zeros((3, 700), np.float32)) == pytest.approx(0, abs=1e-5)
