"""Train one model in several processes of this machine: each on a GPU of its own, or on the CPU.

A training whose student has `Compute.processes` > 1 runs in so many processes, which begin and end with it. Each makes
an equal student and computes the gradient of its share of every minibatch. The shares are added up, so that all take
the same step. The caller gets the loss and the parameters of the first; nobody writes anything else.

With `Compute.shard` a process holds only its share of the weights too, as in fully sharded data parallel (Y. Zhao et
al., *PyTorch FSDP*, 2023): a layer's weights are gathered when it is computed, and let go after it.

The training, pickled, is a file without a name: it holds a private model, and nothing of it may stay on the disk,
however the processes end. They find each other in a temporary folder. From each a pipe leads back: records of the log,
then an `Outcome` or an exception. A pipe that ends with neither tells of a killed process. GPUs add up with NCCL, CPUs
with gloo.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fpld.errors import ParameterError, ResourceError, exhausted_resource
from fpld.progress import CURVE_LOGGER, ProgressContext
from fpld.storage.files import storage_error
from fpld.students.base import Student
from fpld.students.devices import check_processes, use_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    import numpy as np
    from torch import Tensor

    from fpld.students.configs import Compute

_LOGGERS = ("fpld", CURVE_LOGGER)
_RENDEZVOUS = "processes"
_KILLED_SECONDS = 5.0  # within which a process ends whose end another one has noticed


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of a training, seen from one of them: its number, and how many there are."""

    index: int = 0
    count: int = 1

    def share(self, batch: int) -> range:
        """Return which sequences of a minibatch are this process's.

        >>> [list(Group(index, 2).share(5)) for index in range(2)]
        [[0, 1], [2, 3, 4]]
        """
        return range(batch * self.index // self.count, batch * (self.index + 1) // self.count)

    def smallest(self, value: int) -> int:
        """Return the smallest of all processes' values."""
        if self.count == 1:
            return value
        shared = torch.tensor(value)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return int(shared)

    def add_up(self, loss: float, weights: Iterable[Tensor]) -> float:
        """Replace the gradients of weights by the sums over all processes; return the sum of their losses."""
        if self.count == 1:
            return loss
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        pending = []
        for gradient in gradients:
            if is_sharded(gradient):
                gradient.mul_(self.count)  # FSDP has taken the mean in the backward pass
            else:
                pending.append(dist.all_reduce(gradient, async_op=True))
        for work in pending:
            work.wait()
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a process holds only a share of a tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; of one that is sharded all processes have to ask at the same time."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def shard_weights(model: torch.nn.Module, layers: Sequence[torch.nn.Module], device: torch.device) -> None:
    """Leave to each process its share of a model's weights, on its device; each layer is gathered by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    model.to(device)  # what is not a weight


class Outcome(NamedTuple):
    """What a training comes to: its loss, and the parameters after it (none but from the first process)."""

    loss: float
    state: dict[str, np.ndarray]


class _Training(NamedTuple):
    """A method of a student that trains, with all that a process needs to run it as the caller would."""

    student: Student
    method: str
    arguments: tuple[Any, ...]
    compute: Compute
    device: torch.device
    threads: int
    context: ProgressContext
    levels: dict[str, int]


@dataclass(frozen=True, slots=True)
class _NamelessFile:
    """An open file that has no name; a process gets it as it starts."""

    descriptor: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_sent, (DupFd(self.descriptor),)

    def read_training(self) -> _Training:
        """Return the training in this file, and close it."""
        try:
            with mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ) as content:  # processes share their place in it
                training: _Training = pickle.loads(content)  # noqa: S301 - the caller's, in a file of its own
        finally:
            os.close(self.descriptor)
        return training


def _open_sent(sent: Any) -> _NamelessFile:
    return _NamelessFile(sent.detach())


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def train_together(
    student: Student, method: str, arguments: tuple[Any, ...], batch: int, compute: Compute, device: torch.device
) -> float:
    """Run a student's `method`, which trains it with minibatches of `batch`, in several processes; return its result.

    Raises
    ------
    ParameterError
        If there are fewer GPUs than processes, or if `batch` cannot be divided among processes with shares of weights.
    ResourceError
        If a process is killed. The student is as it was.
    """
    check_processes(device, compute.processes)
    count = min(compute.processes, batch)
    if compute.shard and batch % compute.processes:
        problem = f"must be a multiple of processes, {compute.processes}, where shard is true, got {batch}"
        raise ParameterError("batch", problem)
    levels = {name: logging.getLogger(name).getEffectiveLevel() for name in _LOGGERS}
    context = ProgressContext.current()
    training = _Training(student, method, arguments, compute, device, torch.get_num_threads(), context, levels)
    processes = _context(student)
    workers: list[_Worker] = []
    with TemporaryDirectory(prefix="fpld-", ignore_cleanup_errors=True) as folder:
        try:
            with _written(training) as file:
                for index in range(count):
                    ours, theirs = processes.Pipe(duplex=False)
                    arguments = folder, _NamelessFile(file.fileno()), Group(index, count), theirs
                    process = processes.Process(target=_work, args=arguments, daemon=True)
                    process.start()
                    theirs.close()
                    workers.append(_Worker(process, ours))
            outcome = _wait_for_outcome(workers)
        finally:
            for worker in workers:
                worker.end()
    student.load_state(outcome.state)
    return outcome.loss


def _context(student: Student) -> Any:
    """Return how processes are started: on Linux by a process that has loaded PyTorch once, for all trainings."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    _leave_inherited_server()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", __name__, type(student).__module__])
    return context


