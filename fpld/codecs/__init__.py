"""Codecs: logits to bytes within a budget, and back."""

from fpld.codecs.base import Codec, CodecTraits, Reader, SeekReader, decode, encode, joined, recut
from fpld.codecs.float32 import Float32Codec
from fpld.codecs.predictive.codec import PredictiveCodec
from fpld.codecs.prior import ArrayPrior, Prior, make_prior
from fpld.codecs.uniform.codec import UniformCodec

__all__ = [
    "ArrayPrior",
    "Codec",
    "CodecTraits",
    "Float32Codec",
    "PredictiveCodec",
    "Prior",
    "Reader",
    "SeekReader",
    "UniformCodec",
    "decode",
    "encode",
    "joined",
    "make_prior",
    "recut",
]
