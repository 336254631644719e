"""The mixture of models with tokens of their own: over the strings between boundaries that all of them share."""

from __future__ import annotations

import numpy as np
import pytest

from fpld.students.heldout import HeldoutText, mixture_nats, shared_boundaries

TOKENS = np.arange(6, dtype=np.int32)


def test_a_mixture_over_chunks_is_the_one_by_hand() -> None:
    # The student's tokens end at 1 to 6; the other model's in the middle of the third, and with the fourth and sixth.
    other = HeldoutText(np.arange(4, dtype=np.int32), np.array([1.0, 2.5, 4.0, 6.0]))
    (shared,) = shared_boundaries([[HeldoutText(TOKENS)], [other]])
    assert shared.tolist() == [1, 4, 6]
    # Nats of tokens 2 to 6. Chunks are the tokens 2 to 4, and 5 and 6.
    first = np.log([2.0, 2.0, 2.0, 3.0, 3.0])
    second = np.log([4.0, 1.0, 1.0, 5.0, 1.0])
    (mixed,) = mixture_nats([[first], [second]], [shared])
    chunks = [-np.log((1 / 8 + 1 / 4) / 2), -np.log((1 / 9 + 1 / 5) / 2)]
    assert mixed[:3].sum() == pytest.approx(chunks[0])
    assert mixed[3:].sum() == pytest.approx(chunks[1])
    np.testing.assert_allclose(mixed[:3], chunks[0] / 3)


def test_with_one_tokenizer_chunks_are_tokens() -> None:
    nats = [[np.array([1.0, 2.0, 0.5, 3.0, 4.0])], [np.array([2.0, 1.0, 0.7, 2.0, 6.0])]]
    shared = shared_boundaries([[HeldoutText(TOKENS)], [HeldoutText(TOKENS)]])
    np.testing.assert_allclose(mixture_nats(nats, shared)[0], mixture_nats(nats)[0])


def test_a_chunk_without_an_end_goes_to_the_end_of_the_text_and_may_be_long() -> None:
    nats = [[np.full(5, 600.0)], [np.full(5, 700.0)]]
    (mixed,) = mixture_nats(nats, [np.array([1])])
    assert mixed.sum() == pytest.approx(3000 + np.log(2))
