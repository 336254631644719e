"""The heavy work as functions of plain arguments, so that worker processes can do it side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import students
from fpld.codecs.prior import in_eighths
from fpld.data import ProbeSet
from fpld.errors import InputError
from fpld.federation.site import work
from fpld.federation.training import blank_kl, heldout_losses, one_thread, probe_kl
from fpld.storage.arrays import read_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.storage.folder import Arrays


def node_round(folder: str, task: bytes) -> bytes:
    """Let a node do a task."""
    return work(Path(folder), task)


def distill(
    base: str,
    kind: str,
    state: Arrays,
    probe: str,
    target: np.ndarray[Any, Any],
    options: dict[str, Any],
    public: str | None,
) -> tuple[Arrays, float]:
    """Distil the student from combined logits; return its weights and its KL to them on the probe set."""
    one_thread(kind)
    student, contexts = students.load(base), ProbeSet.load(probe)
    student.load_state(state)
    text = None if public is None else read_arrays(public)[0]["tokens"]
    student.distill(contexts.sequences, target, public=text, **options)
    divergence = probe_kl(student, contexts.sequences, target)
    # A student that knows less than nothing must not be broadcast: the last good one stays in the checkpoint.
    blank = blank_kl(target)
    if not divergence < blank:
        raise InputError(
            f"distill.rate must be lower: the student diverged, with a KL of {divergence:.3g} to its target; equal "
            f"probabilities have {blank:.3g}; the last checkpoint is intact"
        )
    return student.state(), divergence


def predict(base: str, kind: str, state: Arrays, probe: str) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Return a student's prediction of the probe set as a prior: small integers, which travel to all nodes."""
    one_thread(kind)
    student, contexts = students.load(base), ProbeSet.load(probe)
    student.load_state(state)
    return np.concatenate([in_eighths(block) for block in student.logit_blocks(contexts.sequences)])


def finetune(
    base: str, kind: str, state: Arrays | None, texts: list[str], steps: int, seed: int, rate: float | None
) -> Arrays:
    """Fine-tune a model on one text, or on several pooled."""
    one_thread(kind)
    student = students.load(base)
    if state is not None:
        student.load_state(state)
    tokens = np.concatenate([read_arrays(text)[0]["tokens"] for text in texts])
    student.finetune(tokens, steps=steps, seed=seed, rate=rate)
    return student.state()


def evaluate(base: str, kind: str, state: Arrays | None, heldout: str, length: int) -> list[float]:
    """Return the held-out loss at each node."""
    one_thread(kind)
    student = students.load(base)
    if state is not None:
        student.load_state(state)
    texts, _ = read_arrays(heldout)
    return heldout_losses(student, [texts[str(i)] for i in range(len(texts))], length)


class Inline(Executor):
    """Do jobs in this process, one at a time: for tests and for who wants no processes."""

    def __init__(self) -> None:
        # Several threads submit; loading a model and drawing its first weights touch what the process has once.
        self._one = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run now; the future is done when it is given."""
        future: Future[Any] = Future()
        try:
            with self._one:
                future.set_result(fn(*args, **kwargs))
        except Exception as error:  # handed to whoever asks for the result, as a pool does
            future.set_exception(error)
        return future


def make_pool(workers: int) -> Executor:
    """Make a pool of processes with one thread each; none: work in this process."""
    if workers == 0:
        return Inline()
    # Before NumPy and PyTorch start in the children: two libraries' threads on two cores slow each other down tenfold.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A run that is stopped ends at once, and Python's tracker process cleans up after it: no need to warn about it.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_leave_signals_to_the_parent)


def _leave_signals_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
