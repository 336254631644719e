"""The paper's synthetic simulator (Section 6): noisy logits of one fixed P*, sent through the paper's channel.

P* has logits uniform on [-0.97, 0.97] for each of m contexts and V tokens. They are within the smallest clip (L = 1)
with room for the noise, since the paper's channel has no overload. Node logits add N(0, 1/n). A *draw* is one seed: the
same nodes and the same dither for every budget, so that budgets are compared on equal terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs.dither import Dither
from fpld.numerics import kl, softmax
from fpld.paper.quantize import paper_quantizer
from fpld.paper.theory import nd

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Floats

REACH = 0.97
SAMPLES = 30_000
VOCAB = 256


def run_key(seed: int) -> bytes:
    """Return the run key of a seed."""
    return seed.to_bytes(16, "little")


@dataclass(frozen=True, eq=False, slots=True)
class Truth:
    """P*: logits [m, V], and c_p of condition (ND)."""

    logits: Floats
    c_p: float

    @classmethod
    def draw(cls, *, contexts: int, vocab: int = VOCAB, seed: int) -> Truth:
        """Draw P*."""
        logits = np.random.default_rng([seed, 0]).uniform(-REACH, REACH, (contexts, vocab))
        return cls(logits, nd(softmax(logits)).value)


@dataclass(frozen=True, eq=False, slots=True)
class Draw:
    """One seed: the logits of each of K nodes, and its dither in round 1; both [K, m, V]."""

    target: Truth
    logits: Floats
    dither: Floats

    @classmethod
    def make(
        cls,
        target: Truth,
        *,
        nodes: int,
        seed: int,
        samples: float = SAMPLES,
        differ: float = 0.0,
        stratified: bool = False,
    ) -> Draw:
        """Draw each node's logits: P* plus N(0, 1/samples + differ^2)."""
        shape = (nodes, *target.logits.shape)
        noise = np.random.default_rng([seed, 1]).standard_normal(shape)
        logits = target.logits + noise * np.hypot(samples**-0.5, differ)
        return cls(target, logits, node_dither(shape, round=1, seed=seed, stratified=stratified))

    def decoded(self, bits: ArrayLike, clips: ArrayLike = 1.0, *, nodes: int | None = None) -> Floats:
        """Send the logits of the first `nodes` nodes at `bits` per coordinate; one value, or one for each node."""
        quantizer = paper_quantizer(_per_node(clips), _per_node(bits))
        return quantizer(self.logits[:nodes], self.dither[:nodes])

    def kl(self, bits: ArrayLike, clips: ArrayLike = 1.0, *, nodes: int | None = None) -> float:
        """Return KL(P* || softmax of the mean), averaged over contexts."""
        mean = self.decoded(bits, clips, nodes=nodes).mean(axis=0)
        return float(kl(self.target.logits, mean - self.target.logits).mean())


def node_dither(shape: tuple[int, ...], *, round: int, seed: int, stratified: bool = False) -> Floats:
    """Return the dither [K, m, V] of all nodes in a round: independent, as in the paper, or stratified."""
    nodes, contexts, vocab = shape
    strata = [{"slot": node, "slots": nodes} if stratified else {} for node in range(nodes)]
    streams = (Dither.derive(run_key(seed), round=round, node=node, **strata[node]) for node in range(nodes))
    return np.stack([stream.block(range(contexts), vocab) for stream in streams])


def bandwidth_kl(logits: Floats, decoded: Floats) -> float:
    """Return the KL that quantization alone adds: from the mean of the nodes' logits to the mean of the decoded."""
    mean = logits.mean(axis=0)
    return float(kl(mean, decoded.mean(axis=0) - mean).mean())


def _per_node(values: ArrayLike) -> Floats:
    array = np.asarray(values, np.float64)
    return array.reshape(-1, 1, 1) if array.ndim else array
