"""Distillation to a mixture of models, for every kind of student; targets computed in a second thread."""

import threading
from typing import Any

import numpy as np
import pytest

from fpld.errors import InputError, ParameterError
from fpld.numerics import softmax
from fpld.students import Student, Target
from tests.students.test_conformance import PARAMETERS, TABLE, Row, V, mean_kl, same, sequences, text

PROBE = sequences(8)
TORCH = [parameter for parameter in PARAMETERS if parameter.values[0] != "ngram"]
MIXED = np.array([0.5, 0.2, 0.3])


@pytest.fixture(params=PARAMETERS)
def row(request: pytest.FixtureRequest) -> Row:
    return TABLE[request.param]


def models(row: Row) -> list[Student]:
    """Return three models that differ."""
    made = [row.make(seed) for seed in (4, 5, 6)]
    for index, model in enumerate(made):
        model.finetune(text(index), steps=5, seed=index)
    return made


def mixture(made: list[Student], shares: np.ndarray) -> np.ndarray:
    """Return the logarithm of the target [S*T, V], by its definition."""
    parts = [softmax(model.logits(PROBE)).reshape(*PROBE.shape, V) for model in made]
    t = sum(share[:, None, None] * part for share, part in zip(shares.T, parts, strict=True))
    logits: np.ndarray = np.log(np.asarray(t)).reshape(-1, V).astype(np.float32)
    return logits


SHARES = {
    "one model": np.tile([0.0, 1.0, 0.0], (len(PROBE), 1)),
    "a mixture": np.tile(MIXED, (len(PROBE), 1)),
    "a model for each sequence": np.eye(3)[np.arange(len(PROBE)) % 3],
}


@pytest.mark.parametrize("case", SHARES)
def test_models_teach_what_their_dense_mixture_does(row: Row, case: str) -> None:
    made = models(row)
    dense = row.make(3)
    taught = row.make(3)
    options: dict[str, Any] = {"steps": 8, "seed": 1, "public": text(9), "public_weight": 0.3, "average": 0.5}
    expected = dense.distill(PROBE, mixture(made, SHARES[case]), **options)
    found = taught.distill_from_models(PROBE, [model.state() for model in made], SHARES[case], **options)
    assert found == pytest.approx(expected, rel=1e-3)
    np.testing.assert_allclose(softmax(taught.logits(PROBE)), softmax(dense.logits(PROBE)), atol=2e-4)
    assert not same(taught, row.make(3))


def test_shares_say_which_model_teaches(row: Row) -> None:
    made = models(row)
    states = [model.state() for model in made]
    students = [row.make(3) for _ in made]
    for student, shares in zip(students, np.eye(3), strict=True):
        student.distill_from_models(PROBE, states, np.tile(shares, (len(PROBE), 1)), steps=2 * row.steps, seed=0)
    distances = [[mean_kl(model.logits(PROBE), student.logits(PROBE)) for model in made] for student in students]
    assert np.argmin(distances, axis=1).tolist() == [0, 1, 2]


def test_what_is_no_lesson_is_refused_by_its_name(row: Row) -> None:
    student = row.make(3)
    state = student.state()
    good = np.full((len(PROBE), 2), 0.5)
    bad: list[np.ndarray] = [good[:-1], good[:, :1], good.astype(int), 0.6 * good, 0 * good, good * [[-1, 3]]]
    bad += [np.where(np.arange(2) == 0, value, good) for value in (np.nan, np.inf)]
    for shares in bad:
        with pytest.raises(ParameterError) as caught:
            student.distill_from_models(PROBE, [state, state], shares, steps=1, seed=0)
        assert caught.value.key == "shares"
    with pytest.raises(ParameterError) as caught:
        student.distill_from_models(PROBE, [], np.empty((len(PROBE), 0)), steps=1, seed=0)
    assert caught.value.key == "states"
    name = next(iter(state))
    for broken in ({}, state | {name: state[name][None]}, state | {name: np.nan * state[name]}):
        with pytest.raises(InputError, match=r"^states\[1\]"):
            student.distill_from_models(PROBE, [state, broken], good, steps=1, seed=0)
    with pytest.raises(ParameterError) as caught:
        student.distill_from_models(PROBE, [state, state], good, steps=0, seed=0)
    assert caught.value.key == "steps"
    assert same(student, row.make(3))


