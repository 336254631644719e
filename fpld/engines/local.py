"""The local engine: nodes are jobs of a pool on this machine, and exchange the bytes that a network would carry.

`run_local` is the main job of `fpld run`. It prepares a folder, runs the federation and its baselines side by side on
one pool of workers, and writes the results.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fpld.baselines import baseline_jobs
from fpld.baselines.context import BaselineContext
from fpld.baselines.reference import base_row
from fpld.engines.base import CollectedReplies
from fpld.engines.pool import Counting, Lanes, make_pool, stop_on_interrupt
from fpld.errors import FpldError
from fpld.federation import workers
from fpld.federation.evaluation import finish_run, own_losses, own_rows, write_own
from fpld.federation.prepare import claim, prepare
from fpld.federation.record import Heldout, Incident, task_kinds
from fpld.federation.rounds import Federation
from fpld.federation.sources import record_sources
from fpld.federation.telemetry import Status, loop_files
from fpld.federation.workers import evaluation_arguments, heldout_path
from fpld.node.round import NodePaths, learn_from_student
from fpld.node.spec import node_specs
from fpld.node.training import write_privacy_report
from fpld.progress import ProgressLabel, run_labelled
from fpld.protocol.fast_paths import warm_up
from fpld.registry import baselines, codecs
from fpld.storage.files import TEMPORARY_PREFIX
from fpld.storage.run_folder import PREPARED, PRIOR, WINDOWS, RunFolder, is_complete, record_digests, text_file
from fpld.students.heldout import mean_losses, window_losses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Executor, Future
    from pathlib import Path

    from fpld.config import Config
    from fpld.federation.evaluation import Row
    from fpld.federation.prepare import Prepared
    from fpld.protocol import Receipt, Task
    from fpld.types import Arrays


class LocalEngine:
    """Let the nodes of a federation work in its pool, each in its folder of the run.

    `last` is called when the pool has all tasks of the last round.
    """

    def __init__(self, federation: Federation, bytes_per_token: float, last: Callable[[], None] | None = None) -> None:
        self._federation = federation
        self._bytes_per_token = bytes_per_token
        self._last = last
        self._setup = federation.setup
        self.specs = node_specs(self._setup.config)
        self.busy: set[int] = set()

    def gather(self) -> None:
        """Return at once: the nodes are here."""

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> CollectedReplies:
        """Let the nodes work until all have answered or the deadline; return who did not answer, and why."""
        names = self._federation.names
        deadline = self._setup.config.run.deadline
        absent = [Incident(names[node], "busy", "with an earlier round") for node in tasks if node in self.busy]
        # A node does one thing at a time.
        futures = {self._submit(node, task): node for node, task in tasks.items() if node not in self.busy}
        if self._last is not None and self._federation.state.round + 1 == self._setup.settings.rounds:
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
                    absent.append(Incident(names[node], "failed", str(error)))
                else:
                    self._federation.worked(node, seconds)
                    if deliver(node, frame).verdict == "asked":
                        futures[self._submit(node, self._federation.again(node))] = node
        for future, node in futures.items():
            absent.append(Incident(names[node], "late", f"no answer within {deadline:g} s"))
            self.busy.add(node)
            future.add_done_callback(partial(self._late, node))
        return CollectedReplies(absent)

    def paths(self, node: int) -> NodePaths:
        """Return where a node works."""
        return node_paths(self._federation, node)

    def _submit(self, node: int, task: Task) -> Future[tuple[bytes, float]]:
        data = task.to_bytes()
        self._federation.count(node, self._sizes(task, len(data)))
        label = ProgressLabel(self._federation.name, task.plan.round, self._federation.names[node])
        return self._setup.pool.submit(_timed, label, workers.node_round, self.specs[node], self.paths(node), data)

    def _sizes(self, task: Task, size: int) -> dict[str, int]:
        """Return what the task would be on a network, by kind: weights go once, packed against what a node has."""
        sizes = task_kinds(task, size)
        trace = self._federation.trace
        if task.broadcast == "weights":  # before the first round nodes have the base model, and that is the student
            sizes["weights"] = 0 if task.sent or not trace else trace[-1].student_bytes
        return sizes

    def _late(self, node: int, future: Future[tuple[bytes, float]]) -> None:
        """Take a frame that came after the deadline: refused and recorded, unless the round is still open."""
        if not future.cancelled() and future.exception() is None and self._federation.aggregator is not None:
            self._federation.aggregator.frame(node, future.result()[0])
        self.busy.discard(node)

    def evaluate(self, student: Arrays, *, wait: bool = True) -> Heldout:  # noqa: ARG002 - the losses are here at once
        """Evaluate the student on the held-out text of all nodes, in one job."""
        federation = self._federation
        if federation.done and self._setup.config.combine.broadcast == "weights":
            # On a network the last student goes to the nodes too, with the message that asks for their losses.
            for node in range(len(federation.names)):
                federation.count(node, {"weights": federation.deltas.size})
        arguments = evaluation_arguments(self._setup.config, self._setup.run, student)
        label = ProgressLabel(federation.name, federation.state.round, "student")
        nats = self._setup.pool.submit(run_labelled, label, workers.evaluate, *arguments).result()
        self._federation.store.write_json(WINDOWS, window_losses(nats, self._setup.config.probe.length))
        losses = mean_losses(nats)
        if federation.done:
            return Heldout(losses, self._bytes_per_token)
        # Over a network the student goes to those that the next round asks, and they evaluate it.
        asked = set(federation.asked(federation.state.round + 1))
        return Heldout([loss if node in asked else None for node, loss in enumerate(losses)], self._bytes_per_token)


def _timed(label: ProgressLabel, job: Callable[..., bytes], *arguments: Any) -> tuple[bytes, float]:
    """Run a job under a label; return its result and its seconds, those in a queue aside."""
    started = time.monotonic()
    return run_labelled(label, job, *arguments), time.monotonic() - started


def node_paths(federation: Federation, node: int) -> NodePaths:
    """Return where a node of a federation works."""
    run = federation.setup.run.path
    store = federation.store.path
    return NodePaths(store / f"nodes/{node}", run, run / text_file(node), store / PRIOR)


def submit_learning(federation: Federation, pool: Executor) -> list[Future[None]]:
    """Let nodes with models of their own kind learn from the last student."""
    return [
        pool.submit(
            run_labelled,
            ProgressLabel(federation.name, model=spec.name),
            learn_from_student,
            spec,
            node_paths(federation, spec.index),
            federation.state.student,
            federation.run_id,
        )
        for spec in node_specs(federation.setup.config)
        if spec.differs
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
    federation.run(engine)
    return federation


def run_local(config: Config, text: str, out: Path, *, resume: bool) -> list[Row]:
    """Run all of a configuration into a folder; return the table's rows. What goes on is logged."""
    store = RunFolder(out)
    with store.lock() as made, _removed_after_failed_start(store, made), Status(store) as status, loop_files(store):
        claim(store, text, resume)
        status.set("preparing")
        record_sources(config, store)
        with make_pool(config.engine.workers, config.engine.compute) as pool:
            if config.engine.workers:
                pool.submit(warm_up, config.codec.name, config.combine.rule)
            prepared = prepare(config, store)
            return _run(config, store, prepared, pool, status)


