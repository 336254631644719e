"""The main job: prepare, run the federation and its baselines side by side, and write what came of it."""

from __future__ import annotations

import platform
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

import fpld
from fpld import students
from fpld.engines.local import LocalEngine
from fpld.errors import InputError
from fpld.federation import jobs
from fpld.federation.baselines import BASELINES
from fpld.federation.jobs import make_pool
from fpld.federation.prepare import base_file, prepare
from fpld.federation.rounds import Federation, Outcome, evaluation, float32_variant
from fpld.registry import codecs
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.config import Config
    from fpld.federation.prepare import Prepared


def run(
    config: Config,
    text: str,
    out: Path,
    *,
    resume: bool,
    report: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[dict[str, Any]]:
    """Run all of a configuration into a folder; return the table's rows.

    `report` gets a line for each thing that begins or ends, `progress` how many jobs of how many are done.
    """
    store = RunFolder(out)
    with store.lock():
        claim(store, text, resume)
        prepared = prepare(config, store, report)
        with make_pool(config.engine.workers) as workers, ThreadPoolExecutor(4) as threads:
            pool = Counting(workers, jobs_in(config), progress)
            # The federation waits for its slowest node and for distillation: baselines fill the gaps.
            main = threads.submit(_federation, config, store, prepared, "fpld", pool, report)
            others = [
                threads.submit(_baseline, name, config, store, prepared, pool, report)
                for name in config.baselines.methods
            ]
            base = pool.submit(jobs.evaluate, *evaluation(config, store, None)).result()
            outcome = main.result()
            rows = [{"method": "base", "losses": base, "uplink_bytes": 0}]
            for future in others:
                rows += future.result()
        rows.append(_row("fpld", outcome))
        table = [_finish(row, prepared) for row in rows]
        base_path = store.path / base_file(config, None)
        students.write_state(store.path / "student.safetensors", outcome.student, like=base_path)
        store.write("trace.jsonl", (store.path / "fpld" / "trace.jsonl").read_bytes())
        store.write_json("result.json", table)
    return table


class Counting(Executor):
    """Hand jobs on to a pool, and say how many of them are done."""

    def __init__(self, pool: Executor, total: int, progress: Callable[[int, int], None]) -> None:
        self._pool, self._total, self._progress, self._done = pool, total, progress, 0
        self._lock = Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit to the pool."""
        future = self._pool.submit(fn, *args, **kwargs)
        future.add_done_callback(self._count)
        return future

    def _count(self, _future: Future[Any]) -> None:
        with self._lock:
            self._done += 1
            # A resumed run does less, never more.
            self._progress(min(self._done, self._total), self._total)


def jobs_in(config: Config) -> int:
    """Count the jobs of a run: a node's round, a distillation, a training and an evaluation are one each."""
    nodes, rounds = len(config.nodes), config.run.rounds
    federation = rounds * (nodes + 2 + codecs.get(config.codec.name).traits.prior)
    each = {"alone": 2 * nodes, "pooled": 2, "fedavg": rounds * nodes + 1, "float32": federation}
    return 1 + federation + sum(each[name] for name in config.baselines.methods)


def claim(store: RunFolder, text: str, resume: bool) -> None:
    """Take the folder for this configuration; a folder of another run is not overwritten."""
    if store.has("config.toml"):
        if not resume:
            raise InputError(f"{store.path} holds a run already: choose another --out, or continue it with --resume")
        if (store.path / "config.toml").read_text(encoding="utf-8") != text:
            raise InputError(
                f"{store.path} holds a run of another configuration: --resume with the one in its config.toml"
            )
        for leftover in store.path.rglob(".*"):  # half-written files of a run that was killed
            if leftover.is_file():
                leftover.unlink()
        return
    if resume:
        raise InputError(f"{store.path} holds no run to resume: leave --resume out to start one")
    store.write_json("versions.json", versions())
    store.write("config.toml", text.encode())


def _federation(
    config: Config, store: RunFolder, prepared: Prepared, name: str, pool: Executor, report: Callable[[str], None]
) -> Outcome:
    federation = Federation(config, store, prepared, name, pool=pool, report=lambda text: report(f"{name}, {text}"))
    engine = LocalEngine(federation, prepared.bytes_per_token)
    while not federation.done:
        federation.advance(engine)
    return federation.outcome()


def _baseline(
    name: str, config: Config, store: RunFolder, prepared: Prepared, pool: Executor, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Do a baseline, or take its rows from an earlier start of this run."""
    file = f"baseline-{name}.json"
    if store.has(file):
        rows: list[dict[str, Any]] = store.read_json(file)
        return rows
    if name == "float32":
        outcome = _federation(float32_variant(config), store, prepared, "float32", pool, report)
        rows = [_row("float32 logits", outcome)]
    else:
        rows = BASELINES[name](config, store, pool, report)
    store.write_json(file, rows)
    return rows


def _row(method: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "method": method,
        "losses": outcome.trace[-1]["heldout_by_node"],
        "uplink_bytes": outcome.uplink_bytes,
    }


def _finish(row: dict[str, Any], prepared: Prepared) -> dict[str, Any]:
    """Return a flat row: held-out loss averaged over the nodes' texts, and the uplink."""
    loss = float(np.mean(row["losses"]))
    return table_row(row["method"], loss, loss / float(np.log(2)) / prepared.bytes_per_token, row["uplink_bytes"])


def table_row(method: str, loss: float | None, bits_per_byte: float | None, uplink_bytes: int) -> dict[str, Any]:
    """Return a row of the table that a run ends with; what nobody measured is None."""
    return {
        "method": method,
        "heldout_loss": loss,
        "bits_per_byte": bits_per_byte,
        "perplexity": None if loss is None else float(np.exp(loss)),
        "uplink_bytes": int(uplink_bytes),
    }


def gap_closed(rows: list[dict[str, Any]]) -> float | None:
    """Return the share of the gap between the best node alone and pooled training that the federation closes."""
    loss = {row["method"]: row["heldout_loss"] for row in rows}
    lone = [value for name, value in loss.items() if name.startswith("alone")]
    if not lone or "pooled" not in loss or "fpld" not in loss or min(lone) <= loss["pooled"]:
        return None
    return (min(lone) - loss["fpld"]) / (min(lone) - loss["pooled"])  # type: ignore[no-any-return]


def versions() -> dict[str, str]:
    """Say what runs: versions of Python, of this package and of what it stands on."""
    found = {"python": platform.python_version(), "machine": platform.platform(), "fpld": fpld.__version__}
    for name in ("numpy", "torch", "tokenizers", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
