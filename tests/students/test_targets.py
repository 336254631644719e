"""Targets, dense or relative to the student's own prediction, for every kind of student in the conformance table."""

import functools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fpld.errors import InputError
from fpld.numerics import log_softmax, softmax
from fpld.students import Student, Target, divergence, heldout
from fpld.students.base import TailAverage
from fpld.students.ngram import NGram, NGramConfig
from fpld.target import rounded_prediction
from tests.students.test_conformance import PARAMETERS, TABLE, Row, V, mean_kl, same, sequences, text

PROBE = sequences(8)
M = PROBE.size


@pytest.fixture(params=PARAMETERS)
def row(request: pytest.FixtureRequest) -> Row:
    return TABLE[request.param]


def prediction(student: Student) -> np.ndarray:
    """Compute pi by its definition, in float64."""
    logits = student.logits(PROBE).astype(np.float64)
    log_q = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    p = np.exp(np.clip(np.rint(8 * log_q), -320, 0) / 8)
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def all_changed(changes: np.ndarray) -> Target:
    """Return the relative target that changes every token of every context."""
    contexts, vocab = changes.shape
    tokens = np.tile(np.arange(vocab, dtype=np.int32), contexts)
    starts = np.arange(contexts + 1) * vocab
    return Target.sparse(starts, tokens, changes.astype(np.float32).ravel(), vocab=vocab)


@functools.cache
def taught(row: Row) -> np.ndarray:
    """Return the probabilities of a fine-tuned model on the probe set."""
    teacher = row.make(4)
    teacher.finetune(text(6), steps=row.steps, seed=0)
    return softmax(teacher.logits(PROBE))


def test_a_relative_target_equal_to_a_dense_one_teaches_the_same(row: Row) -> None:
    p = taught(row)
    dense = row.make(3)
    relative = row.make(3)
    target = all_changed(p - prediction(relative))
    start = mean_kl(np.log(p), dense.logits(PROBE))
    first = dense.distill(PROBE, np.log(p), steps=3, seed=1)
    second = relative.distill(PROBE, target, steps=3, seed=1)
    # A constant in all logits of a context, which no softmax sees, may drift apart.
    np.testing.assert_allclose(log_softmax(relative.logits(PROBE)), log_softmax(dense.logits(PROBE)), atol=2e-3)
    # What is returned differs by the divergence at the start, of the minibatch instead of all contexts.
    assert first - second == pytest.approx(start, rel=0.2)


def test_a_relative_target_without_changes_is_the_rounded_student(row: Row) -> None:
    student = row.make(3)
    pi = prediction(row.make(3))
    np.testing.assert_allclose(rounded_prediction(student.logits(PROBE)), pi, rtol=1e-5)
    nothing = Target.sparse(np.zeros(M + 1, np.int64), [], [], vocab=V)
    target, _ = nothing.rows(np.arange(M), student.logits(PROBE))
    np.testing.assert_allclose(target, pi, rtol=1e-5)
    before = student.logits(PROBE)
    assert abs(student.distill(PROBE, nothing, steps=5, seed=1, rate=1e-8)) < 1e-4
    np.testing.assert_allclose(student.logits(PROBE), before, atol=1e-4)


def test_distilling_to_sparse_targets_learns(row: Row) -> None:
    """From 16 tokens for each context, drawn without bias; some entries of the target are then negative."""
    p = taught(row)
    exact = row.make(3)
    noisy = row.make(3)
    reference = exact.copy()
    pi = prediction(exact)
    target = all_changed(p - pi)
    drawn = sampled(p, pi, 16, seed=5)
    entries, _ = drawn.rows(np.arange(M), reference.logits(PROBE))
    assert (entries < 0).any()
    values = [
        student.distill(PROBE, t, steps=2 * row.steps, seed=1) for student, t in ((exact, target), (noisy, drawn))
    ]
    learnt, same_but_noisy = (divergence(student, PROBE, target, reference) for student in (exact, noisy))
    assert max(values) < 0.2 * learnt < 0
    assert same_but_noisy < 0.7 * learnt


def sampled(p: np.ndarray, pi: np.ndarray, draws: int, seed: int) -> Target:
    """Draw an unbiased sparse estimate of p - pi: +1/draws at samples of p, -1/draws at samples of pi."""
    rng = np.random.default_rng(seed)
    columns = []
    for table, sign in ((p, 1.0), (pi, -1.0)):
        below = np.cumsum(table, axis=1)[:, None, :] < rng.random((len(p), draws, 1))
        columns.append((np.minimum(below.sum(axis=2), V - 1), np.full((len(p), draws), sign / draws)))
    tokens = np.concatenate([tokens for tokens, _ in columns], axis=1)
    changes = np.concatenate([changes for _, changes in columns], axis=1)
    return Target.sparse(np.arange(len(p) + 1) * 2 * draws, tokens.ravel(), changes.ravel(), vocab=V)


