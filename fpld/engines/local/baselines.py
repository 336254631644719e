"""What a bit buys: each node alone, all text pooled, float32 logits, and the mixture of the nodes' models as the limit.

Each at its own measured bytes. FedAvg has a module of its own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld import students
from fpld.engines.local.engine import evaluation, federate
from fpld.federation import jobs
from fpld.federation.bases import base_file
from fpld.federation.heldout import losses, mixture, windows
from fpld.federation.keep import OWN, read_of_run
from fpld.federation.prepare import prepare
from fpld.federation.private import promised
from fpld.federation.result import federation_row, measured_row
from fpld.pace import Subject, run_on
from fpld.seeds import derive_seed
from fpld.storage.folder import text_file

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from fpld.config import Config
    from fpld.federation.federation import Federation
    from fpld.federation.heldout import Nats
    from fpld.federation.result import Row
    from fpld.storage.folder import Arrays, RunFolder

    Baseline = Callable[["Bench"], list[Row]]

log = logging.getLogger(__name__)


class Bench(NamedTuple):
    """What a baseline works with: the configuration, the prepared folder, who does the jobs, and the federation.

    What several baselines share is done once, under a lock: `first` holds the trainings of a first round by the number
    of rounds, since all who average begin alike, and `judged` the evaluations of the nodes' models.
    """

    config: Config
    run: RunFolder
    bytes_per_token: float
    pool: Executor
    federation: Future[Federation]
    first: dict[int, list[Future[Any]]]
    judged: list[Future[Any]]
    lock: threading.Lock

    @property
    def start(self) -> Arrays:
        """Return the weights of the student before the first round."""
        return students.read_state(self.run.path / base_file(self.config, None))

    def models(self) -> list[Arrays]:
        """Return the nodes' models as they were after their last training, when the federation has ended."""
        federation = self.federation.result()
        files = [federation.store.path / f"nodes/{node}/{OWN}" for node in range(len(self.config.nodes))]
        return [read_of_run(file, federation.run_id) for file in files]

    def train(self, index: int, state: Arrays | None, steps: int, seed: int, rate: float | None) -> Future[Any]:
        """Fine-tune a node's model on the node's text."""
        base = self.run.path / base_file(self.config, index)
        texts = [self.run.path / text_file(index)]
        subject = Subject("baseline", model=self.config.nodes[index].name)
        promise = promised(self.config)
        return self.pool.submit(run_on, subject, jobs.finetune, base, state, texts, steps, seed, rate, promise)

    def evaluate(self, state: Arrays | None, index: int | None = None) -> Future[Any]:
        """Evaluate a model on all nodes' held-out texts."""
        arguments = evaluation(self.config, self.run, state, index)
        return self.pool.submit(run_on, Subject("baseline"), jobs.evaluate, *arguments)

    def judge(self) -> list[Nats]:
        """Return the nats of the nodes' models on all nodes' held-out texts, when the federation has ended."""
        models = self.models()
        with self.lock:
            if not self.judged:
                self.judged.extend(self.evaluate(state, index) for index, state in enumerate(models))
        return [future.result() for future in self.judged]

    def row(self, method: str, nats: Nats, uplink_bytes: int = 0, downlink_bytes: int = 0) -> Row:
        """Return a row of the table, with the loss of each window until the table is written."""
        row = measured_row(method, losses(nats), self.bytes_per_token, uplink_bytes, downlink_bytes)
        return row | {"windows": windows(nats, self.config.probe.length)}


def base(bench: Bench) -> list[Row]:
    """Evaluate the student before the first round."""
    return [bench.row("base", bench.evaluate(None).result())]


def alone(bench: Bench) -> list[Row]:
    """Train each node on its own text for as many steps as it makes in the federation, from the same base.

    In a federation of one round that is what the nodes have done.
    """
    config, nodes = bench.config, range(len(bench.config.nodes))
    if config.run.rounds == 1:
        found = bench.judge()
    else:
        log.info("baseline: each node alone")
        rate = config.baselines.rate or config.local.rate
        seeds = [derive_seed(config.run.seed, "alone", i) for i in nodes]
        trained = [bench.train(i, None, alone_steps(config, i), seeds[i], rate) for i in nodes]
        states = [future.result() for future in trained]
        found = [future.result() for future in [bench.evaluate(state, index) for index, state in enumerate(states)]]
    rows = [bench.row(f"alone: {node.name}", nats) for node, nats in zip(config.nodes, found, strict=True)]
    return rows + longer(bench)


def alone_steps(config: Config, index: int) -> int:
    """Return the steps that a node makes on its own text in all rounds."""
    return config.local.times(config.nodes[index].effort).steps * config.run.rounds


def longer(bench: Bench) -> list[Row]:
    """Train models of the nodes' own kinds alone for as many steps as they make until they have adopted the student."""
    config = bench.config
    own = [index for index, node in enumerate(config.nodes) if node.student is not None]
    steps = {index: alone_steps(config, index) + config.distill.steps for index in own}
    seeds = {index: derive_seed(config.run.seed, "alone longer", index) for index in own}
    rate = config.baselines.rate or config.local.rate
    trained = {index: bench.train(index, None, steps[index], seeds[index], rate) for index in own}
    found = {index: bench.evaluate(future.result(), index) for index, future in trained.items()}
    return [bench.row(f"alone longer: {config.nodes[index].name}", nats.result()) for index, nats in found.items()]


def pooled(bench: Bench) -> list[Row]:
    """Train on the text of all nodes for as many steps as one node makes: what could be had if text could move."""
    log.info("baseline: all text pooled")
    config, run = bench.config, bench.run
    state = bench.pool.submit(
        run_on,
        Subject("baseline", model="pooled"),
        jobs.finetune,
        run.path / base_file(config, None),
        None,
        [run.path / text_file(index) for index in range(len(config.nodes))],
        config.local.steps * config.run.rounds,
        derive_seed(config.run.seed, "pooled"),
        config.baselines.rate or config.local.rate,
        promised(config),
    ).result()
    private = run.read_json("prepared.json")["private_bytes"]  # pooling would send the text itself
    return [bench.row("pooled", bench.evaluate(state).result(), private)]


def ensemble(bench: Bench) -> list[Row]:
    """Mix the probabilities of the nodes' models after their last training: the limit of what their labels can teach.

    Nobody can send it: it takes all models at once.
    """
    return [bench.row("ensemble", mixture(bench.judge()))]


def float32(bench: Bench) -> list[Row]:
    """Run the same federation with raw float32 logits: what FedMD and FedDF average."""
    prepared = prepare(bench.config, bench.run)
    federation = federate(float32_variant(bench.config), bench.run, prepared, "float32", bench.pool)
    return [federation_row("float32 logits", federation)]


def float32_variant(config: Config) -> Config:
    """Return the same federation with raw float32 logits: what FedMD and FedDF average."""
    limits = {"bits": 32.0, "context_bits": None, "uplink": None, "clip": None}
    nodes = [node.model_copy(update=limits) for node in config.nodes]
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"continuations": 0}),
            "nodes": nodes,
            "codec": config.codec.model_copy(update={"name": "float32", "against": "nothing"}),
            "budget": config.budget.model_copy(update={"total": None, "context_total": None}),
        }
    )
