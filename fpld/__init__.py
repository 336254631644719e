"""Federated Probe-Logit Distillation: one language model from text that may not leave its sites.

Start with `Plan`, a codec and a rule (examples/one_round.py reads like the paper's Algorithm 1); `fpld.theory` has
the paper's statements, `fpld.allocate` its allocators, `fpld.combine` its rules, `fpld.registry` all of them by name.
"""

from fpld import allocate, combine, refine, registry, theory
from fpld.codecs import Codec, UniformCodec
from fpld.dither import Dither
from fpld.errors import BudgetError, FpldError, FrameError, InputError, MissingExtraError
from fpld.estimate import Moments, distortion_weights
from fpld.quantize import Quantizer, centre, paper_quantizer, wire_quantizer
from fpld.types import Decoded, Plan
from fpld.wire import seal, unseal

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "Codec",
    "Decoded",
    "Dither",
    "FpldError",
    "FrameError",
    "InputError",
    "MissingExtraError",
    "Moments",
    "Plan",
    "Quantizer",
    "UniformCodec",
    "allocate",
    "centre",
    "combine",
    "distortion_weights",
    "paper_quantizer",
    "refine",
    "registry",
    "seal",
    "theory",
    "unseal",
    "wire_quantizer",
]
