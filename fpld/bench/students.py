"""Scenes of real students: a small federation on presidents' messages, its nodes' logits in round 1 and in round 3.

Nodes and text are those of the demonstration, with a smaller model that stays as it is; logits are averaged as float32
and distilled between the rounds, so that the scene does not depend on a codec. The prior is what both ends hold: the
model that a round began with. It takes a minute or two; the scenes are kept in the cache folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import config as configuration
from fpld.bench.scenes import LogitScene, read_scene
from fpld.data.fetch import cache_folder
from fpld.data.token_stream import open_text
from fpld.federation.prepare import prepare
from fpld.node.spec import base_file
from fpld.node.training import set_threads
from fpld.rules import MIXTURE, combine
from fpld.seeds import derive_seed
from fpld.storage.arrays import write_arrays
from fpld.storage.run_folder import RunFolder, text_file
from fpld.students import load
from fpld.types import Array, Decoded

if TYPE_CHECKING:
    from fpld.config import Config
    from fpld.students import Student


ROUNDS = (1, 3)
SEQUENCES = 16  # of the probe set, whose logits make the scene
_SIZES: dict[str, dict[str, Any]] = {
    "probe": {"contexts": 16384},
    "base": {"steps": 1000, "rate": 6e-3},
    "local": {"steps": 160, "rate": 4e-3},
    "distill": {"steps": 600, "rate": 3e-3},
}


def cached_scene(seed: int, round: int) -> LogitScene:
    """Return the scene of a round, from the cache or made anew."""
    folder = cache_folder()
    files = {each: folder / f"bench-students-{each}-seed-{seed}.safetensors" for each in ROUNDS}
    if not files[round].exists():
        folder.mkdir(parents=True, exist_ok=True)
        for each, (logits, prior) in _train(seed).items():
            write_arrays(files[each], {"logits": logits, "prior": prior}, {})
    scene = read_scene(files[round])
    return LogitScene(f"students-{round}", scene.logits, scene.prior)


def _federation(seed: int) -> Config:
    """Return the demonstration's configuration with sizes of its own: scenes must not change with the demonstration."""
    config, _ = configuration.read_config("demo")
    changes = {name: getattr(config, name).model_copy(update=update) for name, update in _SIZES.items()}
    run = config.run.model_copy(update={"seed": seed})
    return config.model_copy(update={**changes, "run": run, "student": config.student.changed(width=96)})


def _train(seed: int) -> dict[int, tuple[Array, Array]]:
    """Run the federation; return the nodes' logits and the prior of each round."""
    config = _federation(seed)
    set_threads(config.student.kind)
    scenes = {}
    with tempfile.TemporaryDirectory() as name:
        store = RunFolder(Path(name))
        prepared = prepare(config, store)
        texts = [open_text(store.path / text_file(index)).tokens for index in range(len(config.nodes))]
        student = load(store.path / base_file(config, None))
        sequences = prepared.probe.sequences
        for round in range(1, max(ROUNDS) + 1):
            nodes: list[Student] = []
            for index, tokens in enumerate(texts):
                nodes.append(student.copy())
                local = derive_seed(seed, "bench students", round, index)
                nodes[-1].finetune(tokens, steps=config.local.steps, seed=local, rate=config.local.rate)
            if round in ROUNDS:
                logits = np.stack([node.logits(sequences[:SEQUENCES]) for node in nodes])
                scenes[round] = logits, student.logits(sequences[:SEQUENCES])
            if round < max(ROUNDS):
                target = _mixture(nodes, sequences)
                again = derive_seed(seed, "bench students", round)
                student.distill(sequences, target, steps=config.distill.steps, seed=again, rate=config.distill.rate)
    return scenes


def _mixture(nodes: list[Student], sequences: Array) -> Array:
    """Average the nodes' probabilities, a few sequences at a time."""
    parts = []
    exact = np.zeros((1, 1), np.float32)
    for start in range(0, len(sequences), 32):
        values = [np.asarray(node.logits(sequences[start : start + 32]), np.float32) for node in nodes]
        parts.append(combine(MIXTURE, [Decoded(each, exact, exact) for each in values]))
    return np.concatenate(parts)
