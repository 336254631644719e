"""A node whose machine predicts differently gets the blocks that differ; both logs say so, and no bit changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import fpld
from fpld.node import round as node_round
from fpld.node.prior_cache import Predictions

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

OTHER = 1  # the number of the node


class OtherFloats(Predictions):
    """Predictions of a machine whose floats differ by more than the notes allow for, in the first context."""

    def __call__(self, rows: range) -> Any:
        """Return the logits of a range of contexts."""
        logits = super().__call__(rows).copy()
        if rows.start == 0:
            logits[0, 0] += 1.0
        return logits


def test_blocks_that_a_machine_predicts_differently_are_sent_and_logged(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = {"run.rounds": 1, "baselines.methods": []}
    fpld.run(config_file, overrides=overrides, out=config_file.with_name("alike"))
    assert "blocks" not in caplog.text
    with_prior = node_round._with_prior

    def elsewhere(shared: Any, task: Any, probe: Any, paths: Any) -> Any:
        if task.plan.node != OTHER:
            return with_prior(shared, task, probe, paths)
        with monkeypatch.context() as patch:
            patch.setattr(node_round, "Predictions", OtherFloats)
            # It has no file of the aggregator's integers to look into.
            return with_prior(shared, task, probe, replace(paths, prior=None))

    monkeypatch.setattr(node_round, "_with_prior", elsewhere)
    caplog.clear()
    caplog.set_level("INFO", logger="fpld")
    fpld.run(config_file, overrides=overrides, out=config_file.with_name("different"))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    share = "asks for 1 of 1 blocks (100%) of the prediction: the machines' differ by more than probe.margin"
    assert warnings == [f"this node {share}", f"round 1: east {share}"]  # the node's log, and the aggregator's
    students = [config_file.with_name(name) / "student.safetensors" for name in ("alike", "different")]
    assert students[0].read_bytes() == students[1].read_bytes()
