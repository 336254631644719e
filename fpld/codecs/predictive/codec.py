"""The predictive codec: bits in proportion to their effect on KL, and only for what the prior does not know.

To second order KL = 1/2 sum_v p_v (d log p_v)^2, so an error matters by the square root of a token's probability. With
p the node's probability and pi that of the prior that both ends hold, the codec quantizes, with one step for all,

    y = 4 pi^(1/4) (p^(1/4) - pi^(1/4))     dy = (p pi)^(1/4) d log p

so that an error of y costs about the same KL everywhere: reverse water-filling over coordinates, for weights between
the node's and the prior's, since the mean over nodes lies between them too. Rare tokens fall below the step by
themselves and cost nothing, neither bits nor time. Where the prior is wrong or there is none, the node quantizes

    y = 2 sqrt(p)                           dy = sqrt(p) d log p

instead: the likely tokens, and for each context the mass of its tail. The node tries both on some contexts and
takes what loses less. It also chooses whether to dither, if the plan gives it a slot: nodes that agree win by that, but
at a fraction of a bit dither costs more than it brings, and nodes that differ by more than a step have independent
errors without it. The step is searched so that the payload fills the budget and never exceeds it.

What is decoded is the mean of what falls into a cell, which shrinks it towards the prior, and the variance that is
reported is the one that the encoder measured; both travel in the payload's header. docs/wire.md has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fpld.codecs.base import CodecTraits, joined, recut
from fpld.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fpld.codecs.base import Learnt, Reader
    from fpld.types import Decoded, Plan, Reals


@dataclass(frozen=True, slots=True)
class PredictiveCodec:
    """Code what a node's distribution adds to the prior of the plan; works from a hundredth of a bit up."""

    code: int = 3
    traits: ClassVar[CodecTraits] = CodecTraits(prior=True, dither=True, refines=False)

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget: a hundredth of a bit per coordinate."""
        return plan.vocab / 100

    def encode(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Choose how to code on some contexts, then find the finest step whose payload fits the budget."""
        if plan.bits < self.least_bits(plan):
            raise BudgetError(f"bits must be at least {self.least_bits(plan):g} per probe context, got {plan.bits:g}")
        from fpld.codecs.predictive.encoder import encode_logits  # brings numba along

        return encode_logits(joined(blocks, plan), plan)

    def reader(self, payload: bytes | memoryview, plan: Plan) -> Reader:
        """Return a reader; the coder is sequential, so it begins with the first context."""
        return _Reader(payload, plan)


class _Reader:
    """Read a payload; `check` does without the cost of reconstruction."""

    def __init__(self, payload: bytes | memoryview, plan: Plan) -> None:
        self._payload = payload
        self._plan = plan
        self.learnt: Learnt | None = None

    def check(self) -> None:
        """Raise `FrameError` for an unsound payload, and keep what the coder has learnt from it."""
        from fpld.codecs.predictive.decoder import check_payload  # brings numba along

        self.learnt = check_payload(self._payload, self._plan)

    def blocks(self, ranges: Sequence[range] | None = None) -> Iterator[Decoded]:
        """Decode consecutive blocks of contexts, one pass for all; the last one checks that nothing is left over."""
        from fpld.codecs.predictive.decoder import decode_blocks  # brings numba along

        blocks = decode_blocks(self._payload, self._plan)
        return blocks if ranges is None else recut(blocks, ranges, self._plan.contexts)


PREDICTIVE = PredictiveCodec()
