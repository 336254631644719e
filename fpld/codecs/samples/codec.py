"""The codec of sampled labels: an unbiased sparse estimate of what a node's probabilities add to the prior's.

With p a node's probabilities in a context, pi those of the prior that both ends hold, and one step tau for all,

    s = floor((p - pi) / tau + u)       label = pi + tau s

with u uniform in [0, 1) is right on average in every coordinate, and nearly all s are zero. Both ends know u, and
code s given u and pi: a token of probability pi << tau can change only if u is within a few pi / tau of 0 or 1. So the
cost goes by how far p is from pi, and hardly by the size of the vocabulary. This is importance sampling by shared
randomness, as in relative entropy coding (Li and El Gamal, *Strong functional representation lemma*, 2018).

The step is the finest whose payload fits the budget. It depends on the draws of all contexts, and so on a single one
hardly: what that adds to the bias of a label is of the order of one over the number of symbols sent.
docs/wire.md has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fpld.codecs.base import Traits
from fpld.errors import BudgetError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fpld.codecs.samples.reader import SamplesReader
    from fpld.types import Plan, Reals

_LEAST_BITS, _LEAST_BYTES = 3.0, 16  # per context, and for a payload's head and end


@dataclass(frozen=True, slots=True)
class SamplesCodec:
    """Code unbiased labels from about three bits per context up, whatever the vocabulary; needs a prior."""

    code: int = 5
    traits: ClassVar[Traits] = Traits(prior=True, dither=True, refines=False, sparse=True)

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget: three bits per context, and a few bytes for the payload."""
        return _LEAST_BITS + 8 * _LEAST_BYTES / plan.contexts

    def encode(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Encode consecutive blocks of contexts with the finest step whose payload fits the budget."""
        _checked(plan)
        if plan.bits < self.least_bits(plan):
            raise BudgetError(f"bits must be at least {self.least_bits(plan):g} per probe context, got {plan.bits:g}")
        from fpld.codecs.samples import coding  # the kernels bring numba along

        return coding.encode(blocks, plan)

    def reader(self, payload: bytes | memoryview, plan: Plan) -> SamplesReader:
        """Return what reads a payload back; `sparse` is its fast way."""
        _checked(plan)
        from fpld.codecs.samples.reader import SamplesReader

        return SamplesReader(payload, plan)


def _checked(plan: Plan) -> None:
    """Refuse a plan that the codec cannot work with."""
    if plan.prior is None:
        raise InputError(
            "samples codes what a node adds to a prior, and the plan has none: give it one, or use uniform"
        )
    if tuple(plan.prior.shape) != plan.shape:
        raise InputError(f"prior must have the plan's shape {plan.shape}, got {tuple(plan.prior.shape)}")
    learnt = plan.learnt
    if learnt is None:
        return
    from fpld.codecs.samples.model import PLACES

    if learnt.shape != (PLACES,) or learnt.dtype != np.uint16 or learnt.min() < 1:
        raise InputError(f"learnt must be {PLACES} probabilities in 2^-16, uint16, none zero, got {learnt!r:.80}")


SAMPLES = SamplesCodec()
