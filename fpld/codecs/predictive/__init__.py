"""The predictive codec: what a node adds to a prior that both ends hold, entropy-coded."""

from fpld.codecs.predictive.codec import PredictiveCodec

__all__ = ["PredictiveCodec"]
