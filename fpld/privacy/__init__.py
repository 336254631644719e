"""Differential privacy in local training: units of text, random draws, accounting.

The mechanism is DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", 2016): in each step every unit takes
part with a small chance of its own, its gradient is clipped, and Gaussian noise is added to the sum. Two texts are
neighbours if they differ in one unit, which is there in one and blank in the other.
"""

from fpld.privacy.accounting import Spent, epsilon, noise_for
from fpld.privacy.chance import Chance
from fpld.privacy.mechanism import Mechanism, calibrated
from fpld.privacy.text import PrivateText, cut_text

__all__ = [
    "Chance",
    "Mechanism",
    "PrivateText",
    "Spent",
    "calibrated",
    "cut_text",
    "epsilon",
    "noise_for",
]
