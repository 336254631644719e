"""What a baseline works with: a `BaselineContext` has the folder, the pool and the federation of a run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fpld import students
from fpld.federation import workers
from fpld.federation.evaluation import measured_row
from fpld.federation.workers import evaluation_arguments
from fpld.node.spec import base_file
from fpld.node.training import privacy_budget, read_kept_model
from fpld.progress import ProgressLabel, run_labelled
from fpld.storage.run_folder import OWN_MODEL, text_file
from fpld.students.heldout import mean_losses, window_losses

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from fpld.config import Config
    from fpld.federation.evaluation import Row
    from fpld.federation.rounds import Federation
    from fpld.storage.run_folder import RunFolder
    from fpld.students.heldout import Nats
    from fpld.types import Arrays


@dataclass(frozen=True, eq=False)
class BaselineContext:
    """What a baseline works with.

    Parameters
    ----------
    config, run, bytes_per_token
        The configuration, the folder with the prepared texts and models, and bytes of held-out text per token.
    pool
        Where jobs are submitted.
    federation
        The federation of the run: its result is there when the last round has ended.
    federate
        Runs another federation on the same texts, under a name.
    first_rounds, evaluations
        Work that several baselines share, done once under `lock`: the trainings of a first round by the number of
        rounds, and the evaluations of the nodes' models.
    """

    config: Config
    run: RunFolder
    bytes_per_token: float
    pool: Executor
    federation: Future[Federation]
    federate: Callable[[Config, str], Federation]
    first_rounds: dict[int, list[Future[Any]]] = field(default_factory=dict)
    evaluations: list[Future[Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def start(self) -> Arrays:
        """Return the weights of the student before the first round."""
        return students.read_state(self.run.path / base_file(self.config, None))

    def models(self) -> list[Arrays]:
        """Return the nodes' models as they were after their last training, when the federation has ended."""
        federation = self.federation.result()
        files = [federation.store.path / f"nodes/{node}/{OWN_MODEL}" for node in range(len(self.config.nodes))]
        return [read_kept_model(file, federation.run_id) for file in files]

    def train(self, index: int, state: Arrays | None, steps: int, seed: int, rate: float | None) -> Future[Any]:
        """Fine-tune a node's model on the node's text."""
        base = self.run.path / base_file(self.config, index)
        texts = [self.run.path / text_file(index)]
        subject = ProgressLabel("baseline", model=self.config.nodes[index].name)
        promise = privacy_budget(self.config, self.run.path)
        return self.pool.submit(run_labelled, subject, workers.finetune, base, state, texts, steps, seed, rate, promise)

    def evaluate(self, state: Arrays | None, index: int | None = None) -> Future[Any]:
        """Evaluate a model on all nodes' held-out texts."""
        arguments = evaluation_arguments(self.config, self.run, state, index)
        return self.pool.submit(run_labelled, ProgressLabel("baseline"), workers.evaluate, *arguments)

    def evaluate_nodes(self) -> list[Nats]:
        """Return the nats of the nodes' models on all nodes' held-out texts, when the federation has ended."""
        models = self.models()
        with self.lock:
            if not self.evaluations:
                self.evaluations.extend(self.evaluate(state, index) for index, state in enumerate(models))
        return [future.result() for future in self.evaluations]

    def row(self, method: str, nats: Nats, uplink_bytes: int = 0, downlink_bytes: int = 0) -> Row:
        """Return a row of the results table; its `windows` are dropped when the table is written."""
        row = measured_row(method, mean_losses(nats), self.bytes_per_token, uplink_bytes, downlink_bytes)
        return row | {"windows": window_losses(nats, self.config.probe.length)}
