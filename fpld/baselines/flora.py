"""FLoRA: the exact mean of what the nodes' low-rank adapters add, by stacking them.

After Z. Wang et al., *FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations*,
2024. An adapter adds B A to a weight. The mean of the nodes' B_i A_i is [B_1 ... B_K] / K times the rows of A_1 to A_K
stacked: K times the rank, and no error. FedAvg multiplies the mean of the B_i by that of the A_i, which differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld.baselines import Baseline
from fpld.baselines.fedavg import averaging_jobs, averaging_work, local_round, send_float32
from fpld.federation import workers
from fpld.node.spec import base_file
from fpld.progress import ProgressLabel, run_labelled
from fpld.storage.run_folder import HELDOUT

if TYPE_CHECKING:
    from fpld.baselines.context import BaselineContext
    from fpld.federation.evaluation import Row


def flora(context: BaselineContext) -> list[Row]:
    """Stack the adapters of nodes that made all their steps in one round; each is sent in float32."""
    config = context.config
    run = context.run
    states = list(local_round(context, context.start, 1, 1))
    size = sum(send_float32(state, 0)[0] for state in states)
    base = run.path / base_file(config, None)
    heldout = run.path / HELDOUT
    subject = ProgressLabel("baseline", model="flora")
    length = config.probe.length
    nats = context.pool.submit(run_labelled, subject, workers.evaluate_stacked, base, states, heldout, length)
    return [context.row("flora, 1 round", nats.result(), size, size)]


FLORA = Baseline(flora, lambda config: averaging_jobs(config, [1]), lambda config: averaging_work(config, [1]))
