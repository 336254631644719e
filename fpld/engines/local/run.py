"""The main job: prepare, run the federation and its baselines side by side, and write what came of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from fpld.engines.local.baselines import Bench, base
from fpld.engines.local.engine import adopt, federate
from fpld.engines.pool import Counting, Lanes, make_pool
from fpld.federation import jobs
from fpld.federation.claim import claim
from fpld.federation.own import own_rows, write_own
from fpld.federation.prepare import prepare
from fpld.federation.private import write_spending
from fpld.federation.result import finish_run
from fpld.federation.status import Status
from fpld.federation.warm import warm_up
from fpld.federation.watch import watch
from fpld.registry import baselines, codecs
from fpld.storage.folder import HELDOUT, RunFolder
from fpld.storage.seals import is_sealed, seal

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from fpld.config import Config
    from fpld.federation.prepare import Prepared
    from fpld.federation.result import Row


def run(config: Config, text: str, out: Path, *, resume: bool) -> list[Row]:
    """Run all of a configuration into a folder; return the table's rows. What goes on is logged."""
    store = RunFolder(out)
    with store.lock(), Status(store) as status, watch(store):
        claim(store, text, resume)
        status.say("preparing")
        with make_pool(config.engine.workers) as workers:
            if config.engine.workers:
                workers.submit(warm_up, config.codec.name, config.combine.rule)
            prepared = prepare(config, store)
            return _run(config, store, prepared, workers, status)


def _run(config: Config, store: RunFolder, prepared: Prepared, workers: Executor, status: Status) -> list[Row]:
    """Run the federation and its baselines side by side."""
    status.say("running")
    with ThreadPoolExecutor(1 + len(config.baselines.methods)) as threads:
        count = config.engine.workers
        lanes = Lanes(Counting(workers, jobs_in(config)), count)
        # The federation first, baselines after. When its last nodes have workers, or stand first in the queue, then
        # baselines may have what is free, but never the last worker: distillation needs it.
        last = partial(lanes.allow, count - 1) if count > 1 else None
        main = threads.submit(federate, config, store, prepared, "fpld", lanes.lane(0), last)
        bench = Bench(config, store, prepared.bytes_per_token, lanes.lane(1), main, {}, [], threading.Lock())
        others = [threads.submit(_baseline, name, bench, lanes.opened) for name in config.baselines.methods]
        try:
            federation = main.result()
        except BaseException:
            lanes.abandon()
            raise
        lanes.allow(count)
        rows = base(bench)
        nodes, heldout = federation.store.path / "nodes", store.path / HELDOUT
        differ = any(node.student for node in config.nodes)
        whose = nodes, heldout, config.probe.length, federation.run_id
        for learning in adopt(federation, lanes.lane(0)):
            learning.result()
        own = lanes.lane(0).submit(jobs.evaluate_own, *whose, everywhere=differ)
        for future in others:
            rows += future.result()
        write_own(store, federation.names, own.result())
        rows += own_rows(federation.names, own.result(), prepared.bytes_per_token)
        write_spending(store, config, nodes)
    return finish_run(federation, rows)


def jobs_in(config: Config) -> int:
    """Count the jobs of a run: a node's round, a distillation, a training and an evaluation are one each."""
    nodes, rounds = len(config.nodes), config.run.rounds
    plain = rounds * (nodes + 2)
    federation = plain + rounds * (codecs.get(config.codec.name).traits.prior + (config.run.continuations > 0))
    averaging = sum(1 + nodes * count for count in config.baselines.rounds or [rounds])
    adopting = sum(node.student is not None for node in config.nodes)
    judged = nodes if "ensemble" in config.baselines.methods else 0
    each = {
        "alone": (nodes - judged if rounds == 1 else 2 * nodes) + 2 * adopting,
        "pooled": 2,
        "fedavg": averaging,
        "fedavg-1bit": averaging,
        "flora": 1 if rounds == 1 else 1 + nodes,
        "ensemble": judged,
        "float32": plain,
    }
    # Nobody knows how many jobs a baseline from outside submits.
    return 2 + federation + adopting + sum(each.get(name, 0) for name in config.baselines.methods)


def _baseline(name: str, bench: Bench, turn: threading.Event) -> list[Row]:
    """Do a baseline when it is its turn, or take its rows from an earlier start of this run."""
    turn.wait()
    if bench.federation.done() and bench.federation.exception() is not None:
        return []
    file, store = f"baseline-{name}.json", bench.run
    if is_sealed(store, file):
        rows: list[Row] = store.read_json(file)
        return rows
    rows = baselines.get(name)(bench)
    store.write_json(file, rows)
    seal(store, file)
    return rows
