"""How many contexts, and how many bits for each: what a plan of sampled labels has, and what would be best.

The loss is the model of `fpld.budget.contexts`, fitted to the demonstration's students and brought to the plan's number
of nodes. Differences of losses are what it is for: another corpus and another student have another floor.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from fpld.budget.contexts import DEMONSTRATION, best_contexts, fit_loss

if TYPE_CHECKING:
    from fpld.budget.contexts import LossModel
    from fpld.planner.forecast import Forecast

Row = dict[str, Any]


def label_rows(plan: Forecast) -> list[Row]:
    """Return a row for the plan and one for the best split of the same bytes; none if labels are not sampled.

    `extra_loss` is what the model expects beyond the best split, in nats; between `least_bits` and `most_bits` per
    context (and contexts accordingly) it is within the model's own error.
    """
    known = plan.known
    if not known.sparse:
        return []
    model, bits = _model(len(known.sites)), float(plan.bits.mean())
    floor = float(known.floors().max())
    best = best_contexts(model, known.contexts * bits, least_bits=floor)
    extra = model.loss(known.contexts, bits) - best.loss
    planned = {"split": "planned", "contexts": known.contexts, "context_bits": bits, "extra_loss": extra}
    ideal = {"split": "best", "contexts": best.contexts, "context_bits": best.bits, "extra_loss": 0.0}
    return [
        {**planned, "least_bits": None, "most_bits": None},
        {**ideal, "least_bits": best.least_bits, "most_bits": best.most_bits},
    ]


@cache
def _model(nodes: int) -> LossModel:
    return fit_loss(DEMONSTRATION).with_nodes(nodes)
