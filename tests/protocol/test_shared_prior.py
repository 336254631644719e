"""A prior that both ends compute: the same integers on machines whose floats differ, or a block that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpld import InputError
from fpld.codecs.prior import block_ranges, in_eighths
from fpld.protocol.shared_prior import (
    MARGIN,
    ComputedPrior,
    PriorNotes,
    RoundedBlock,
    _entries,
    collect_notes,
    round_blocks,
)

if TYPE_CHECKING:
    from fpld.types import Array

SHAPE = (700, 1000)  # three blocks, the last one short
LOGITS = np.random.default_rng(0).normal(0, 3, SHAPE).astype(np.float32)


def parts(logits: Array) -> list[Array]:
    return [logits[rows.start : rows.stop] for rows in block_ranges(SHAPE)]


@pytest.fixture(scope="module")
def blocks() -> list[RoundedBlock]:
    return list(round_blocks(parts(LOGITS), SHAPE))


@pytest.fixture(scope="module")
def notes(blocks: list[RoundedBlock]) -> PriorNotes:
    return collect_notes(blocks, SHAPE)


def computed(logits: Array, notes: PriorNotes, sent: dict[int, Array] | None = None) -> ComputedPrior:
    return ComputedPrior(lambda rows: logits[rows.start : rows.stop], notes, sent or {})


def whole(logits: Array) -> Array:
    return in_eighths(logits)


def test_the_aggregator_rounds_as_in_eighths_does(blocks: list[RoundedBlock]) -> None:
    assert np.array_equal(np.concatenate([block.integers for block in blocks]), whole(LOGITS))


def test_floats_that_differ_a_little_give_the_same_integers(notes: PriorNotes) -> None:
    """Without the notes some would differ."""
    other = LOGITS + np.random.default_rng(1).uniform(-4e-6, 4e-6, SHAPE).astype(np.float32)
    assert (whole(other) != whole(LOGITS)).sum() > 5
    prior = computed(other, notes)
    assert prior.missing() == []
    assert np.array_equal(prior.block(range(SHAPE[0])), whole(LOGITS))


def test_any_range_is_that_part_of_the_whole(notes: PriorNotes) -> None:
    prior = computed(LOGITS, notes)
    expected = whole(LOGITS)
    for rows in (range(1), range(261, 263), range(100, 600), range(699, 700)):
        assert np.array_equal(prior.block(rows), expected[rows.start : rows.stop])


def test_a_prior_off_by_one_integer_is_found_and_mended_by_what_is_sent(
    blocks: list[RoundedBlock], notes: PriorNotes
) -> None:
    other = LOGITS.copy()
    place = int(np.abs(LOGITS[300] - np.median(LOGITS[300])).argmin())
    other[300, place] += 0.13  # more than an eighth of a nat
    prior = computed(other, notes)
    assert prior.missing() == [1]
    with pytest.raises(InputError, match="block 1 of the prior differs"):
        prior.block(range(290, 310))
    mended = computed(other, notes, {1: blocks[1].integers})
    assert mended.missing() == []
    assert np.array_equal(mended.block(range(SHAPE[0])), whole(LOGITS))


def test_the_notes_are_small(notes: PriorNotes) -> None:
    """About 2 margin / (1/8) of the coordinates; false-alarm rate below 1e-6 (five standard deviations, binomial)."""
    share = 16 * MARGIN
    coordinates = SHAPE[0] * SHAPE[1]
    expected = share * coordinates
    assert abs(notes.entries.size - expected) < 5 * np.sqrt(expected)
    assert notes.size < 2 * 1.5 * expected + 12 * len(block_ranges(SHAPE))


@given(st.lists(st.integers(0, 200_000), unique=True, max_size=30), st.randoms())
def test_places_survive_as_gaps(places: list[int], random: Any) -> None:
    ordered = np.array(sorted(places), np.int64)
    up = np.array([random.random() < 0.5 for _ in places], bool)
    entries = _entries(ordered, up)
    found = PriorNotes((1, 1 << 18), np.array([entries.size], np.int32), entries, np.zeros((1, 8), np.uint8)).sides(0)
    assert np.array_equal(found[0], ordered)
    assert np.array_equal(found[1], up)


def test_notes_that_do_not_fit_are_refused(notes: PriorNotes) -> None:
    with pytest.raises(InputError, match="3 blocks"):
        PriorNotes(SHAPE, notes.counts[:2], notes.entries, notes.digests)
    with pytest.raises(InputError, match="as many entries"):
        PriorNotes(SHAPE, notes.counts, notes.entries[:-1], notes.digests)
    with pytest.raises(InputError, match="digest for each"):
        PriorNotes(SHAPE, notes.counts, notes.entries, notes.digests[:, :4])
    far = PriorNotes(SHAPE, np.array([40, 0, 0], np.int32), np.full(40, 65533, np.uint16), notes.digests)
    with pytest.raises(InputError, match="notes name coordinate"):
        computed(LOGITS, far).missing()
