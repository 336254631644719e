"""The uniform codec: the paper's channel on the wire."""

from fpld.codecs.uniform.codec import UniformCodec

__all__ = ["UniformCodec"]
