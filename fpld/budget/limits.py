"""Limits of what each node may send in a round: its link, its cap, and the most and the least bits of the codec.

A run and the planner both take their limits from here. All are in bits of payload per probe context. A link carries
whole frames, so the frame's overhead is subtracted from its capacity; a cap is on the payload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld import validation
from fpld.codecs.uniform.layout import MAX_BITS, RANGE_BYTES
from fpld.errors import BudgetError, InputError
from fpld.registry import codecs
from fpld.types import Plan
from fpld.units import show_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.config import NodeSection
    from fpld.types import Floats

LIMIT_KINDS = ("link", "cap", "codec")
"""What can limit a node: its link's capacity before the deadline, its cap, and the bits that the codec can use."""
_MAX_USEFUL_BITS = {"uniform": MAX_BITS}  # bits per coordinate beyond which a codec gains nothing


@dataclass(frozen=True, slots=True)
class Sender:
    """Describe a node as a sender.

    Parameters
    ----------
    rate
        Bits per second of its link.
    cap
        Bits per probe context and round.
    ranged
        Each context states its range on the wire; `clip` is then only what the ranges amount to.
    useful
        Bits per context beyond which its codec had no use for more in earlier rounds.
    """

    name: str
    rate: float | None = None
    cap: float = math.inf
    weight: float | None = None
    clip: float | None = None
    ranged: bool = False
    useful: float = math.inf

    def __post_init__(self) -> None:
        for field in ("rate", "weight", "clip"):
            value = getattr(self, field)
            if value is not None:
                validation.real(f"{field} of node {self.name!r}", value, above=0.0)
        if not self.cap > 0:
            raise InputError(f"cap of node {self.name!r} must be greater than 0, got {self.cap:g}")

    @property
    def allocation_weight(self) -> float:
        """Return the weight: the configured one, or the square of the clip level, or 1."""
        return self.weight if self.weight is not None else (self.clip or 1.0) ** 2

    @property
    def clip_level(self) -> float | None:
        """Return the clip level: the configured one, or the root of the weight, or None without either."""
        return self.clip if self.clip is not None else None if self.weight is None else math.sqrt(self.weight)


def senders(nodes: Sequence[NodeSection], vocab: int) -> tuple[Sender, ...]:
    """Return the nodes of a configuration as senders."""
    return tuple(
        Sender(
            node.name,
            node.uplink,
            _cap(node, vocab),
            node.weight,
            node.clip,
            ranged=node.clip is None,
        )
        for node in nodes
    )


def _cap(node: NodeSection, vocab: int) -> float:
    """Return the cap of a node in bits per probe context."""
    if node.bits is not None:
        return node.bits * vocab
    return math.inf if node.context_bits is None else node.context_bits


class Limits(NamedTuple):
    """The most bits of each node by each of `LIMIT_KINDS` [3, K], and the least that the codec works with [K]."""

    most: Floats
    floors: Floats

    @property
    def caps(self) -> Floats:
        """Return the most bits of each node."""
        caps: Floats = self.most.min(axis=0)
        return caps


@dataclass(frozen=True, slots=True)
class Uplinks:
    """Describe the uplinks of a round: senders, probe set, deadline in seconds, codec, overhead of a frame in bytes.

    Without a codec any number of bits can be sent and used, as in the paper. `text` is the least bits per context that
    written text needs besides the labels' own (`fpld.protocol.written`).
    """

    nodes: Sequence[Sender]
    contexts: int
    vocab: int
    deadline: float | None
    codec: str | None
    overhead: int
    text: float = 0.0

    def limits(self) -> Limits:
        """Return the limits of all nodes."""
        most = [[measure(node) for node in self.nodes] for measure in (self._carried, lambda n: n.cap, self._useful)]
        return Limits(np.array(most), np.array([self._floor(node) for node in self.nodes]))

    def feasible(self) -> Limits:
        """Return the limits of all nodes; raise BudgetError, with a remedy, if a node cannot reach its floor."""
        limits = self.limits()
        short = limits.floors - limits.caps
        if (short > 0).any():
            worst = int(short.argmax())
            raise BudgetError(self._infeasible(self.nodes[worst], limits.caps[worst], limits.floors[worst]))
        return limits

    def plan(self, node: Sender, bits: float) -> Plan:
        """Return a plan with these bits, to ask the codec about sizes."""
        clip = None if node.ranged or self.codec is None else node.clip
        return Plan(bytes(16), 1, 0, bytes(32), self.contexts, self.vocab, bits, clip)

    def range_bits(self, node: Sender) -> int:
        """Return the bits of a context's range on the wire; none with a fixed clip."""
        return 8 * RANGE_BYTES if self.codec is not None and self.plan(node, 1.0).clip is None else 0

    def least_deadline(self) -> float:
        """Return the shortest deadline at which every node with a link reaches its floor."""
        needs = [(self._floor(node) * self.contexts + 8 * self.overhead, node.rate) for node in self.nodes]
        return max((bits / rate for bits, rate in needs if rate is not None), default=0.0)

    def _carried(self, node: Sender) -> float:
        if node.rate is None or self.deadline is None:
            return math.inf
        return max(node.rate * self.deadline - 8 * self.overhead, 0.0) / self.contexts

    def _useful(self, node: Sender) -> float:
        return min(_MAX_USEFUL_BITS.get(self.codec or "", math.inf) * self.vocab + self.range_bits(node), node.useful)

    def _floor(self, node: Sender) -> float:
        return 0.0 if self.codec is None else max(self._codec_floor(node), self.text)

    def _codec_floor(self, node: Sender) -> float:
        return codecs.get(self.codec or "").least_bits(self.plan(node, 1.0))

    def _infeasible(self, node: Sender, cap: float, need: float) -> str:
        who = f"the codec {self.codec!r}" if self._codec_floor(node) >= need else "written text beside its labels"
        text = f"node {node.name!r} may send {cap:,.4g} bits per context a round, {who} needs {need:,.4g}"
        if node.rate is None or self._carried(node) >= need:
            return f"{text}: raise its context_bits to at least that"
        fewer = int(max(node.rate * (self.deadline or 0.0) - 8 * self.overhead, 0.0) / need)
        few = f", or at most {fewer} contexts" if fewer else ""
        least = math.ceil(self.least_deadline() * 10) / 10
        return f"{text}: over {show_rate(node.rate)} feasible is a deadline of at least {least:g} s{few}"
