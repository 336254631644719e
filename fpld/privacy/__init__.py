"""Differential privacy in local training: units of text, their sampling, and the accounting.

The mechanism is DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", 2016): in each step every unit takes
part by an independent draw, its gradient is clipped, and Gaussian noise is added to the sum. Two texts are
neighbours if they differ in one unit, which is there in one and blank in the other.
"""

from fpld.privacy.accounting import (
    DpSteps,
    Mechanism,
    NoiseForecast,
    calibrate_mechanism,
    epsilon,
    forecast_noise,
    noise_for,
)
from fpld.privacy.sampling import PrivateText, RandomSource, cut_text

__all__ = [
    "DpSteps",
    "Mechanism",
    "NoiseForecast",
    "PrivateText",
    "RandomSource",
    "calibrate_mechanism",
    "cut_text",
    "epsilon",
    "forecast_noise",
    "noise_for",
]
