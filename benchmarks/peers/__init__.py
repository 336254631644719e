"""What others do, behind the contract of a codec, with honest bits: the other rows of `fpld bench codecs`.

Each is a readable reference, written from its paper; none is part of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.casts import Float16Codec, Int8Codec
from benchmarks.peers.correlated import CorrelatedCodec
from benchmarks.peers.eden import EdenCodec
from benchmarks.peers.polynomial import PolynomialCodec
from benchmarks.peers.softlabel import SoftLabelCodec
from benchmarks.peers.stochastic import StochasticCodec
from benchmarks.peers.topk import TopKCodec

if TYPE_CHECKING:
    from fpld.codecs import Codec


def peers(nodes: int) -> dict[str, Codec]:
    """Return every peer by name, for a federation of `nodes` nodes."""
    return {
        "stochastic": StochasticCodec(),
        "correlated": CorrelatedCodec(nodes=nodes),
        "eden": EdenCodec(),
        "top-k": TopKCodec(),
        "top-k-poly": PolynomialCodec(),
        "soft-label": SoftLabelCodec(),
        "float16": Float16Codec(),
        "int8": Int8Codec(),
    }
