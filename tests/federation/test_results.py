"""The studies of docs/results.md: the bandwidth loss is measured against the nodes' exact logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from experiments.results import change, study
from fpld import config as configuration
from fpld.baselines.reference import float32_variant
from fpld.federation.prepare import prepare
from fpld.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", ["weights", "logits"])
def test_a_study_measures_what_the_codec_loses_and_nothing_else(config_file: Path, broadcast: str) -> None:
    loaded, _ = configuration.read_config(str(config_file))
    config = change(loaded, codec={"name": "uniform"}, combine={"broadcast": broadcast}, run={"rounds": 2})
    store = RunFolder(config_file.parent / "study")
    prepared = prepare(config, store)
    exact = study(float32_variant(config), prepared, store, "exact")
    coded = study(config, prepared, store, "coded")
    refined = study(change(config, codec={"name": "uniform", "against": "own"}), prepared, store, "refined")
    assert [row["round"] for row in coded] == [1, 2]
    assert [row["kl"] for row in exact] == pytest.approx([0, 0], abs=1e-9)
    assert all(row["kl"] > 1e-4 for row in coded)
    assert refined[0]["kl"] == coded[0]["kl"]
    assert refined[1]["kl"] != coded[1]["kl"]
