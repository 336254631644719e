"""What an operator knows before a run: the sites and their links, a deadline, the probe set."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from fpld import _check
from fpld.budget.limits import Uplinks
from fpld.codecs.uniform import radix
from fpld.errors import InputError
from fpld.paper.quantize import paper_bits, wire_quantizer
from fpld.protocol.priors import notes_bytes
from fpld.protocol.wire import OVERHEAD
from fpld.registry import codecs

if TYPE_CHECKING:
    from fpld.budget.limits import Sender
    from fpld.types import Floats

Channel = Literal["wire", "paper"]


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known. `deadline` is a round's time for uplinks in seconds, `c_p` the constant of (ND).

    `channel` is the wire (honest symbols, headers, ranges), or the paper's, which the simulator has. `stratified` says
    that the sites' dither is: sites that agree then do better than Theorem 2 allows independent ones. `student` are the
    bytes of the weights that a node gets in a round. `curves` are level and rate of each site's loss curve, as measured
    in a run: log loss = level - rate sqrt(bits per context).
    """

    sites: tuple[Sender, ...]
    contexts: int
    vocab: int
    deadline: float | None = None
    rounds: int = 1
    samples: float = math.inf
    c_p: float | None = None
    codec: str = "uniform"
    channel: Channel = "wire"
    stratified: bool = True
    student: float | None = None
    curves: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self) -> None:
        if not self.sites:
            raise InputError("sites must be at least one")
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise InputError(f"names of sites must differ, got {', '.join(names)}")
        _check.integer("contexts", self.contexts, least=1)
        _check.integer("vocab", self.vocab, least=2)
        _check.integer("rounds", self.rounds, least=1)
        if self.deadline is not None:
            _check.real("deadline", self.deadline, above=0.0)
        if not self.samples > 0:
            raise InputError(f"samples must be greater than 0, got {self.samples:g}")
        codecs.get(self.codec)
        if self.student is not None:
            _check.real("student", self.student, above=0.0)

    @property
    def sparse(self) -> bool:
        """Return whether labels are sampled: their noise falls as 1/bits, and the paper's bounds are not about them."""
        return codecs.get(self.codec).traits.sparse

    @property
    def theory(self) -> bool:
        """Return whether the codec is the one that the paper's bounds are of."""
        return self.codec == "uniform"

    @property
    def downlink(self) -> int | None:
        """Return the bytes that a node gets in a round, weights and notes on the prior; None if weights are unknown."""
        return None if self.student is None else round(self.student) + self.prior_notes

    @property
    def prior_notes(self) -> int:
        """Return the bytes of a round's notes on the prior."""
        return notes_bytes(self.contexts, self.vocab) if codecs.get(self.codec).traits.prior else 0

    @property
    def weights(self) -> Floats:
        """Return the weight of each site."""
        return np.array([site.allocation_weight for site in self.sites])

    @property
    def clips(self) -> Floats | None:
        """Return the clip level of each site, if all are known and matter; without them there is no bracket."""
        if not self.theory:
            return None
        levels = [site.clip_level for site in self.sites]
        return None if None in levels else np.array(levels, np.float64)

    @property
    def trace_constant(self) -> float:
        """Return c_p: as known, or that of the flattest distribution, 1 - 1/V."""
        return 1 - 1 / self.vocab if self.c_p is None else self.c_p

    @property
    def uplinks(self) -> Uplinks:
        """Return the uplinks of a round; the paper's channel has no frames and takes any number of bits."""
        codec, overhead = (self.codec, OVERHEAD) if self.channel == "wire" else (None, 0)
        return Uplinks(self.sites, self.contexts, self.vocab, self.deadline, codec, overhead)

    def caps(self) -> Floats:
        """Return the most bits per probe context of each site; a site that cannot reach its floor is an error."""
        return self.uplinks.feasible().caps

    def floors(self) -> Floats:
        """Return the least bits per probe context that the codec works with; the paper's channel takes any."""
        return self.uplinks.limits().floors

    def bytes_sent(self, bits: Floats) -> list[int]:
        """Return the bytes of each site in a round: the payload, and on the wire header and checksum."""
        up = self.uplinks
        return [up.plan(site, float(b)).budget_bytes + up.overhead for site, b in zip(self.sites, bits, strict=True)]

    def paper_bits(self, bits: Floats) -> Floats:
        """Return the bits per coordinate at which the paper's channel is as noisy as what is sent."""
        if self.channel == "paper" or self.codec != "uniform":
            return bits / self.vocab
        return np.array([self._as_paper(site, float(b)) for site, b in zip(self.sites, bits, strict=True)])

    def with_deadline(self, deadline: float) -> Known:
        """Return the same with another deadline."""
        return replace(self, deadline=deadline)

    def _as_paper(self, site: Sender, bits: float) -> float:
        # Contexts take whole bytes, some a byte more than others: the mean over them, of variances.
        whole, share = divmod((bits - self.uplinks.side(site)) / 8, 1.0)
        alike = [
            float(paper_bits(wire_quantizer(1.0, radix.layout(self.vocab, int(whole) + more).levels()), 1.0))
            for more in ((0, 1) if share else (0,))
        ]
        return -math.log2(np.average(np.exp2(-2 * np.array(alike)), weights=[1 - share, share][: len(alike)])) / 2
