"""What is special to the n-gram model: its start, its rows, its size, its speed of learning."""

import numpy as np
import pytest

from fpld.errors import InputError
from fpld.students import NGram, NGramConfig, student_class


def test_it_starts_with_every_token_equally_likely() -> None:
    nats, count = NGram(NGramConfig(vocab=32)).loss(np.arange(32, dtype=np.int32), 8)
    assert nats == pytest.approx(count * np.log(32))


def test_it_learns_the_conditional_distribution_of_a_chain() -> None:
    # Against an independent truth: a first-order chain, whose entropy rate no model can beat.
    rng = np.random.default_rng(0)
    matrix = rng.dirichlet(np.ones(8), size=8)
    tokens = np.zeros(20_000, np.int32)
    for i in range(1, len(tokens)):
        tokens[i] = rng.choice(8, p=matrix[tokens[i - 1]])
    student = NGram(NGramConfig(vocab=8, order=1, buckets=16))
    student.finetune(tokens[:15_000], steps=300, seed=1)
    nats, count = student.loss(tokens[15_000:], 100)
    share = np.bincount(tokens, minlength=8) / len(tokens)
    rate = -float(np.sum(share[:, None] * matrix * np.log(matrix)))
    assert rate - 0.05 < nats / count < rate + 0.05


def test_contexts_beyond_the_order_do_not_matter() -> None:
    student = NGram(NGramConfig(vocab=8, order=2, buckets=64))
    student.finetune(np.random.default_rng(0).integers(8, size=500), steps=20, seed=0)
    logits = student.logits(np.array([[1, 2, 3], [7, 2, 3], [1, 5, 3]], np.int32)).reshape(3, 3, 8)
    np.testing.assert_array_equal(logits[0, 2], logits[1, 2])
    assert not np.allclose(logits[0, 2], logits[2, 2])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"order": 0}, "order must"),
        ({"rate": -1.0}, "rate must"),
        ({"buckets": 10**8}, "buckets .* must be at most"),
    ],
)
def test_a_bad_configuration_is_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NGramConfig(vocab=256, **bad)  # type: ignore[arg-type]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match=r"kind must be one of huggingface, ngram"):
        student_class("rnn")
