"""FLoRA: what the nodes' adapters do, averaged exactly, by stacking them.

After Z. Wang et al., *FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations*,
2024. An adapter adds B A to a weight. The mean of the nodes' B_i A_i is [B_1 ... B_K] / K times A_1 to A_K one above
the other: K times the rank, and no error. FedAvg multiplies the mean of the B_i by that of the A_i, which is not that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld.engines.local.averaging import as_float32, trained
from fpld.federation import jobs
from fpld.federation.bases import base_file
from fpld.pace import Subject, run_on
from fpld.storage.folder import HELDOUT

if TYPE_CHECKING:
    from fpld.engines.local.baselines import Bench
    from fpld.federation.result import Row


def flora(bench: Bench) -> list[Row]:
    """Stack the adapters of nodes that made all their steps in one round; each is sent in float32."""
    config, run = bench.config, bench.run
    states = list(trained(bench, bench.start, 1, 1))
    sizes = [as_float32(state, 0)[0] for state in states]
    base, heldout = run.path / base_file(config, None), run.path / HELDOUT
    subject, length = Subject("baseline", model="flora"), config.probe.length
    nats = bench.pool.submit(run_on, subject, jobs.evaluate_stacked, base, states, heldout, length)
    return [bench.row("flora, 1 round", nats.result(), sum(sizes), sum(sizes))]
