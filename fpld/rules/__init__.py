"""Rules: how the nodes' decoded logits are combined into one target.

`MEAN` is the paper's. `PRECISION` weighs by inverse variance and is the best linear unbiased rule when nodes
agree but their budgets differ. `MIXTURE` averages probabilities, which suits nodes that differ. `TRIMMED` and
`MEDIAN` bound what a few bad nodes can do; they need the logits centred alike at every node, since a constant that
one node adds moves the others' order. `GEOMETRIC` is a median of probabilities; `GUARDED` mixes the nodes by a trust
from an audit of many contexts, and is the one of these that serves sampled labels. `FITTED` mixes them by weights that
fit the public text, which suits nodes whose models differ in kind.
"""

from fpld.rules.averages import MEAN, PRECISION
from fpld.rules.base import Accumulator, Rule, RuleTraits, combine
from fpld.rules.fitted import FITTED
from fpld.rules.guarded import GUARDED
from fpld.rules.mixture import MIXTURE
from fpld.rules.robust import GEOMETRIC, MEDIAN, TRIMMED

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
    "RuleTraits",
    "combine",
]