@contextmanager
def _removed_after_failed_start(store: RunFolder, made: bool) -> Iterator[None]:
    """Remove the folder that this start has made if it fails before there is anything to resume.

    Only the process that made the folder removes it, and while it holds the lock: another start on it is refused.
    """
    try:
        yield
    except FpldError:
        if made and not store.has(PREPARED):
            # The name goes first, and at once: whoever comes now makes a folder of its own, and nothing of it is lost.
            doomed = store.path.with_name(f"{TEMPORARY_PREFIX}{store.path.name}.{secrets.token_hex(4)}")
            store.path.rename(doomed)
            shutil.rmtree(doomed)
        raise


def _run(config: Config, store: RunFolder, prepared: Prepared, pool: Executor, status: Status) -> list[Row]:
    """Run the federation and its baselines side by side."""
    status.set("running")
    with ThreadPoolExecutor(1 + len(config.baselines.methods)) as threads, stop_on_interrupt(pool):
        count = config.engine.workers
        lanes = Lanes(Counting(pool, jobs_in(config)), count)
        # The federation first, baselines after. When its last nodes have workers, or stand first in the queue, then
        # baselines may have what is free, but never the last worker: distillation needs it.
        last = partial(lanes.allow, count - 1) if count > 1 else None
        main = threads.submit(federate, config, store, prepared, "fpld", lanes.lane(0), last)
        beside = partial(_federate_beside, store, prepared, lanes.lane(1))
        bench = BaselineContext(
            config, store, prepared.bytes_per_token, lanes.lane(1), main, beside, {}, [], threading.Lock()
        )
        others = [threads.submit(_baseline, name, bench, lanes.opened) for name in config.baselines.methods]
        try:
            federation = main.result()
        except BaseException:
            lanes.abandon()
            raise
        lanes.allow(count)
        rows = base_row(bench)
        nodes = federation.store.path / "nodes"
        heldout = [heldout_path(config, store, node) for node in range(len(config.nodes))]
        differ = any(node.differs for node in config.nodes)
        whose = nodes, heldout, config.probe.length, federation.run_id
        for learning in submit_learning(federation, lanes.lane(0)):
            learning.result()
        evaluations = lanes.lane(0).submit(workers.evaluate_own, *whose, everywhere=differ)
        for future in others:
            rows += future.result()
        models = evaluations.result()
        write_own(store, federation.names, own_losses(federation.names, models, rows))
        rows += own_rows(federation.names, models, prepared.bytes_per_token)
        write_privacy_report(store, config, nodes)
    return finish_run(federation, rows)


def _federate_beside(store: RunFolder, prepared: Prepared, pool: Executor, config: Config, name: str) -> Federation:
    """Run a federation that a baseline consists of."""
    return federate(config, store, prepared, name, pool)


def jobs_in(config: Config) -> int:
    """Count the jobs of a run: a node's round, a distillation, a training and an evaluation are one each."""
    predicting = config.update_bits is None and codecs.get(config.codec.name).traits.prior
    in_round = len(config.nodes) + 2 + predicting + (config.run.continuations > 0)
    adopting = sum(node.differs for node in config.nodes)
    return 2 + config.run.rounds * in_round + adopting + baseline_jobs(config)


def _baseline(name: str, bench: BaselineContext, turn: threading.Event) -> list[Row]:
    """Do a baseline when it is its turn, or take its rows from an earlier start of this run."""
    turn.wait()
    if bench.federation.done() and bench.federation.exception() is not None:
        return []
    file = f"baseline-{name}.json"
    store = bench.run
    if is_complete(store, file):
        rows: list[Row] = store.read_json(file)
        return rows
    rows = baselines.get(name)(bench)
    store.write_json(file, rows)
    record_digests(store, file)
    return rows
