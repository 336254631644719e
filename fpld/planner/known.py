"""What an operator knows before a run: the sites and their links, a deadline, the probe set."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from fpld import _check
from fpld.codecs.uniform import radix
from fpld.codecs.uniform.codec import MAX_BITS, RANGE_BYTES
from fpld.errors import BudgetError, InputError
from fpld.paper.quantize import paper_bits, wire_quantizer
from fpld.protocol.wire import OVERHEAD
from fpld.registry import codecs
from fpld.types import Plan
from fpld.units import show_rate

if TYPE_CHECKING:
    from fpld.types import Floats

Channel = Literal["wire", "paper"]
LIMITS = ("link", "cap", "codec")
"""What can hold a site: what its link carries before the deadline, its own cap, and what the codec can use."""


@dataclass(frozen=True, slots=True)
class Site:
    """A site: its link in bit/s, its own cap in bits per probe context and round, its weight, its clip level.

    `ranged`: each context states a range of its own on the wire, and `clip` is only what that amounts to.
    """

    name: str
    rate: float | None = None
    cap: float = math.inf
    weight: float | None = None
    clip: float | None = None
    ranged: bool = False

    def __post_init__(self) -> None:
        for field in ("rate", "weight", "clip"):
            value = getattr(self, field)
            if value is not None:
                _check.real(f"{field} of site {self.name!r}", value, above=0.0)
        if not self.cap > 0:
            raise InputError(f"cap of site {self.name!r} must be greater than 0, got {self.cap:g}")

    @property
    def allocation_weight(self) -> float:
        """Return the weight: as said, or the square of the clip level, or 1."""
        return self.weight if self.weight is not None else (self.clip or 1.0) ** 2

    @property
    def clip_level(self) -> float | None:
        """Return the clip level: as said, or the root of the weight, or None if neither is known."""
        return self.clip if self.clip is not None else None if self.weight is None else math.sqrt(self.weight)


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known. `deadline` is a round's time for uplinks in seconds, `c_p` the constant of (ND).

    `channel` is the wire (honest symbols, headers, ranges), or the paper's, which the simulator has. `stratified` says
    that the sites' dither is: sites that agree then do better than Theorem 2 allows independent ones.
    """

    sites: tuple[Site, ...]
    contexts: int
    vocab: int
    deadline: float | None = None
    rounds: int = 1
    samples: float = math.inf
    c_p: float | None = None
    codec: str = "uniform"
    channel: Channel = "wire"
    stratified: bool = True

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

    @property
    def weights(self) -> Floats:
        """Return the weight of each site."""
        return np.array([site.allocation_weight for site in self.sites])

    @property
    def clips(self) -> Floats | None:
        """Return the clip level of each site, if all are known; without them there is no bracket."""
        levels = [site.clip_level for site in self.sites]
        return None if None in levels else np.array(levels, np.float64)

    @property
    def trace_constant(self) -> float:
        """Return c_p: as known, or that of the flattest distribution, 1 - 1/V."""
        return 1 - 1 / self.vocab if self.c_p is None else self.c_p

    def limits(self) -> Floats:
        """Return [3, K]: the most bits per probe context by link, by cap and by what the codec can use."""
        link = [self._carried(site) for site in self.sites]
        most = MAX_BITS * self.vocab if self.codec == "uniform" and self.channel == "wire" else math.inf
        use = [most + self._side(site) for site in self.sites]
        return np.array([link, [site.cap for site in self.sites], use])

    def caps(self) -> Floats:
        """Return the most bits per probe context of each site; a site that cannot reach its floor is an error."""
        caps: Floats = self.limits().min(axis=0)
        floors = self.floors()
        if (caps < floors).any():
            raise BudgetError(self._infeasible(int((floors - caps).argmax()), caps, floors))
        return caps

    def floors(self) -> Floats:
        """Return the least bits per probe context that the codec works with; the paper's channel takes any."""
        if self.channel == "paper":
            return np.zeros(len(self.sites))
        codec = codecs.get(self.codec)
        return np.array([codec.least_bits(self.plan(site, 1.0)) for site in self.sites])

    def plan(self, site: Site, bits: float) -> Plan:
        """Return a plan of this size, for what the codec and the wire say about sizes."""
        clip = None if site.ranged or self.channel == "paper" else site.clip
        return Plan(bytes(16), 1, 0, bytes(32), self.contexts, self.vocab, bits, clip)

    def bytes_sent(self, bits: Floats) -> list[int]:
        """Return the bytes of each site in a round: the payload, and on the wire header and checksum."""
        header = OVERHEAD if self.channel == "wire" else 0
        return [self.plan(site, float(b)).budget_bytes + header for site, b in zip(self.sites, bits, strict=True)]

    def paper_bits(self, bits: Floats) -> Floats:
        """Return the bits per coordinate at which the paper's channel is as noisy as what is sent."""
        if self.channel == "paper" or self.codec != "uniform":
            return bits / self.vocab
        return np.array([self._as_paper(site, float(b)) for site, b in zip(self.sites, bits, strict=True)])

    def least_deadline(self) -> float:
        """Return the shortest deadline at which every site reaches its floor."""
        seconds = [
            (floor * self.contexts + 8 * self._header) / site.rate
            for site, floor in zip(self.sites, self.floors(), strict=True)
            if site.rate is not None
        ]
        return max(seconds, default=0.0)

    def with_deadline(self, deadline: float) -> Known:
        """Return the same with another deadline."""
        return replace(self, deadline=deadline)

    @property
    def _header(self) -> int:
        return OVERHEAD if self.channel == "wire" else 0

    def _side(self, site: Site) -> int:
        """Return the bits of a context's own range."""
        return 8 * RANGE_BYTES if self.channel == "wire" and self.plan(site, 1.0).clip is None else 0

    def _carried(self, site: Site) -> float:
        if site.rate is None or self.deadline is None:
            return math.inf
        return max(site.rate * self.deadline - 8 * self._header, 0.0) / self.contexts

    def _as_paper(self, site: Site, bits: float) -> float:
        # Contexts take whole bytes, some a byte more than others: the mean over them, of variances.
        whole, share = divmod((bits - self._side(site)) / 8, 1.0)
        alike = [
            float(paper_bits(wire_quantizer(1.0, radix.layout(self.vocab, int(whole) + more).levels()), 1.0))
            for more in ((0, 1) if share else (0,))
        ]
        return -math.log2(np.average(np.exp2(-2 * np.array(alike)), weights=[1 - share, share][: len(alike)])) / 2

    def _infeasible(self, worst: int, caps: Floats, floors: Floats) -> str:
        site, need = self.sites[worst], floors[worst]
        text = (
            f"site {site.name!r} may send {caps[worst] / self.vocab:.3g} bits per coordinate in a round, the codec "
            f"{self.codec!r} needs {need / self.vocab:.3g}"
        )
        if self._carried(site) < need and site.rate is not None:
            fewer = int(max(site.rate * (self.deadline or 0.0) - 8 * self._header, 0.0) / need)
            feasible = f"a deadline of at least {math.ceil(self.least_deadline() * 10) / 10:g} s"
            few = f", or at most {fewer} contexts" if fewer else ""
            return f"{text}: over {show_rate(site.rate)} feasible is {feasible}{few}"
        return f"{text}: raise its cap to at least that"