def _leave_inherited_server() -> None:
    """Forget a fork server that came with a fork: it serves the process that started it, and this one starts its own.

    What it starts would be nobody's child here, and multiprocessing fails when it looks whether the server still runs.
    """
    server = vars(forkserver._forkserver)
    process = server["_forkserver_pid"]
    if process is None:
        return
    try:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        server["_forkserver_pid"] = None


class _Pickler(pickle.Pickler):
    """Pickle a student as its configuration and its parameters, and a second one of the same kind as its twin."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._students: dict[Any, Student] = {}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Student):
            return NotImplemented
        first = self._students.setdefault((type(obj), obj.config), obj)
        return obj.recipe() if first is obj else (_make_twin, (first, obj.state()))


def _make_twin(student: Student, state: dict[str, np.ndarray]) -> Student:
    """Make a student like another one, which shares what is never trained."""
    twin = student.copy()
    twin.load_state(state)
    return twin


def _written(training: _Training) -> IO[bytes]:
    """Return an open file without a name that holds a training."""
    with contextlib.ExitStack() as unfinished:
        try:
            file = unfinished.enter_context(TemporaryFile(prefix="fpld-"))
            _Pickler(file).dump(training)
            file.flush()
        except OSError as error:
            raise storage_error(Path(gettempdir(), "fpld-training"), error) from error
        unfinished.pop_all()
    return file


def _wait_for_outcome(workers: Sequence[_Worker]) -> Outcome:
    """Log what the processes log until all are done; return what came of it, or raise what went wrong."""
    waiting = {worker.pipe: worker.process for worker in workers}
    first = workers[0].pipe
    outcome: Outcome | None = None
    while waiting:
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, type(first))  # noqa: S101 - what is waited for
            try:
                message = pipe.recv()
            except (EOFError, ConnectionError):
                raise _killed(waiting[pipe]) from None
            if isinstance(message, logging.LogRecord):
                logging.getLogger(message.name).handle(message)
            elif isinstance(message, Exception):
                raise _cause(message, workers)
            else:
                outcome = message if pipe is first else outcome
                del waiting[pipe]
    assert outcome is not None  # noqa: S101 - the first was among them
    return outcome


def _cause(error: Exception, workers: Sequence[_Worker]) -> Exception:
    """Return an error, or the one that caused it: a sum fails in all processes when one of them is killed."""
    if isinstance(error, RuntimeError) and exhausted_resource(error) is None:
        ended = wait([worker.process.sentinel for worker in workers], _KILLED_SECONDS)
        for worker in workers:
            if worker.process.sentinel in ended:
                return _killed(worker.process)
    return error


def _killed(process: BaseProcess) -> ResourceError:
    process.join(_KILLED_SECONDS)
    code = process.exitcode
    if code is not None and code > 0:
        return ResourceError(
            f"a process of a training could not begin (exit code {code}), and has said why on standard error: a script "
            "that trains needs `if __name__ == '__main__':`; or set processes to 1"
        )
    return ResourceError(
        f"a process of a training was killed ({process.name}, exit code {code}), perhaps for lack of memory: free some "
        "memory, or set processes or at_once lower; the student is as it was before the training"
    )


class _ToParent(logging.handlers.QueueHandler):
    """Send what is logged to the process that waits."""

    def enqueue(self, record: logging.LogRecord) -> None:
        pipe: Any = self.queue
        pipe.send(record)


def _work(folder: str, file: _NamelessFile, group: Group, pipe: Any) -> None:
    """Take part in a training, as a process that the caller has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101 - it is a child
    threading.Thread(target=_end_with, args=(parent.join, folder), daemon=True).start()
    try:
        pipe.send(_train(Path(folder), file, group, pipe))
    except Exception as error:  # whatever it is, the caller raises it
        pipe.send(_portable(error))
    # To end now would break the connection to processes that still add up: the caller ends all.
    parent.join()


def _end_with(join: Callable[[], None], folder: str) -> None:
    """End this process when its parent is gone, and delete the folder: nobody waits for what it does."""
    join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _portable(error: Exception) -> Exception:
    """Return an error that another process can read."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - just written
    except Exception:  # an error of a library may hold anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _train(folder: Path, file: _NamelessFile, group: Group, pipe: Any) -> Outcome:
    training = file.read_training()
    use_threads(training.threads)
    device = training.device
    if device.type == "cuda":
        torch.cuda.set_device(group.index)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other machine takes part
    store = dist.FileStore(str(folder / _RENDEZVOUS), group.count)  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=group.index,
        world_size=group.count,
    )
    alone = replace(training.compute, processes=1)
    for each in (training.student, *training.arguments):
        if isinstance(each, Student):
            each.join(group, device, shard=training.compute.shard).compute_with(alone)
    if group.index == 0:
        handler = _ToParent(pipe)
        for name, level in training.levels.items():
            logging.getLogger(name).setLevel(level)
            logging.getLogger(name).addHandler(handler)
    run: partial[float] = partial(getattr(training.student, training.method), *training.arguments)
    loss = training.context.run(run)
    state = training.student.state()  # of all processes: a sharded weight is gathered
    return Outcome(loss, state if group.index == 0 else {})