def distilled(row: Row, lesson: str) -> tuple[Student, float]:
    made = [row.make(seed) for seed in (4, 5)]
    student = row.make(3)
    options: dict[str, Any] = {"steps": 12, "seed": 1, "public": text(9), "public_weight": 0.3}
    if lesson == "models":
        shares = np.tile([0.25, 0.75], (len(PROBE), 1))
        return student, student.distill_from_models(PROBE, [model.state() for model in made], shares, **options)
    target = made[0].logits(PROBE) if lesson == "dense" else Target.unchanged(PROBE.size, V)
    return student, student.distill(PROBE, target, reference=made[1], **options)


def working_threads() -> set[threading.Thread]:
    """Return the threads but for daemons, which libraries start to watch progress."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.mark.parametrize("kind", TORCH)
@pytest.mark.parametrize("lesson", ["dense", "relative", "models"])
def test_a_second_thread_changes_no_bit_and_ends(kind: str, lesson: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = pytest.importorskip("fpld.students.gradient")
    losses = pytest.importorskip("fpld.students.losses")
    row = TABLE[kind]
    monkeypatch.setattr(losses, "_MIXTURE_VALUES", 12 * PROBE.shape[1] * V)  # so that there are several blocks
    before = working_threads()
    results = []
    for spare in (False, True):
        monkeypatch.setattr(gradient, "has_spare_core", lambda spare=spare: spare)
        results.append(distilled(row, lesson))
    (alone, alone_loss), (beside, beside_loss) = results
    assert same(alone, beside)
    assert alone_loss == beside_loss
    assert working_threads() <= before  # one of another test may have ended


def test_a_student_that_is_its_own_reference_is_taught_what_it_was(row: Row) -> None:
    target = Target.sparse(np.arange(PROBE.size + 1), np.zeros(PROBE.size, int), np.full(PROBE.size, 0.5), vocab=V)
    first = row.make(3)
    second = row.make(3)
    second.distill(PROBE, target, steps=4, seed=0)
    first.distill(PROBE, target, steps=4, seed=0, reference=first)
    assert same(first, second)


def test_an_error_in_the_second_thread_reaches_the_caller_and_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = pytest.importorskip("fpld.students.gradient")
    losses = pytest.importorskip("fpld.students.losses")
    monkeypatch.setattr(gradient, "has_spare_core", lambda: True)
    take = losses.DenseTeacher.take
    workers: list[int] = []

    def failing(self: Any, rows: np.ndarray) -> Any:
        workers.append(threading.get_ident())
        if len(workers) == 4:
            raise MemoryError
        return take(self, rows)

    monkeypatch.setattr(losses.DenseTeacher, "take", failing)
    before = working_threads()
    student = TABLE["transformer"].make(3)
    with pytest.raises(MemoryError):
        student.distill(PROBE, student.logits(PROBE), steps=9, seed=0)
    assert len(workers) == 4
    assert threading.get_ident() not in workers
    assert working_threads() <= before  # one of another test may have ended


def test_each_model_predicts_only_the_sequences_that_it_teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = pytest.importorskip("fpld.students.losses")
    made = models(TABLE["transformer"])
    shares = SHARES["a model for each sequence"]
    seen: list[set[bytes]] = [set(), set(), set()]
    loaded = -1
    teacher: Any = made[0].copy()
    load = teacher._set_state
    predict = teacher.predict

    def watched_load(state: Any) -> None:
        nonlocal loaded
        loaded = next(k for k in range(3) if state is states[k])
        load(state)

    def watched_predict(some: np.ndarray) -> Any:
        seen[loaded] |= {window.tobytes() for window in some}
        return predict(some)

    states = [model.state() for model in made]
    teacher._set_state = watched_load
    teacher.predict = watched_predict
    order = np.random.default_rng(0).permutation(len(PROBE)).reshape(-1, 8)
    monkeypatch.setattr(losses, "_MIXTURE_VALUES", 16 * PROBE.shape[1] * V)
    blocks = list(losses.ModelTeacher(teacher, states, shares, PROBE).blocks(iter(order)))
    assert len(blocks) == 3  # 40 sequences, 16 at a time
    assert seen == [{window.tobytes() for window in PROBE[k::3]} for k in range(3)]
    lessons = [lesson for block in blocks for lesson in block]
    expected = np.exp(mixture(made, shares)).reshape(*PROBE.shape, V)
    for rows, lesson in zip(order, lessons, strict=True):
        np.testing.assert_allclose(lesson.t.numpy(), expected[rows], atol=1e-6)
        entropy = -(expected[rows] * np.log(expected[rows])).sum(axis=-1).mean()
        assert lesson.constant == pytest.approx(entropy, rel=1e-5)
