"""Codecs: logits to bytes within a budget, and back."""

from fpld.codecs.base import Codec, decode_blocks
from fpld.codecs.float32 import Float32Codec
from fpld.codecs.predictive import PredictiveCodec, make_prior
from fpld.codecs.uniform import UniformCodec

__all__ = ["Codec", "Float32Codec", "PredictiveCodec", "UniformCodec", "decode_blocks", "make_prior"]
