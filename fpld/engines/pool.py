"""Who does the heavy work: this process, or worker processes side by side."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import threading
from collections import deque
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fpld.errors import ResourceError
from fpld.federation.telemetry import LOGGER
from fpld.node.training import use_compute
from fpld.progress import CURVE_LOGGER
from fpld.spawn import Origin, spawn_context
from fpld.students.configs import Compute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

_WORKER_LOST = (
    "a worker process was killed, perhaps for lack of memory: free some memory, or set engine.workers lower; --resume "
    "continues from the last closed round"
)
Job = tuple[Future[Any], "Callable[[], Any]"]


class Inline(Executor):
    """Run jobs in this process, one at a time: for tests, and when no processes are wanted."""

    def __init__(self) -> None:
        # Several threads submit; loading a model and drawing its first weights touch what the process has once.
        self._one = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the job; the future is done when it is returned."""
        if self._closed:
            raise RuntimeError("cannot run a job after the shutdown")
        future: Future[Any] = Future()
        try:
            with self._one:
                future.set_result(fn(*args, **kwargs))
        except Exception as error:  # handed to whoever asks for the result, as a pool does
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; one that runs goes on."""
        del wait, cancel_futures
        self._closed = True


class Counting(Executor):
    """Submit jobs to a pool, and log how many are done: a line with `done` and `total`."""

    def __init__(self, pool: Executor, total: int) -> None:
        self._pool = pool
        self._total = total
        self._done = 0
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


class Lanes:
    """Hand jobs on to a pool of so many workers: those of lane 0 first, each lane in its order.

    Lane 1 never has more workers at a time than `allow` says, none at first: what runs there cannot be interrupted.
    """

    def __init__(self, pool: Executor, workers: int) -> None:
        self._pool = pool
        self._workers = workers
        self._waiting: tuple[deque[Job], deque[Job]] = deque(), deque()
        self._busy = [0, 0]
        self._allowed = [workers, 0]
        self._lock = threading.Lock()
        self._abandoned = False
        self.opened = threading.Event()  # lane 1 has been allowed workers, or was abandoned

    def lane(self, number: int) -> Executor:
        """Return a lane as an executor; 0 comes before 1. In a pool without workers jobs never wait."""
        return Lane(self, number) if self._workers else self._pool

    def allow(self, workers: int) -> None:
        """Let lane 1 have so many workers at a time."""
        with self._lock:
            self._allowed[1] = workers
        self.opened.set()
        self._start()

    def abandon(self) -> None:
        """Cancel what waits in lane 1, and all that will be submitted to it."""
        with self._lock:
            self._abandoned = True
            waiting = list(self._waiting[1])
            self._waiting[1].clear()
        self.opened.set()
        for future, _ in waiting:
            future.cancel()

    def submit(self, number: int, job: Callable[[], Any]) -> Future[Any]:
        """Submit a job to a lane."""
        future: Future[Any] = Future()
        with self._lock:
            if number == 1 and self._abandoned:
                future.cancel()
                return future
            self._waiting[number].append((future, job))
        self._start()
        return future

    def _start(self) -> None:
        """Start the jobs that there are workers for."""
        while (chosen := self._next()) is not None:
            number, (future, job) = chosen
            try:
                self._pool.submit(job).add_done_callback(partial(self._end, number, future))
            except Exception as error:  # the pool is broken or shut down: whoever waits must hear of it
                with self._lock:
                    self._busy[number] -= 1
                future.set_exception(error)

    def _next(self) -> tuple[int, Job] | None:
        with self._lock:
            for number, waiting in enumerate(self._waiting):
                if waiting and sum(self._busy) < self._workers and self._busy[number] < self._allowed[number]:
                    self._busy[number] += 1
                    return number, waiting.popleft()
        return None

    def _end(self, number: int, future: Future[Any], done: Future[Any]) -> None:
        with self._lock:
            self._busy[number] -= 1
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)
        self._start()


class Lane(Executor):
    """One lane of a pool."""

    def __init__(self, lanes: Lanes, number: int) -> None:
        self._lanes = lanes
        self._number = number

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit to the lane."""
        return self._lanes.submit(self._number, partial(fn, *args, **kwargs))


def make_pool(workers: int, compute: Compute | None = None) -> Executor:
    """Make a pool of processes that compute with what `compute` says; no workers: work in this process."""
    compute = compute or Compute()
    use_compute(compute)
    if workers == 0:
        return Inline()
    # Before NumPy and PyTorch start in the children: two libraries' threads on two cores slow each other down tenfold.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A run that is stopped ends at once, and Python's tracker process cleans up after it: no need to warn about it.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    return Workers(workers, compute)


class Workers(ProcessPoolExecutor):
    """Worker processes; what they log is logged in this one, at the levels that it has when they are made."""

    def __init__(self, workers: int, compute: Compute) -> None:
        context = spawn_context()
        self._records: Any = context.Queue()
        self._listener: logging.handlers.QueueListener | None
        self._listener = logging.handlers.QueueListener(self._records, _Here())
        levels = {name: logging.getLogger(name).getEffectiveLevel() for name in (LOGGER, CURVE_LOGGER)}
        super().__init__(workers, context, _begin, (self._records, levels, compute, Origin.of_this_process()))
        self._listener.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a job; its future raises ResourceError if a worker is lost, whichever job that one had."""
        try:
            job = super().submit(fn, *args, **kwargs)
        except BrokenProcessPool:
            self._forget_records()
            raise ResourceError(_WORKER_LOST) from None
        future: Future[Any] = Future()
        job.add_done_callback(partial(self._pass_on, future))
        return future

    def _pass_on(self, future: Future[Any], job: Future[Any]) -> None:
        """Give a future what came of a job."""
        if job.cancelled():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        error = job.exception()
        if isinstance(error, BrokenProcessPool):
            self._forget_records()
            future.set_exception(ResourceError(_WORKER_LOST))
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(job.result())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; the last that they logged is logged before this returns."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        listener = self._listener
        self._listener = None
        if wait and listener is not None:
            listener.stop()
            self._records.close()

    def kill(self) -> None:
        """Kill the workers: what they do, and all that is submitted after, fails with ResourceError."""
        self._forget_records()
        for process in list((self._processes or {}).values()):
            process.kill()

    def _forget_records(self) -> None:
        """Wait no more for what workers log: one may have died with the lock of the queue."""
        self._listener = None
        self._records.cancel_join_thread()


@contextmanager
def stop_on_interrupt(pool: Executor) -> Iterator[None]:
    """End the jobs of a pool at a KeyboardInterrupt: threads that submit them then end too, and can be joined.

    Worker processes are killed. A job that runs in this process goes on to its end, and is the last one.
    """
    try:
        yield
    except KeyboardInterrupt:
        if isinstance(pool, Workers):
            pool.kill()
        else:
            pool.shutdown(wait=False)
        raise


class _Here(logging.Handler):
    """Log a record of another process as if it were one of this."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).handle(record)


def _begin(records: Any, levels: dict[str, int], compute: Compute, origin: Origin) -> None:
    """Begin a worker: leave signals to the parent, send it what is logged, and know what its script defines."""
    use_compute(compute)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handler = logging.handlers.QueueHandler(records)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).addHandler(handler)
    origin.restore()
