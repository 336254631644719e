"""A training in two processes, which add up with gloo: the same loss and the same parameters as in one.

A process computes its share of a minibatch at once, so two of them do as one that computes half a minibatch at a time:
with those, bits are equal. With a whole minibatch at a time, sums have another order.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fpld.data.token_stream import Segments, TokenPack, TokenStream  # noqa: E402
from fpld.errors import InputError, ParameterError, ResourceError  # noqa: E402
from fpld.students.configs import Compute, HuggingFaceConfig, TransformerConfig  # noqa: E402
from fpld.students.devices import check_processes, describe_device  # noqa: E402
from fpld.students.transformer import Transformer  # noqa: E402
from fpld.target import Target  # noqa: E402
from tests.tiny_models import make_model  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.students import Student

log = logging.getLogger(__name__)

V = 64
T = 16
TEXT = np.random.default_rng(0).integers(8, size=2000).astype(np.int32)
SEQUENCES = TEXT[:640].reshape(-1, T)
LOSS = 1e-5  # relative: sums of float32 in another order
LOGITS = 1e-3  # absolute: after AdamW, whose first steps have the size of the rate whatever the gradient


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="needs fpld[huggingface]")
    pytest.importorskip("peft", reason="needs fpld[huggingface]")
    return make_model("llama", tmp_path_factory.mktemp("llama"), V)


def transformer(**compute: Any) -> Transformer:
    config = TransformerConfig(vocab=V, layers=1, width=32, heads=2, length=T, batch=8)
    return Transformer(config, seed=0).compute_with(Compute(**compute))


def pretrained(path: Path, *, lora: int = 4, device: str = "cpu", **compute: Any) -> Any:
    from fpld.students.huggingface import HuggingFace

    config = HuggingFaceConfig(str(path), lora=lora, length=T, batch=4, rate=1e-2, distill_rate=1e-2)
    return HuggingFace(config, seed=0, device=device).compute_with(Compute(**compute))


def sparse_target(sequences: np.ndarray) -> Target:
    """Make a target that is the student's own prediction, with a little more of one token in each context."""
    contexts = np.arange(sequences.size)
    return Target.sparse(np.arange(sequences.size + 1), contexts % V, np.full(sequences.size, 0.2, np.float32), vocab=V)


def trained(student: Student, tokens: Any = TEXT) -> tuple[float, float, np.ndarray]:
    """Return the losses of a training and a distillation with public text, and the logits after both."""
    first = student.finetune(tokens, steps=20, seed=1)
    target = sparse_target(SEQUENCES)
    second = student.distill(SEQUENCES, target, steps=10, seed=2, average=0.5, public=TEXT, public_weight=0.1)
    return first, second, student.logits(SEQUENCES)


