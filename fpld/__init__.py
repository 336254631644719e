"""Federated Probe-Logit Distillation: one language model from text that may not leave its sites.

Start with examples/quickstart.py; examples/one_round.py reads like the paper's Algorithm 1. `fpld.theory` has
the paper's statements, `fpld.allocators` its allocators, `fpld.rules` its rules, `fpld.registry` all of them by name.
"""

from fpld import registry
from fpld.budget import allocators
from fpld.budget.estimators import distortion_weights
from fpld.budget.moments import Moments
from fpld.codecs import Codec, PredictiveCodec, Traits, UniformCodec, decode, encode, make_prior
from fpld.codecs.dither import Dither
from fpld.codecs.samples.codec import SamplesCodec
from fpld.errors import BudgetError, FpldError, FrameError, InputError, MissingExtraError
from fpld.numerics import centre
from fpld.paper import refine, theory
from fpld.paper.quantize import Quantizer, paper_quantizer, wire_quantizer
from fpld.protocol.wire import seal, unseal
from fpld.rules import combine
from fpld.types import Decoded, Plan

__version__ = "0.2.0"

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
    "PredictiveCodec",
    "Quantizer",
    "SamplesCodec",
    "Traits",
    "UniformCodec",
    "allocators",
    "centre",
    "combine",
    "decode",
    "distortion_weights",
    "encode",
    "make_prior",
    "paper_quantizer",
    "refine",
    "registry",
    "seal",
    "theory",
    "unseal",
    "wire_quantizer",
]
