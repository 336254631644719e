"""Codecs: logits to bytes within a budget, and back."""

from fpld.codecs.base import Codec, check, decode_blocks
from fpld.codecs.float32 import Float32Codec
from fpld.codecs.predictive import PredictiveCodec
from fpld.codecs.prior import make_prior
from fpld.codecs.uniform import UniformCodec

__all__ = ["Codec", "Float32Codec", "PredictiveCodec", "UniformCodec", "check", "decode_blocks", "make_prior"]