def check_same(some: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    losses = max(abs(a / b - 1) for a, b in zip(some[:2], other[:2], strict=True))
    log.info("losses differ by %.1e of their size, logits by %.1e at most", losses, np.abs(some[2] - other[2]).max())
    assert some[:2] == pytest.approx(other[:2], rel=LOSS, abs=LOSS)
    np.testing.assert_allclose(some[2], other[2], atol=LOGITS)


def test_two_processes_train_and_distil_a_transformer_as_one_does(tmp_path: Path) -> None:
    (tmp_path / "pack").write_bytes(TEXT.tobytes())
    ones = np.array([len(TEXT)])
    stream: Any = TokenStream([TokenPack(tmp_path / "pack", "<i4", len(TEXT))], Segments(0 * ones, 0 * ones, ones), V)
    stream[np.arange(3)]  # mapped into memory, which the processes do not get
    student = transformer(processes=2)
    check_same(trained(student, stream), trained(transformer()))
    assert student.copy().in_processes


def test_bits_are_those_of_one_process_that_does_half_a_minibatch_at_a_time(llama: Path) -> None:
    for make in (transformer, lambda **compute: pretrained(llama, **compute)):
        half = make().config.batch // 2
        one = make(at_once=half)
        two = make(processes=2)
        losses = [student.finetune(TEXT, steps=10, seed=1) for student in (one, two)]
        assert losses[0] == losses[1]
        reference = one.copy()
        losses = [
            student.distill(SEQUENCES, sparse_target(SEQUENCES), steps=10, seed=2, reference=reference)
            for student in (one, two)
        ]
        assert losses[0] == losses[1]
        state = two.state()
        assert all(np.array_equal(weight, state[name]) for name, weight in one.state().items())


@pytest.mark.slow
def test_processes_with_shares_of_the_weights_train_and_distil_as_one_does(llama: Path) -> None:
    for lora in (4, 0):
        student = pretrained(llama, lora=lora, processes=2, shard=True)
        check_same(trained(student), trained(pretrained(llama, lora=lora)))


@pytest.mark.slow
def test_students_that_learn_from_models_and_through_maps_take_processes_too(tmp_path: Path) -> None:
    from fpld.students.places import PlaceStudent
    from tests.students.test_places import STRINGS, model_of, probe_of

    states = [transformer().state() for _ in range(2)]
    shares = np.full((len(SEQUENCES), 2), 0.5, np.float32)
    losses = [
        student.distill_from_models(SEQUENCES, states, shares, steps=5, seed=1, rate=1e-3)
        for student in (transformer(at_once=4), transformer(processes=2))
    ]
    assert losses[0] == losses[1]
    probe = probe_of(STRINGS)
    target = np.random.default_rng(3).normal(size=(probe.contexts, probe.vocab)).astype(np.float32)
    losses = []
    for compute in (Compute(at_once=8), Compute(processes=2)):
        seen = PlaceStudent(model_of(STRINGS).compute_with(compute), probe.read(STRINGS))
        losses.append(seen.distill(probe.sequences, target, steps=3, seed=0))
    assert losses[0] == losses[1]


def test_a_killed_process_is_an_error_that_leaves_the_student_as_it_was() -> None:
    student = transformer(processes=2)
    before = student.state()
    begun = threading.Event()

    class Noticing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            begun.set()

    def kill_one() -> None:
        begun.wait()
        os.kill(multiprocessing.active_children()[-1].pid or 0, signal.SIGKILL)

    handler = Noticing()
    logger = logging.getLogger("fpld.progress")
    level = logger.level
    logger.addHandler(handler)
    logging.getLogger("fpld").setLevel(logging.INFO)
    thread = threading.Thread(target=kill_one)
    thread.start()
    try:
        with pytest.raises(ResourceError, match=r"was killed .* set processes or at_once lower"):
            student.finetune(TEXT, steps=10**7, seed=1)
    finally:
        begun.set()
        thread.join()
        logger.removeHandler(handler)
        logger.setLevel(level)
        logging.getLogger("fpld").setLevel(logging.NOTSET)
    assert not multiprocessing.active_children()
    assert all(np.array_equal(weight, before[name]) for name, weight in student.state().items())


def test_an_error_in_a_process_is_raised_here() -> None:
    student = transformer(processes=2, dtype="nonsense")
    with pytest.raises(InputError, match="dtype must be"):
        student.finetune(TEXT, steps=1, seed=1)


def test_what_processes_cannot_do_is_refused_before_they_begin(llama: Path) -> None:
    with pytest.raises(ParameterError, match="shard must be false for a student of kind 'transformer'"):
        transformer(processes=2, shard=True)
    with pytest.raises(ParameterError, match="at_once must be a number where shard is true"):
        pretrained(llama, processes=2, shard=True, at_once="auto")
    with pytest.raises(ParameterError, match="batch must be a multiple of processes"):
        pretrained(llama, processes=3, shard=True).finetune(TEXT, steps=1, seed=1)
    assert pretrained(llama, shard=True).finetune(TEXT, steps=1, seed=1) > 0  # one process has all of it


def test_more_processes_than_gpus_are_refused() -> None:
    gpus = torch.cuda.device_count()
    with pytest.raises(ParameterError, match=f"processes must be at most {gpus}, as many as there are GPUs"):
        check_processes(torch.device("cuda"), gpus + 2)
    check_processes(torch.device("cpu"), 64)
    assert "in each of 6 processes" in describe_device("cpu", 2, 1, 3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with CUDA")
@pytest.mark.parametrize("shard", [False, True])
def test_two_gpus_train_as_one_does(llama: Path, shard: bool) -> None:
    compute: dict[str, Any] = {"dtype": "float32", "device": "cuda"}
    one = pretrained(llama, device="cuda", **compute)
    two = pretrained(llama, device="cpu" if shard else "cuda", processes=2, shard=shard, **compute)
    assert two.finetune(TEXT, steps=10, seed=1) == pytest.approx(one.finetune(TEXT, steps=10, seed=1), rel=1e-3)
