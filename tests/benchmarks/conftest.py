"""A tiny federation of `benchmarks.byzantine`: n-gram models of a Markov chain; half a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.byzantine import NODES, Federation
from fpld.node.training import make_student
from fpld.numerics import log_softmax
from fpld.storage.run_folder import RunFolder, text_file
from fpld.students.configs import parse_student

if TYPE_CHECKING:
    from pathlib import Path

V = 24
LENGTH = 16


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("federation")


@pytest.fixture(scope="session")
def federation(folder: Path) -> Federation:
    """Nodes with the same kind of text: a Markov chain, which a student learns quickly."""
    rng = np.random.default_rng(0)
    chain = rng.dirichlet(np.full(V, 0.1), V).cumsum(axis=1)

    def text(size: int) -> np.ndarray:
        found = np.zeros(size, np.int32)
        for place in range(1, size):
            found[place] = min(int(np.searchsorted(chain[found[place - 1]], rng.random())), V - 1)
        return found

    base = make_student(parse_student({"kind": "ngram", "order": 2, "buckets": 128, "batch": 8}), V, 0)
    base.finetune(text(800), steps=20, seed=0)
    store = RunFolder(folder)
    models = []
    for node in range(NODES):
        own = text(1200)
        store.write_arrays(text_file(node), {"tokens": own})
        model = base.copy()
        model.finetune(own, steps=60, seed=node)
        model.save(folder / f"node-{node}.safetensors")
        models.append(model)
    sequences = text(32 * LENGTH).reshape(-1, LENGTH)
    logits = [log_softmax(model.logits(sequences)) for model in models]
    return Federation("tiny", 0, 2, base, sequences, [text(400) for _ in range(NODES)], logits)
