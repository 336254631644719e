"""From a configuration to its budget: what each node may send in a round, and how the total is shared out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.budget.limits import Uplinks, senders
from fpld.budget.policy import Budget, usual_allocator
from fpld.protocol.wire import OVERHEAD
from fpld.types import MAX_BITS

if TYPE_CHECKING:
    from fpld.config import Config


def configured(config: Config, *, contexts: int, vocab: int) -> Budget:
    """Return the budget of a run, in bits per probe context; one that is infeasible is an error before any training."""
    nodes = senders(config.nodes, vocab)
    limits = Uplinks(nodes, contexts, vocab, config.budget.deadline, config.codec.name, OVERHEAD).feasible()
    budget = Budget(
        caps=np.minimum(limits.caps, MAX_BITS * vocab),
        floors=limits.floors,
        vocab=vocab,
        total=config.budget.bits(vocab),
        allocator=config.budget.allocator,
        weights=np.array([node.allocation_weight for node in nodes]),
        estimator=config.budget.estimator,
        warmup=config.budget.warmup,
        forget=config.budget.forget,
        usual=usual_allocator(config.codec.name),
    )
    budget.bits(1)
    return budget
