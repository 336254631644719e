"""The predictive codec: bits where KL feels them, and only for what the prior does not know.

To second order KL = 1/2 sum_v p_v (d log p_v)^2, so an error matters by the square root of a token's probability. With
p the node's probability and pi that of the prior that both ends hold, the codec quantizes, with one step for all,

    y = 4 pi^(1/4) (p^(1/4) - pi^(1/4))     dy = (p pi)^(1/4) d log p

so that an error of y costs about the same KL everywhere: reverse water-filling over coordinates, for weights between
the node's and the prior's, since the mean over nodes lies between them too. Rare tokens fall below the step by
themselves and cost nothing, neither bits nor time. Where the prior is wrong or there is none, the node quantizes

    y = 2 sqrt(p)                           dy = sqrt(p) d log p

instead: a head of likely tokens, and for each context the mass of its tail. The node tries both on some contexts and
takes what loses less. It also chooses whether to dither, if the plan gives it a slot: nodes that agree win by that, but
at a fraction of a bit dither costs more than it brings, and nodes that differ by more than a step have independent
errors without it. The step is searched so that the payload fills the budget and never exceeds it.

What is decoded is the mean of what falls into a cell, which shrinks it towards the prior, and the variance that is
reported is the one that the encoder measured; both travel in the payload's head. docs/wire.md has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fpld import _check
from fpld.errors import BudgetError, InputError
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    import numpy.typing as npt

    from fpld.codecs.base import Sum
    from fpld.types import Plan, Reals


@dataclass(frozen=True, slots=True)
class PredictiveCodec:
    """Code what a node's distribution adds to the prior of the plan; works from a hundredth of a bit up.

    `strict` gives every context the same share of the budget instead of pooling it.
    """

    code: int = 3
    strict: bool = False
    uses_prior: ClassVar[bool] = True
    shrinks: ClassVar[bool] = True  # what is decoded is a mean of what may have been meant

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget: a hundredth of a bit per coordinate."""
        return plan.vocab / 100

    def encode(self, logits: Reals, plan: Plan) -> bytes:
        """Choose how to code on some contexts, then find the finest step whose payload fits the budget."""
        logits = _check.logits(logits, plan.shape)
        if plan.bits < self.least_bits(plan):
            raise BudgetError(f"bits must be at least {self.least_bits(plan):g} per probe context, got {plan.bits:g}")
        payload: bytes = self._coding.encode(logits, plan)
        return payload

    def decode(
        self, payload: bytes | memoryview, plan: Plan, rows: range | None = None, dtype: npt.DTypeLike = np.float32
    ) -> Decoded:
        """Decode a block of contexts; the coder is sequential, so the cost is that of all contexts."""
        rows = range(plan.contexts) if rows is None else _check.rows(rows, plan.contexts)
        before, after = range(rows.start), range(rows.stop, plan.contexts)
        return list(self.stream(payload, plan, [before, rows, after], dtype))[1]

    def stream(
        self,
        payload: bytes | memoryview,
        plan: Plan,
        blocks: Sequence[range],
        dtype: npt.DTypeLike = np.float32,
    ) -> Iterator[Decoded]:
        """Decode consecutive blocks of contexts, one pass for all; the last one checks that nothing is left over."""
        source = self._coding.blocks(payload, plan)
        values = np.empty((0, plan.vocab), np.float32)
        variance = values
        for rows in blocks:
            parts, missing = [(values, variance)], len(rows) - len(values)
            while missing > 0:
                parts.append(next(source))
                missing -= len(parts[-1][0])
            values, variance = (
                np.concatenate(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True)
            )
            yield Decoded(values[: len(rows)].astype(dtype), variance[: len(rows)].astype(dtype))
            values, variance = values[len(rows) :], variance[len(rows) :]

    def sums(
        self,
        payloads: Sequence[bytes | memoryview],
        plans: Sequence[Plan],
        *,
        sample: int = 0,
        mixture: bool = False,
        threads: int = 1,
    ) -> Iterator[Sum]:
        """Add up nodes block by block: what is zero at a node costs nothing."""
        if self.strict or any(plan.prior is not plans[0].prior for plan in plans):
            raise InputError("only pooled payloads of nodes that share one prior are added up together")
        from fpld.codecs.predictive import summing

        return summing.sums(payloads, plans, sample, mixture, threads)

    def check(self, payload: bytes | memoryview, plan: Plan) -> npt.NDArray[np.uint16] | None:
        """Refuse an unsound payload, without the cost of reconstruction; return the tables that it ends with."""
        tables: npt.NDArray[np.uint16] | None = self._coding.check(payload, plan)
        return tables

    @property
    def _coding(self) -> ModuleType:
        """Import the kernels when they are first used: they bring numba along."""
        from fpld.codecs.predictive import coding, strict

        return strict if self.strict else coding


PREDICTIVE = PredictiveCodec()
PREDICTIVE_STRICT = PredictiveCodec(code=4, strict=True)
