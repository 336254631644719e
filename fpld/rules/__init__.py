"""Rules: how the nodes' decoded logits become one.

`MEAN` is the paper's. `PRECISION` weighs by inverse variance and is the best linear unbiased rule when nodes
agree but their budgets differ. `MIXTURE` averages probabilities, which suits nodes that differ. `TRIMMED` and
`MEDIAN` bound what a few bad nodes can do; they need the logits centred alike at every node, since a constant that
one node adds moves the others' order. `GEOMETRIC` is a median of probabilities; `GUARDED` mixes the nodes by a trust
that an audit of many contexts gives them, and is the one of these that serves sampled labels. `FITTED` mixes them by
weights that fit the public text, which suits nodes whose models differ in kind.
"""

from fpld.rules.averages import MEAN, PRECISION
from fpld.rules.base import Accumulator, Rule, Traits, combine
from fpld.rules.fitted import FITTED
from fpld.rules.geometric import GEOMETRIC
from fpld.rules.guarded import GUARDED
from fpld.rules.mixture import MIXTURE
from fpld.rules.robust import MEDIAN, TRIMMED

__all__ = [
    "FITTED",
    "GEOMETRIC",
    "GUARDED",
    "MEAN",
    "MEDIAN",
    "MIXTURE",
    "PRECISION",
    "TRIMMED",
    "Accumulator",
    "Rule",
    "Traits",
    "combine",
]
