"""One table for all students: a new kind is one more row, and every test below holds for it."""

import atexit
import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fpld.errors import InputError, ParameterError
from fpld.numerics import log_sum_exp
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.students import load
from fpld.students.base import Student
from fpld.students.ngram import NGram, NGramConfig

V = 24


def transformer(seed: int) -> Student:
    pytest.importorskip("torch")
    from fpld.students.configs import TransformerConfig
    from fpld.students.devices import use_threads
    from fpld.students.transformer import Transformer

    use_threads(1)
    return Transformer(TransformerConfig(vocab=V, layers=2, width=16, heads=2, length=12, batch=8), seed=seed)


def ngram(seed: int) -> Student:
    """Make a model whose parameters are small random numbers, since its own start is all zero."""
    student = NGram(NGramConfig(vocab=V, buckets=64, batch=64))
    rng = np.random.default_rng(seed)
    student.load_state({name: 0.1 * rng.standard_normal(a.shape) for name, a in student.state().items()})
    return student


@functools.cache
def llama() -> Path:
    from tests.tiny_llama import make_llama

    folder = Path(tempfile.mkdtemp(prefix="fpld-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_llama(folder / "model", V)


def huggingface(seed: int, lora: int = 0, *, bos: bool = False) -> Student:
    """Make a pretrained model whose parameters are moved at random: fresh adapters would all be alike."""
    for module in ("torch", "transformers", "peft"):
        pytest.importorskip(module)
    from fpld.students.configs import HuggingFaceConfig
    from fpld.students.devices import use_threads
    from fpld.students.huggingface import HuggingFace

    use_threads(1)
    rate = 1e-2 if lora == 0 else 2e-2
    config = HuggingFaceConfig(
        str(llama()), lora=lora, bos=bos, length=12, batch=8, micro=8, rate=rate, distill_rate=rate
    )
    student = HuggingFace(config, seed=seed)
    rng = np.random.default_rng(seed)
    student.load_state({name: a + 0.05 * rng.standard_normal(a.shape) for name, a in student.state().items()})
    return student


@dataclass(frozen=True)
class Row:
    make: Callable[[int], Student]
    steps: int


TABLE = {
    "ngram": Row(ngram, 60),
    "transformer": Row(transformer, 40),
    "huggingface": Row(huggingface, 40),
    "huggingface-lora": Row(functools.partial(huggingface, lora=8), 80),
}
SLOW = {"huggingface-lora": [pytest.mark.slow]}
PARAMETERS = [pytest.param(name, marks=SLOW.get(name, [])) for name in TABLE]


@pytest.fixture(params=PARAMETERS)
def row(request: pytest.FixtureRequest) -> Row:
    return TABLE[request.param]


@pytest.fixture
def student(row: Row) -> Student:
    return row.make(3)


def text(seed: int, n: int = 2000) -> np.ndarray:
    """Make a text in which each token mostly follows from the one before."""
    rng = np.random.default_rng(seed)
    jumps = rng.random(n) < 0.2
    out = np.zeros(n, np.int32)
    for i in range(1, n):
        out[i] = rng.integers(V) if jumps[i] else (3 * out[i - 1] + 1) % V
    return out


def sequences(seed: int, count: int = 40, length: int = 10) -> np.ndarray:
    return np.random.default_rng(seed).integers(V, size=(count, length)).astype(np.int32)


def mean_kl(target: np.ndarray, logits: np.ndarray) -> float:
    log_p = target - log_sum_exp(target)[:, None]
    log_q = logits - log_sum_exp(logits)[:, None]
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


def same(a: Student, b: Student) -> bool:
    one = a.state()
    two = b.state()
    return one.keys() == two.keys() and all(np.array_equal(one[k], two[k]) for k in one)


def test_row_of_each_position_is_its_own_context(student: Student) -> None:
    probe = sequences(0, 3, 7)
    logits = student.logits(probe)
    assert logits.shape == (21, V)
    assert logits.dtype == np.float32
    for s in range(3):
        for t in range(7):
            alone = student.logits(probe[s : s + 1, : t + 1])[-1]
            np.testing.assert_allclose(logits[s * 7 + t], alone, rtol=1e-4, atol=1e-5)


def test_rows_differ_between_contexts(student: Student) -> None:
    # Guards the test above: a model that ignores its context would pass it.
    logits = student.logits(np.array([[1, 2, 3], [1, 5, 3]], np.int32))
    np.testing.assert_array_equal(logits[0], logits[3])
    assert not np.allclose(logits[1], logits[4])
    assert not np.allclose(logits[2], logits[5])


def test_a_later_token_changes_no_earlier_logits(student: Student) -> None:
    probe = sequences(1, 4, 9)
    changed = probe.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % V
    before, after = (student.logits(x).reshape(4, 9, V) for x in (probe, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


def check_next_logits(student: Student) -> None:
    """Compare logits that come step by step with those of whole sequences."""
    probe = sequences(4, 5, 12)
    following = student.next_logits()
    another = student.next_logits()  # with a cache of its own
    another(probe[:2, 3])
    step_by_step = np.stack([following(probe[:, t]) for t in range(12)], axis=1)
    assert step_by_step.dtype == np.float32
    np.testing.assert_allclose(step_by_step.reshape(-1, V), student.logits(probe), rtol=1e-4, atol=1e-5)


def test_the_next_logits_are_those_of_the_whole_sequence(student: Student) -> None:
    check_next_logits(student)


def test_the_next_logits_after_a_token_that_stands_before_every_sequence() -> None:
    check_next_logits(huggingface(3, bos=True))


@pytest.mark.parametrize("rows", [1, 10, 35, 10**6])
def test_blocks_concatenate_to_logits(student: Student, rows: int) -> None:
    probe = sequences(2, 11, 10)
    blocks = list(student.logit_blocks(probe, rows=rows))
    assert all(len(block) <= max(rows, 10) and block.dtype == np.float32 for block in blocks)
    np.testing.assert_allclose(np.concatenate(blocks), student.logits(probe), rtol=1e-5, atol=1e-6)


def test_loss_is_the_cross_entropy_of_windows(student: Student) -> None:
    tokens = text(5, 33)  # 32 predictions: three windows of 10 and a rest of 2
    nats, count = student.loss(tokens, 10)
    by_hand = 0.0
    for i in range(32):
        logits = student.logits(tokens[None, i // 10 * 10 : i + 1])[-1:].astype(np.float64)
        by_hand += float(log_sum_exp(logits)[0] - logits[0, tokens[i + 1]])
    assert count == 32
    assert nats == pytest.approx(by_hand, rel=1e-5)


def test_finetuning_lowers_the_loss_of_other_text_from_the_same_source(row: Row, student: Student) -> None:
    before, count = student.loss(text(7), 12)
    last = student.finetune(text(6), steps=row.steps, seed=0)
    after, _ = student.loss(text(7), 12)
    assert after < 0.7 * before
    assert last < 0.7 * before / count


def test_training_that_diverges_is_an_error(student: Student) -> None:
    with np.errstate(all="ignore"), pytest.raises(InputError, match="rate must be lower"):
        student.finetune(text(6), steps=10, seed=0, rate=1e38)


def test_distilling_lowers_the_divergence_from_the_target(row: Row, student: Student) -> None:
    teacher = row.make(4)
    teacher.finetune(text(6), steps=row.steps, seed=0)
    probe = sequences(8)
    target = teacher.logits(probe)
    before = mean_kl(target, student.logits(probe))
    student.distill(probe, target, steps=2 * row.steps, seed=1)
    assert mean_kl(target, student.logits(probe)) < 0.3 * before


def test_distilling_from_itself_stays(row: Row, student: Student) -> None:
    student.finetune(text(6), steps=row.steps, seed=0)
    probe = sequences(8)
    target = student.logits(probe)
    assert student.distill(probe, target, steps=10, seed=1, rate=3e-4) < 5e-4
    assert mean_kl(target, student.logits(probe)) < 5e-4


def test_a_constant_in_the_targets_changes_nothing(row: Row) -> None:
    probe = sequences(8)
    target = row.make(4).logits(probe)
    one = row.make(3)
    two = row.make(3)
    one.distill(probe, target, steps=5, seed=1)
    two.distill(probe, target - log_sum_exp(target)[:, None], steps=5, seed=1)
    np.testing.assert_allclose(one.logits(probe), two.logits(probe), atol=2e-3)


def test_public_text_mixed_in_is_learnt(row: Row) -> None:
    probe = sequences(8)
    with_text = row.make(3)
    without = row.make(3)
    target = with_text.logits(probe)
    with_text.distill(probe, target, steps=row.steps, seed=1, public=text(6), public_weight=1.0)
    without.distill(probe, target, steps=row.steps, seed=1, public=text(6), public_weight=0.0)
    assert with_text.loss(text(7), 12)[0] < 0.9 * without.loss(text(7), 12)[0]


def test_same_seed_same_bits_and_other_seed_others(row: Row) -> None:
    probe = sequences(9)
    results = []
    for seed in (0, 0, 1):
        student = row.make(3)
        target = row.make(4).logits(probe)
        student.finetune(text(6), steps=4, seed=seed)
        student.distill(probe, target, steps=4, seed=seed, public=text(6), public_weight=0.5)
        results.append(student)
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_calls_keep_nothing_but_the_parameters(row: Row, tmp_path: Path) -> None:
    # A resumed run loads a file between the calls: it must not differ from one that was not stopped.
    straight = row.make(3)
    stopped = row.make(3)
    straight.finetune(text(6), steps=4, seed=0)
    stopped.finetune(text(6), steps=4, seed=0)
    stopped.save(tmp_path / "student.safetensors")
    stopped = load(tmp_path / "student.safetensors")
    for student in (straight, stopped):
        student.finetune(text(7), steps=4, seed=1)
    assert same(straight, stopped)


def test_a_copy_shares_nothing(student: Student) -> None:
    other = student.copy()
    before = student.state()
    assert same(student, other)
    other.finetune(text(6), steps=2, seed=0)
    assert not same(student, other)
    assert all(np.array_equal(student.state()[k], before[k]) for k in before)
    student.state()[next(iter(before))][...] = 7.0
    assert all(np.array_equal(student.state()[k], before[k]) for k in before)


def test_states_can_be_averaged(row: Row) -> None:
    one = row.make(3)
    two = row.make(4)
    mean = {name: (one.state()[name] + two.state()[name]) / 2 for name in one.state()}
    one.load_state(mean)
    assert all(np.array_equal(one.state()[name], mean[name]) for name in mean)
    assert one.parameters == sum(array.size for array in mean.values())
    assert one.vocab == V


def test_a_file_gives_back_the_same_student(student: Student, tmp_path: Path) -> None:
    path = tmp_path / "student.safetensors"
    student.save(path)
    for back in (type(student).load(path), load(path)):
        assert type(back) is type(student)
        assert back.config == student.config
        assert same(back, student)
        np.testing.assert_array_equal(back.logits(sequences(0)), student.logits(sequences(0)))
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_one_that_safetensors_reads(student: Student, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    student.save(tmp_path / "student.safetensors")
    theirs = numpy.load_file(tmp_path / "student.safetensors")
    assert theirs.keys() == student.state().keys()
    assert all(np.array_equal(theirs[name], array) for name, array in student.state().items())
    numpy.save_file(theirs, tmp_path / "theirs", metadata={"a": "b"})
    arrays, metadata = read_arrays(tmp_path / "theirs")
    assert metadata == {"a": "b"}
    assert all(np.array_equal(arrays[name], array) for name, array in theirs.items())


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_truncated_file_is_refused(student: Student, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "student.safetensors"
    student.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"student\.safetensors"):
        type(student).load(path)


def hostile(student: Student) -> dict[str, tuple[dict[str, np.ndarray], dict[str, str]]]:
    """Make (arrays, metadata) that are each wrong in one way."""
    state = student.state()
    first = next(iter(state))
    config = {name: getattr(student.config, name) for name in student.config.__dataclass_fields__}
    meta = {"kind": student.kind, "version": "1", "config": json.dumps(config)}
    nan = {**state, first: np.full_like(state[first], np.nan)}
    return {
        "kind": (state, {**meta, "kind": "another"}),
        "version": (state, {**meta, "version": "2"}),
        "no metadata": (state, {}),
        "config is no JSON": (state, {**meta, "config": "{"}),
        "config is a list": (state, {**meta, "config": "[1]"}),
        "deep config": (state, {**meta, "config": "[" * 100_000}),
        "unknown key": (state, {**meta, "config": json.dumps({**config, "extra": 1})}),
        "vocabulary is text": (state, {**meta, "config": json.dumps({**config, "vocab": "many"})}),
        "vocabulary does not fit": (state, {**meta, "config": json.dumps({**config, "vocab": V + 1})}),
        "far too large": (state, {**meta, "config": json.dumps({**config, "vocab": 10**15})}),
        "not a number": (nan, meta),
        "an array is missing": ({name: a for name, a in state.items() if name != first}, meta),
        "wrong shape": ({**state, first: state[first][..., :-1]}, meta),
        "wrong dtype": ({**state, first: state[first].astype(np.int32)}, meta),
    }


HOSTILE = list(hostile(NGram(NGramConfig(vocab=V))))


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(student: Student, tmp_path: Path, case: str) -> None:
    path = tmp_path / "student.safetensors"
    write_arrays(path, *hostile(student)[case])
    with pytest.raises(InputError, match=r"student\.safetensors"):
        type(student).load(path)


def test_a_refused_state_changes_nothing(student: Student) -> None:
    before = student.copy()
    state = {name: array + 1 for name, array in student.state().items()}
    state[list(state)[-1]][...] = np.inf
    with pytest.raises(InputError, match="finite"):
        student.load_state(state)
    assert same(student, before)


BAD_CALLS: dict[str, tuple[str, Callable[[Student], object]]] = {
    "ids too large": (r"sequences must .* 0 to 23", lambda s: s.logits(np.full((2, 3), V, np.int32))),
    "negative ids": (r"sequences must .* 0 to 23", lambda s: s.logits(np.full((2, 3), -1, np.int32))),
    "no integers": (r"sequences must .* integer", lambda s: s.logits(np.zeros((2, 3)))),
    "no matrix": (r"sequences must .* 2 dim", lambda s: s.logits(np.zeros(3, np.int32))),
    "empty": (r"sequences must .* at least one", lambda s: s.logits(np.zeros((0, 3), np.int32))),
    "rows": (r"rows must", lambda s: s.logit_blocks(sequences(0), rows=0)),
    "token out of range": (r"tokens must .* 24", lambda s: s.finetune(np.full(99, 24), steps=1, seed=0)),
    "short text": (r"tokens must .* at least", lambda s: s.finetune(np.zeros(3, np.int32), steps=1, seed=0)),
    "text is a matrix": (r"tokens must .* 1 dim", lambda s: s.finetune(sequences(0), steps=1, seed=0)),
    "short held-out text": (r"tokens must .* 13", lambda s: s.loss(np.zeros(12, np.int32), 12)),
    "loss length": (r"length must", lambda s: s.loss(text(0), 0)),
    "steps": (r"steps must", lambda s: s.finetune(text(0), steps=0, seed=0)),
    "seed": (r"seed must", lambda s: s.finetune(text(0), steps=1, seed=-1)),
    "rate": (r"rate must", lambda s: s.finetune(text(0), steps=1, seed=0, rate=float("nan"))),
    "target rows": (
        r"target must .*\(400, 24\)",
        lambda s: s.distill(sequences(0), np.zeros((399, V)), steps=1, seed=0),
    ),
    "target vocabulary": (
        r"target must",
        lambda s: s.distill(sequences(0), np.zeros((400, 23)), steps=1, seed=0),
    ),
    "target NaN": (r"finite", lambda s: s.distill(sequences(0), np.full((400, V), np.nan), steps=1, seed=0)),
    "target -inf": (
        r"finite",
        lambda s: s.distill(sequences(0), np.full((400, V), -np.inf), steps=1, seed=0),
    ),
    "weight": (
        r"public_weight must",
        lambda s: s.distill(sequences(0), np.zeros((400, V)), steps=1, seed=0, public_weight=-1.0),
    ),
    "no public text": (
        r"public must",
        lambda s: s.distill(sequences(0), np.zeros((400, V)), steps=1, seed=0, public_weight=1.0),
    ),
    "state names": (r"state must", lambda s: s.load_state({})),
    "state shape": (r"state\[", lambda s: s.load_state({k: a[..., :-1] for k, a in s.state().items()})),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused_by_name(student: Student, case: str) -> None:
    message, call = BAD_CALLS[case]
    before = student.copy()
    with pytest.raises(InputError, match=message):
        call(student)
    assert same(student, before)


def test_an_error_of_a_parameter_has_its_key_also_from_another_process() -> None:
    with pytest.raises(ParameterError) as refused:
        NGramConfig(vocab=V, order=0)
    error = copy.deepcopy(refused.value)  # by the protocol of pickle
    assert (error.key, str(error)) == ("order", "order must be an integer of at least 1, got 0")
