"""What a bit buys: each node alone, all text pooled, FedAvg of weights; at their own measured uplink."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld.engines.local.engine import evaluation, federate
from fpld.federation import jobs
from fpld.federation.bases import base_file
from fpld.federation.prepare import prepare
from fpld.federation.result import federation_row, measured_row
from fpld.federation.training import average
from fpld.seeds import derive_seed
from fpld.storage.folder import text_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from fpld.config import Config
    from fpld.federation.result import Row
    from fpld.storage.folder import Arrays, RunFolder

    Baseline = Callable[["Bench"], list[Row]]

log = logging.getLogger(__name__)


class Bench(NamedTuple):
    """What a baseline works with: the configuration, the prepared folder, and who does the jobs."""

    config: Config
    run: RunFolder
    bytes_per_token: float
    pool: Executor

    def train(self, index: int, state: Arrays | None, steps: int, seed: int, rate: float | None) -> Future[Any]:
        """Fine-tune a node's model on the node's text."""
        base = self.run.path / base_file(self.config, index)
        texts = [self.run.path / text_file(index)]
        return self.pool.submit(jobs.finetune, base, state, texts, steps, seed, rate)

    def evaluate(self, state: Arrays | None, index: int | None = None) -> Future[Any]:
        """Evaluate a model on all nodes' held-out texts."""
        return self.pool.submit(jobs.evaluate, *evaluation(self.config, self.run, state, index))

    def row(self, method: str, losses: Future[Any], uplink_bytes: int = 0, downlink_bytes: int = 0) -> Row:
        """Return a row of the table."""
        return measured_row(method, losses.result(), self.bytes_per_token, uplink_bytes, downlink_bytes)


def base(bench: Bench) -> list[Row]:
    """Evaluate the student before the first round."""
    return [bench.row("base", bench.evaluate(None))]


def alone(bench: Bench) -> list[Row]:
    """Train each node on its own text for as many steps as it makes in the federation, from the same base."""
    log.info("baseline: each node alone")
    config = bench.config
    steps, rate = config.local.steps * config.run.rounds, config.baselines.rate or config.local.rate
    nodes = range(len(config.nodes))
    trained = [bench.train(i, None, steps, derive_seed(config.run.seed, "alone", i), rate) for i in nodes]
    losses = [bench.evaluate(future.result(), index) for index, future in enumerate(trained)]
    return [bench.row(f"alone: {node.name}", loss) for node, loss in zip(config.nodes, losses, strict=True)]


def pooled(bench: Bench) -> list[Row]:
    """Train on the text of all nodes for as many steps as one node makes: what could be had if text could move."""
    log.info("baseline: all text pooled")
    config, run = bench.config, bench.run
    state = bench.pool.submit(
        jobs.finetune,
        run.path / base_file(config, None),
        None,
        [run.path / text_file(index) for index in range(len(config.nodes))],
        config.local.steps * config.run.rounds,
        derive_seed(config.run.seed, "pooled"),
        config.baselines.rate or config.local.rate,
    ).result()
    private = run.read_json("prepared.json")["private_bytes"]  # pooling would send the text itself
    return [bench.row("pooled", bench.evaluate(state), private)]


def fedavg(bench: Bench) -> list[Row]:
    """Average float32 weights each round, with the same local steps."""
    config, state, uplink = bench.config, None, 0
    nodes = range(len(config.nodes))
    for round in range(1, config.run.rounds + 1):
        log.info("baseline: FedAvg, round %d", round)
        rate, seeds = (
            config.local.rate_in(round, config.run.rounds),
            [derive_seed(config.run.seed, "local", round, index) for index in nodes],
        )
        futures = [bench.train(index, state, config.local.steps, seeds[index], rate) for index in nodes]
        states = [future.result() for future in futures]
        uplink += sum(array.nbytes for weights in states for array in weights.values())
        state = average(states)
    return [bench.row("fedavg", bench.evaluate(state), uplink)]


def float32(bench: Bench) -> list[Row]:
    """Run the same federation with raw float32 logits: what FedMD and FedDF average."""
    prepared = prepare(bench.config, bench.run)
    federation = federate(float32_variant(bench.config), bench.run, prepared, "float32", bench.pool)
    return [federation_row("float32 logits", federation)]


def float32_variant(config: Config) -> Config:
    """Return the same federation with raw float32 logits: what FedMD and FedDF average."""
    nodes = [node.model_copy(update={"bits": 32.0, "uplink": None, "clip": None}) for node in config.nodes]
    return config.model_copy(
        update={
            "nodes": nodes,
            "codec": config.codec.model_copy(update={"name": "float32", "against": "nothing"}),
            "budget": config.budget.model_copy(update={"total": None}),
        }
    )
