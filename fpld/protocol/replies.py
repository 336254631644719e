"""What is combined at the end of a round, who looks at it meanwhile, and what they see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fpld.numerics import softmax, split
from fpld.paper.theory import weighted_bracket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.codecs import Codec
    from fpld.codecs.prior import Eighths
    from fpld.rules import Rule
    from fpld.types import Floats, Ints, Plan

    Floats32 = np.ndarray[Any, np.dtype[np.float32]]

_SAMPLE = 1 << 18  # coordinates of a node that bounds and estimates are from
_BOUNDS = 1 << 15  # coordinates at a time: what bounds are computed from stays in the cache


@dataclass(frozen=True, eq=False, slots=True)
class Replies:
    """The payloads of the nodes that answered, in the order of their numbers, with their plans.

    `own` holds what each node coded against, for sequential refinement; what is decoded is added to it. `trust` is how
    far the nodes were trusted before this round, for rules that remember. `following` are the tokens that follow the
    contexts in the public text [m], -1 where none does, for rules that compare nodes with it.
    """

    codec: Codec
    rule: Rule
    payloads: Sequence[bytes | memoryview]
    plans: Sequence[Plan]
    own: Sequence[Floats32] = ()
    trust: Floats | None = None
    following: Ints | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape [m, V] of a node's logits."""
        return self.plans[0].shape

    def sampled(self) -> Ints:
        """Return the contexts that are looked at more closely: evenly spread, about 2^18 coordinates of a node."""
        contexts, vocab = self.shape
        wanted = min(-(-_SAMPLE // vocab), contexts)
        return np.arange(wanted) * contexts // wanted

    def prior(self, rows: range, some: Ints) -> Eighths | None:
        """Return the prior of some contexts, which count from the first of the rows."""
        prior = self.plans[0].prior
        return None if prior is None else prior.block(rows)[some]


class Sample(NamedTuple):
    """All nodes' logits and variances [K, n, V] on some contexts, what they were combined to, and the prior.

    `combined` are probabilities [n, V], `prior` [n, V] is in eighths of a nat.
    """

    contexts: Ints
    values: Floats32
    variance: Floats32
    combined: Floats
    prior: Eighths | None


class Observer(Protocol):
    """Who looks at a round as it is combined, and says beforehand what it wants to see."""

    samples: bool
    squares: bool

    def look(self, sample: Sample) -> None:
        """Take a sample; they come in the order of their contexts."""
        ...


class Silent:
    """An observer that wants nothing."""

    samples = squares = False

    def look(self, sample: Sample) -> None:
        """Look at nothing."""


class Piece(NamedTuple):
    """What a block of contexts brings: of each node the summed variance and the sum of squares (if they are wanted).

    `bracket` is the sum of the bounds [lower, upper] over `contexts` contexts.
    """

    noise: Floats
    squares: Floats
    bracket: Floats
    contexts: int
    sample: Sample | None = None


def bracket(logits: Floats32, noise: Floats) -> Floats:
    """Return the sum of the bounds over contexts with these combined logits and variances of them, [n, V] each."""
    total = np.zeros(2)
    for b in split(len(logits), logits.shape[1], _BOUNDS):
        total += weighted_bracket(softmax(logits[b.start : b.stop]), noise[b.start : b.stop])
    return total