def test_the_loss_is_linear_so_noise_averages_out_exactly(row: Row) -> None:
    reference = row.make(3)
    student = row.make(3)
    student.finetune(text(6), steps=5, seed=0)
    p = taught(row) - prediction(reference)
    noise = np.random.default_rng(0).normal(size=(M, V))
    gains = [divergence(student, PROBE, all_changed(p + sign * noise), reference) for sign in (-1, 0, 1)]
    assert gains[0] + gains[2] == pytest.approx(2 * gains[1], rel=1e-3)
    assert abs(gains[0] - gains[1]) > 1e-3


def test_divergence_of_a_dense_target_is_kl(row: Row) -> None:
    student = row.make(3)
    logits = row.make(4).logits(PROBE)
    found = divergence(student, PROBE, Target.dense(logits))
    assert found == pytest.approx(
        mean_kl(logits.astype(np.float64), student.logits(PROBE).astype(np.float64)), rel=1e-4
    )


def test_divergence_of_a_relative_target_is_the_gain_over_the_reference(row: Row) -> None:
    reference = row.make(3)
    student = row.make(5)
    p = taught(row)
    target = all_changed(p - prediction(reference))
    gain = mean_kl(np.log(p), student.logits(PROBE)) - mean_kl(np.log(p), reference.logits(PROBE))
    assert divergence(student, PROBE, target, reference) == pytest.approx(gain, abs=2e-4)
    assert divergence(reference, PROBE, target, reference) == 0.0
    with pytest.raises(InputError, match="reference must be"):
        divergence(student, PROBE, target)


def test_sparse_distillation_repeats_exactly(row: Row) -> None:
    target = sampled(taught(row), prediction(row.make(3)), 2, seed=1)
    students = [row.make(3) for _ in range(3)]
    values = [
        student.distill(PROBE, target, steps=6, seed=seed, public=text(6), public_weight=0.5, average=0.5)
        for student, seed in zip(students, (0, 0, 1), strict=True)
    ]
    assert values[0] == values[1] != values[2]
    assert same(students[0], students[1])
    assert not same(students[0], students[2])


def test_batch_and_average_are_as_said(row: Row) -> None:
    logits = np.log(taught(row))

    def distilled(**options: float) -> Student:
        student = row.make(3)
        student.distill(PROBE, logits, steps=2, seed=0, **options)  # type: ignore[arg-type]
        return student

    plain = distilled()
    assert same(plain, distilled(average=0.0, batch=plain.config.batch))
    assert same(plain, distilled(average=0.5))  # the last of two steps
    assert not same(plain, distilled(batch=2 * plain.config.batch))
    assert not same(plain, distilled(average=1.0))


def test_averages_of_tensors_are_those_of_arrays() -> None:
    torch = pytest.importorskip("torch")
    array = np.zeros(3, np.float32)
    tensor = torch.zeros(3)
    tails = [TailAverage([weights], steps=10, share=0.3) for weights in (array, tensor)]
    for step in range(10):
        for weights, tail in zip((array, tensor), tails, strict=True):
            weights += step
            tail.add(step)
    for tail in tails:
        tail.finish()
    np.testing.assert_allclose(array, np.mean([28, 36, 45]), rtol=1e-6)
    np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-6)


def test_changes_are_gathered_by_context() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(4, size=50)
    starts = np.concatenate([[0], np.cumsum(counts)])
    tokens = rng.integers(9, size=starts[-1])
    changes = rng.normal(size=starts[-1])
    target = Target.sparse(starts, tokens, changes, vocab=9)
    chosen = rng.integers(50, size=30)
    places, ids, values = target.changed(chosen)
    expected = [(i, e) for i, context in enumerate(chosen) for e in range(starts[context], starts[context + 1])]
    assert places.tolist() == [i for i, _ in expected]
    assert ids.tolist() == [tokens[e] for _, e in expected]
    np.testing.assert_allclose(values, [changes[e] for _, e in expected], rtol=1e-6)


def test_a_token_that_stands_twice_is_changed_by_the_sum() -> None:
    target = Target.sparse([0, 3], [1, 1, 0], [0.5, 0.25, -0.75], vocab=4)
    t, log_q = target.rows(np.array([0]), np.zeros((1, 4), np.float32))
    np.testing.assert_allclose(t, [[-0.5, 1.0, 0.25, 0.25]])
    np.testing.assert_allclose(log_q, np.full((1, 4), -np.log(4)), rtol=1e-6)


