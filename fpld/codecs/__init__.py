"""Codecs: logits to bytes within a budget, and back."""

from fpld.codecs.base import Adding, Codec, Summing, add_decoded, check, decode_blocks, encode_blocks
from fpld.codecs.float32 import Float32Codec
from fpld.codecs.predictive.codec import PredictiveCodec
from fpld.codecs.prior import make_prior
from fpld.codecs.uniform.codec import UniformCodec

__all__ = [
    "Adding",
    "Codec",
    "Float32Codec",
    "PredictiveCodec",
    "Summing",
    "UniformCodec",
    "add_decoded",
    "check",
    "decode_blocks",
    "encode_blocks",
    "make_prior",
]
