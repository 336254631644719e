"""Who does the heavy work: this process, or worker processes side by side."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class Inline(Executor):
    """Run jobs in this process, one at a time: for tests, and when no processes are wanted."""

    def __init__(self) -> None:
        # Several threads submit; loading a model and drawing its first weights touch what the process has once.
        self._one = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the job; the future is done when it is returned."""
        future: Future[Any] = Future()
        try:
            with self._one:
                future.set_result(fn(*args, **kwargs))
        except Exception as error:  # handed to whoever asks for the result, as a pool does
            future.set_exception(error)
        return future


class Counting(Executor):
    """Submit jobs to a pool, and log how many are done: a line with `done` and `total`."""

    def __init__(self, pool: Executor, total: int) -> None:
        self._pool, self._total, self._done = pool, total, 0
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit to the pool."""
        future = self._pool.submit(fn, *args, **kwargs)
        future.add_done_callback(self._count)
        return future

    def _count(self, _future: Future[Any]) -> None:
        with self._lock:
            self._done += 1
            counted = {"done": min(self._done, self._total), "total": self._total}  # a resumed run does less
            log.debug("%(done)d of %(total)d jobs are done", counted, extra=counted)


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
