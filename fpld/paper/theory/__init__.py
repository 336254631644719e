"""One function for each statement of the paper, each with its terms and not only their sum.

The paper: P. Dubey and X. Huo, *Matching Rates and Optimal Allocation for Federated Probe-Logit Distillation under
Heterogeneous Bandwidth Budgets*. Theorems 1 to 5, Corollary 6 and Lemmas 7 to 9 are numbered as there. Bits
are per coordinate here (b = B/V) unless a name says otherwise.
"""

from fpld.numerics import kl, softmax
from fpld.paper.theory.adaptive import adaptive_bound, c_ad, concentration, reach, transfer
from fpld.paper.theory.allocation import Objective, allocation_optimum, objective
from fpld.paper.theory.bounds import (
    Lower,
    Refined,
    Upper,
    c_3,
    c_lb,
    c_q,
    fpld_upper,
    heterogeneous_upper,
    matching_lower,
    mean_variance,
    refinement_upper,
    weighted_bracket,
)
from fpld.paper.theory.conditions import Condition, cubic_remainder, nd, se, se_prime
from fpld.paper.theory.cumulants import Expansion, Trace, expand, hessian_trace
from fpld.paper.theory.labels import label_gain, label_objective, label_optimum
from fpld.paper.theory.ratedistortion import rate_for, reverse_water_filling

__all__ = [
    "Condition",
    "Expansion",
    "Lower",
    "Objective",
    "Refined",
    "Trace",
    "Upper",
    "adaptive_bound",
    "allocation_optimum",
    "c_3",
    "c_ad",
    "c_lb",
    "c_q",
    "concentration",
    "cubic_remainder",
    "expand",
    "fpld_upper",
    "hessian_trace",
    "heterogeneous_upper",
    "kl",
    "label_gain",
    "label_objective",
    "label_optimum",
    "matching_lower",
    "mean_variance",
    "nd",
    "objective",
    "rate_for",
    "reach",
    "refinement_upper",
    "reverse_water_filling",
    "se",
    "se_prime",
    "softmax",
    "transfer",
    "weighted_bracket",
]
