"""Codecs: logits to bytes within a budget, and back."""

from fpld.codecs.base import Codec
from fpld.codecs.float32 import Float32Codec
from fpld.codecs.uniform import UniformCodec

__all__ = ["Codec", "Float32Codec", "UniformCodec"]
