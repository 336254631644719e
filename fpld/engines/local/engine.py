"""The local engine: nodes are jobs of a pool on this machine, and exchange the bytes that a network would carry."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from fpld.federation import jobs
from fpld.federation.bases import base_file
from fpld.federation.engine import Absence, Heldout
from fpld.federation.federation import Federation
from fpld.federation.heldout import losses, windows
from fpld.federation.part import parts
from fpld.federation.priorfile import FILE
from fpld.federation.result import WINDOWS
from fpld.federation.traffic import task_kinds
from fpld.federation.work import Place
from fpld.pace import Subject, run_on
from fpld.storage.folder import HELDOUT, text_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor, Future

    from fpld.config import Config
    from fpld.federation.prepare import Prepared
    from fpld.protocol import Receipt, Task
    from fpld.storage.folder import Arrays, RunFolder


class LocalEngine:
    """Let the nodes of a federation work in its pool, each in its folder of the run.

    `last` is called when the pool has all tasks of the last round.
    """

    def __init__(self, federation: Federation, bytes_per_token: float, last: Callable[[], None] | None = None) -> None:
        self._federation, self._bytes_per_token, self._last = federation, bytes_per_token, last
        self._setup = federation.setup
        self.parts = parts(self._setup.config)
        self.busy: set[int] = set()

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> list[Absence]:
        """Let the nodes work until all have answered or the deadline; return who did not answer, and why."""
        names, deadline = self._federation.names, self._setup.config.run.deadline
        absent = [Absence(names[node], "busy", "with an earlier round") for node in tasks if node in self.busy]
        # A node does one thing at a time.
        futures = {self._submit(node, task): node for node, task in tasks.items() if node not in self.busy}
        if self._last is not None and self._federation.aggregator.round == self._setup.settings.rounds:
            self._last()
        end = None if deadline is None else time.monotonic() + deadline
        while futures:
            left = None if end is None else max(end - time.monotonic(), 0.0)
            done, _ = wait(futures, timeout=left, return_when=FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                node = futures.pop(future)
                try:
                    frame, seconds = future.result()
                except Exception as error:  # whatever stops a node, the others go on
                    absent.append(Absence(names[node], "failed", str(error)))
                else:
                    self._federation.worked(node, seconds)
                    if deliver(node, frame).verdict == "asked":
                        futures[self._submit(node, self._federation.again(node))] = node
        for future, node in futures.items():
            absent.append(Absence(names[node], "late", f"no answer within {deadline:g} s"))
            self.busy.add(node)
            future.add_done_callback(partial(self._late, node))
        return absent

    def place(self, node: int) -> Place:
        """Return where a node works."""
        return place_of(self._federation, node)

    def _submit(self, node: int, task: Task) -> Future[tuple[bytes, float]]:
        data = task.to_bytes()
        self._federation.carried(node, self._sizes(task, len(data)))
        subject = Subject(self._federation.name, task.plan.round, self._federation.names[node])
        return self._setup.pool.submit(_timed, subject, jobs.node_round, self.parts[node], self.place(node), data)

    def _sizes(self, task: Task, size: int) -> dict[str, int]:
        """Return what the task would be on a network, by kind: weights go once, packed against what a node has."""
        sizes, trace = task_kinds(task, size), self._federation.trace
        if task.broadcast == "weights":  # before the first round nodes have the base model, and that is the student
            sizes["weights"] = 0 if task.sent or not trace else trace[-1]["student_bytes"]
        return sizes

    def _late(self, node: int, future: Future[tuple[bytes, float]]) -> None:
        """Take a frame that came after the deadline: refused and recorded, unless the round is still open."""
        if not future.cancelled() and future.exception() is None:
            self._federation.aggregator.frame(node, future.result()[0])
        self.busy.discard(node)

    def evaluate(self, student: Arrays) -> Heldout:
        """Evaluate the student on the held-out text of all nodes, in one job."""
        arguments = evaluation(self._setup.config, self._setup.run, student)
        subject = Subject(self._federation.name, self._federation.aggregator.round, "student")
        nats = self._setup.pool.submit(run_on, subject, jobs.evaluate, *arguments).result()
        self._federation.store.write_json(WINDOWS, windows(nats, self._setup.config.probe.length))
        return Heldout(losses(nats), self._bytes_per_token)


def _timed(subject: Subject, job: Callable[..., bytes], *arguments: Any) -> tuple[bytes, float]:
    """Run a job that works on a subject; return its result and its seconds, those in a queue aside."""
    started = time.monotonic()
    return run_on(subject, job, *arguments), time.monotonic() - started


def evaluation(config: Config, run: RunFolder, state: Arrays | None, index: int | None = None) -> tuple[Any, ...]:
    """Return the arguments of an evaluation job: of a node's model, or of the student (None)."""
    return run.path / base_file(config, index), state, run.path / HELDOUT, config.probe.length


def place_of(federation: Federation, node: int) -> Place:
    """Return where a node of a federation works."""
    run, store = federation.setup.run.path, federation.store.path
    return Place(store / f"nodes/{node}", run, run / text_file(node), store / FILE)


def adopt(federation: Federation, pool: Executor) -> list[Future[None]]:
    """Let nodes with models of their own kind learn from the last student."""
    return [
        pool.submit(
            run_on,
            Subject(federation.name, model=part.name),
            jobs.adopt,
            part,
            place_of(federation, part.index),
            federation.state.student,
            federation.run_id,
        )
        for part in parts(federation.setup.config)
        if part.differs
    ]


def federate(
    config: Config,
    run: RunFolder,
    prepared: Prepared,
    name: str,
    pool: Executor,
    last: Callable[[], None] | None = None,
) -> Federation:
    """Make the rounds that are left of a federation, with its nodes on this machine; `last` as in `LocalEngine`."""
    federation = Federation(config, run, prepared, name, pool=pool)
    engine = LocalEngine(federation, prepared.bytes_per_token, last)
    while not federation.done:
        federation.advance(engine)
    return federation
