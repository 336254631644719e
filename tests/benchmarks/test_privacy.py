"""The study of what privacy costs: which configurations it runs, and what a row says of a finished run."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from benchmarks.privacy import losses, promising
from fpld import config as configuration

if TYPE_CHECKING:
    from pathlib import Path


def test_a_configuration_gets_another_promise_or_none() -> None:
    config, _ = configuration.read_config("private", seed=3)
    other = promising(config, 8.0, {"unit": "window", "batch": 64}, 1e-3)
    assert other.privacy is not None
    assert (other.privacy.epsilon, other.privacy.unit, other.privacy.batch) == (8.0, "window", 64)
    assert (other.local.rate, other.local.steps, other.run.seed) == (1e-3, config.local.steps, 3)
    assert promising(config, math.inf, {}, None).privacy is None
    with pytest.raises(SystemExit, match="privacy"):
        promising(configuration.read_config("demo")[0], 1.0, {}, None)


def test_a_row_has_base_best_node_mean_and_student(tmp_path: Path) -> None:
    found = {"base": 4.0, "alone: a": 3.9, "alone: b": 3.7, "fpld": 3.5}
    rows = [{"method": method, "heldout_loss": loss} for method, loss in found.items()]
    (tmp_path / "result.json").write_text(json.dumps(rows))
    shown = losses(tmp_path)
    assert shown == pytest.approx(
        {"base": 4.0, "best_alone": 3.7, "mean_alone": 3.8, "fpld": 3.5, "ahead": 0.2}, abs=1e-12
    )
