"""A prior in a file: read where it is the noted one, computed where not, and never another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.codecs.prior import ArrayPrior, block_ranges
from fpld.node import prior_cache
from fpld.protocol.shared_prior import ComputedPrior, PriorNotes, collect_notes, round_blocks

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = 700, 512  # two blocks
LOGITS = np.random.default_rng(3).normal(scale=3.0, size=SHAPE)


def noted() -> tuple[PriorNotes, np.ndarray[Any, np.dtype[np.int16]]]:
    blocks = list(round_blocks((LOGITS[rows.start : rows.stop] for rows in block_ranges(SHAPE)), SHAPE))
    return collect_notes(blocks, SHAPE), np.concatenate([block.integers for block in blocks])


class Counted:
    """Predict, and count how often."""

    def __init__(self, logits: np.ndarray[Any, Any] = LOGITS) -> None:
        self.logits = logits
        self.count = 0

    def __call__(self, rows: range) -> np.ndarray[Any, Any]:
        self.count += 1
        return self.logits[rows.start : rows.stop]


def test_the_aggregators_file_is_read_and_nothing_computed(tmp_path: Path) -> None:
    notes, integers = noted()
    (tmp_path / "theirs").write_bytes(integers.tobytes())
    predict = Counted()
    prior, missing = prior_cache.open_prior(ComputedPrior(predict, notes), [tmp_path / "theirs"], tmp_path / "own")
    assert not missing
    assert predict.count == 0
    assert not (tmp_path / "own").exists()
    assert np.array_equal(prior.block(range(SHAPE[0])), integers)
    assert prior.digest == notes.digest


@pytest.mark.parametrize("wrong", ["one integer", "above zero", "short", "none"])
def test_any_other_file_is_passed_over(tmp_path: Path, wrong: str) -> None:
    notes, integers = noted()
    other = integers.copy()
    other[600, 3] += 1 if wrong == "above zero" and other[600, 3] == 0 else -1
    if wrong == "above zero":
        other[600, 3] = 1
    if wrong != "none":
        (tmp_path / "theirs").write_bytes(other.tobytes()[: -2 if wrong == "short" else None])
    predict = Counted()
    prior, missing = prior_cache.open_prior(ComputedPrior(predict, notes), [tmp_path / "theirs"], tmp_path / "own")
    assert not missing
    assert predict.count == len(block_ranges(SHAPE))
    assert np.array_equal(prior.block(range(SHAPE[0])), integers)


def test_what_was_computed_is_kept_and_serves_after_a_restart(tmp_path: Path) -> None:
    notes, integers = noted()
    own = tmp_path / "node/prior.i16"
    first, _ = prior_cache.open_prior(ComputedPrior(Counted(), notes), [], own)
    predict = Counted()
    again, _ = prior_cache.open_prior(ComputedPrior(predict, notes), [], own)
    assert isinstance(first, ArrayPrior)
    assert predict.count == 0
    assert np.array_equal(again.block(range(SHAPE[0])), integers)


def test_a_machine_that_rounds_otherwise_asks_for_the_block(tmp_path: Path) -> None:
    notes, integers = noted()
    off = LOGITS.copy()
    off[600] += np.arange(SHAPE[1]) % 2
    own = tmp_path / "own"
    prior, missing = prior_cache.open_prior(ComputedPrior(Counted(off), notes), [], own)
    assert missing == [1]
    start = block_ranges(SHAPE)[1].start
    sent = {1: integers[start:]}
    prior, missing = prior_cache.open_prior(ComputedPrior(Counted(off), notes, sent), [], own)
    assert not missing
    assert np.array_equal(prior.block(range(SHAPE[0])), integers)


def test_a_large_prior_is_computed_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior_cache, "MAX_FILE_BYTES", 2 * SHAPE[0] * SHAPE[1] - 1)
    notes, integers = noted()
    prior, missing = prior_cache.open_prior(ComputedPrior(Counted(), notes), [], tmp_path / "own")
    assert not missing
    assert not (tmp_path / "own").exists()
    assert np.array_equal(prior.block(range(SHAPE[0])), integers)
