"""Base models: one for each way to make one, and a model that is taught by the aggregator's comes near to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld import config as configuration
from fpld.engines.local import run_local
from fpld.federation.prepare import MAX_TAUGHT_CONTEXTS, windows
from fpld.node.spec import BaseSpec, base_file, node_specs
from fpld.numerics import kl
from fpld.storage.run_folder import RunFolder
from fpld.students import load

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.config import Config

OWN = 'student = {kind = "ngram", order = 2, buckets = 512, batch = 128}'


def changed(text: str, **additions: str) -> Config:
    for node, more in additions.items():
        text = text.replace(f'name = "{node}"', f'name = "{node}"\n{more}')
    return configuration.parse_config(f'{text}\n[baselines]\nmethods = ["alone"]\n', "t")


def test_nodes_share_a_base_model_where_all_of_it_is_the_same(config_file: Path) -> None:
    config = changed(config_file.read_text(), east=OWN, south=f"{OWN}\neffort = 2.0")
    assert [base_file(config, index) for index in (None, 0, 1, 2)] == [
        f"base-{number}.safetensors" for number in (0, 0, 1, 2)
    ]
    assert BaseSpec.of(config, 2).effort == 2
    assert [part.local.steps for part in node_specs(config)] == [25, 25, 50]


@pytest.mark.slow
def test_a_taught_model_predicts_what_its_teacher_does(config_file: Path, tmp_path: Path) -> None:
    text = config_file.read_text()
    config = changed(
        text.replace("rounds = 3", "rounds = 1").replace("[base]\nsteps = 20", "[base]\nsteps = 60"),
        east=f"{OWN}\neffort = 6.0",
        south=f"{OWN}\neffort = 6.0\ntaught = true",
    )
    rows = run_local(config, text, tmp_path / "out", resume=False)
    assert {"own: east", "own: south"} <= {row["method"] for row in rows}
    public = RunFolder(tmp_path / "out").read_arrays("public.safetensors")[0]["tokens"]
    teacher, alone, taught = (load(tmp_path / "out" / base_file(config, index)) for index in (None, 1, 2))
    sequences = windows(public, 16, seed=1)[:200]
    logits = teacher.logits(sequences)
    far, near = (float(kl(logits, other.logits(sequences) - logits).mean()) for other in (alone, taught))
    assert near < 0.5 * far


def test_windows_are_pieces_of_the_text_and_bounded() -> None:
    tokens = np.arange(3 * MAX_TAUGHT_CONTEXTS, dtype=np.int32)
    pieces = windows(tokens, 64, seed=0)
    assert pieces.shape == (MAX_TAUGHT_CONTEXTS // 64, 64)
    assert (np.diff(pieces, axis=1) == 1).all()
    assert windows(tokens[:64], 64, seed=0).tolist() == [list(range(64))]