BAD: dict[str, tuple[str, tuple[Any, Any, Any]]] = {
    "no start": (r"starts must begin with 0", ([], [], [])),
    "first start": (r"starts must begin with 0", ([1, 2], [0, 1], [0.5, 0.5])),
    "falling": (r"starts must .* never fall", ([0, 2, 1, 2], [0, 1], [0.5, 0.5])),
    "too few tokens": (r"starts must end", ([0, 3], [0, 1], [0.5, 0.5])),
    "too few changes": (r"starts must end", ([0, 2], [0, 1], [0.5])),
    "token": (r"tokens must be ids of 0 to 3", ([0, 2], [0, 4], [0.5, 0.5])),
    "negative token": (r"tokens must be ids of 0 to 3", ([0, 2], [0, -1], [0.5, 0.5])),
    "token beyond int32": (r"tokens must fit int32", ([0, 1], [2**40], [0.5])),
    "NaN": (r"changes must be finite", ([0, 2], [0, 1], [0.5, np.nan])),
    "floats": (r"tokens must be a sequence of int32", ([0, 2], [0.0, 1.0], [0.5, 0.5])),
    "matrix": (r"starts must be a sequence", ([[0, 2]], [0, 1], [0.5, 0.5])),
}


@pytest.mark.parametrize("case", BAD)
def test_an_unsound_target_is_refused(case: str) -> None:
    message, parts = BAD[case]
    with pytest.raises(InputError, match=message):
        Target.sparse(*parts, vocab=4)


def test_a_target_of_other_contexts_is_refused(row: Row) -> None:
    for contexts, vocab in ((M - 1, V), (M, V + 1)):
        other = Target.sparse(np.zeros(contexts + 1, np.int64), [], [], vocab=vocab)
        with pytest.raises(InputError, match=r"target must have shape .*\(400, 24\)"):
            row.make(3).distill(PROBE, other, steps=1, seed=0)


MEMORY = """
import resource, sys
import numpy as np
from fpld.students import NGram, NGramConfig, Target, divergence

m, vocab, length = 20_000, 8_000, 20
if sys.argv[1] == "ngram":
    student = NGram(NGramConfig(vocab=vocab, order=1, buckets=16, batch=160))
else:
    from fpld.students.devices import use_threads
    from fpld.students.transformer import Transformer, TransformerConfig
    use_threads(1)
    student = Transformer(TransformerConfig(vocab=vocab, layers=1, width=8, heads=1, length=length), seed=0)
rng = np.random.default_rng(0)
sequences = rng.integers(vocab, size=(m // length, length)).astype(np.int32)
tokens = rng.integers(vocab, size=20 * m).astype(np.int32)
changes = np.where(np.arange(20 * m) % 2, -0.05, 0.05).astype(np.float32)
student.finetune(sequences.ravel(), steps=1, seed=0)  # what training itself takes once
reference = student.copy()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
target = Target.sparse(np.arange(m + 1) * 20, tokens, changes, vocab=vocab)
student.distill(sequences, target, steps=5, seed=0)
divergence(student, sequences[:100], target.__class__.sparse(
    np.arange(2001) * 20, tokens[:40_000], changes[:40_000], vocab=vocab), reference)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "transformer"])
def test_nothing_of_the_size_of_contexts_times_vocabulary_is_held(kind: str) -> None:
    """m x V would be 640 MB in float32."""
    if kind == "transformer":
        pytest.importorskip("torch")
    run = subprocess.run([sys.executable, "-c", MEMORY, kind], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 200


@pytest.mark.slow
@pytest.mark.parametrize("other", ["ngram", "transformer"])
def test_a_student_learns_from_a_model_of_another_kind(row: Row, other: str) -> None:
    teacher = TABLE[other].make(4)
    student = row.make(3)
    teacher.finetune(text(6), steps=TABLE[other].steps, seed=0)
    state = teacher.state()
    before = mean_kl(teacher.logits(PROBE), student.logits(PROBE))
    student.distill(PROBE, Target.unchanged(M, V), steps=3 * row.steps, seed=1, reference=teacher)
    assert mean_kl(teacher.logits(PROBE), student.logits(PROBE)) < 0.4 * before
    assert all(np.array_equal(state[name], value) for name, value in teacher.state().items())


def test_a_reference_of_another_vocabulary_is_refused() -> None:
    student = TABLE["ngram"].make(3)
    other = NGram(NGramConfig(vocab=V + 1, buckets=64))
    with pytest.raises(InputError, match="reference must have the vocabulary of the student, 24, got 25"):
        student.distill(PROBE, Target.unchanged(M, V), steps=1, seed=0, reference=other)


def test_of_a_large_probe_set_some_sequences_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    student = TABLE["ngram"].make(3)
    logits = TABLE["ngram"].make(4).logits(PROBE)
    length = PROBE.shape[1]
    rows = np.arange(len(PROBE)).repeat(length) % 3 == 0
    expected = divergence(student, PROBE[::3], Target.dense(logits[rows]))
    monkeypatch.setattr(heldout, "_MAX_VALUES", M * V // 3 + V)
    assert divergence(student, PROBE, Target.dense(logits)) == pytest.approx(expected, rel=1e-6)
