"""The codec of sampled labels: an unbiased sparse estimate of what a node's probabilities add to the prior's.

With p a node's probabilities in a context, pi those of the prior that both ends hold, and one step tau for all,

    s = floor((p - pi) / tau + u)       label = pi + tau s

with u uniform in [0, 1) has the mean p in every coordinate, and nearly all s are zero. Both ends know u, and code s
given u and pi: a token of probability pi << tau can change only if u is within a few pi / tau of 0 or 1. So the cost
depends on how far p is from pi, and hardly on the size of the vocabulary. This is importance sampling by shared
randomness, as in relative entropy coding (Li and El Gamal, *Strong functional representation lemma*, 2018).

The step is the finest whose payload fits the budget. It depends on the draws of all contexts, and so on those of a
single one only slightly: the bias that this adds to a label is of the order of one over the number of symbols sent.

The modules: `steps` and `draws` are what both ends derive; `candidates` finds the coordinates that may change;
`symbol_model` on `rangecoder` codes symbols; `encoder` and `decoder` use them. docs/wire.md has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fpld.codecs.base import CodecTraits
from fpld.errors import BudgetError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fpld.codecs.samples.decoder import SamplesReader
    from fpld.types import Plan, Reals

# The least budget: bits for each context, and bytes for the header and the end of a payload.
_MIN_BITS_PER_CONTEXT = 3.0
_MIN_PAYLOAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class SamplesCodec:
    """Code unbiased labels from about three bits per context up, whatever the vocabulary; needs a prior."""

    code: int = 5
    traits: ClassVar[CodecTraits] = CodecTraits(prior=True, dither=True, refines=False, sparse=True)

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget: three bits per context, and a few bytes for the payload."""
        return _MIN_BITS_PER_CONTEXT + 8 * _MIN_PAYLOAD_BYTES / plan.contexts

    def encode(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Encode consecutive blocks of contexts with the finest step whose payload fits the budget."""
        _check_plan(plan)
        if plan.bits < self.least_bits(plan):
            raise BudgetError(f"bits must be at least {self.least_bits(plan):g} per probe context, got {plan.bits:g}")
        from fpld.codecs.samples.encoder import encode_labels  # imports numba

        return encode_labels(blocks, plan)

    def reader(self, payload: bytes | memoryview, plan: Plan) -> SamplesReader:
        """Return a reader of a payload; its method `sparse` is the fast path."""
        _check_plan(plan)
        from fpld.codecs.samples.decoder import SamplesReader

        return SamplesReader(payload, plan)


def _check_plan(plan: Plan) -> None:
    """Raise `InputError` if the plan has no fitting prior, or learnt probabilities of another codec."""
    if plan.prior is None:
        raise InputError(
            "samples codes what a node adds to a prior, and the plan has none: give it one, or use uniform"
        )
    if tuple(plan.prior.shape) != plan.shape:
        raise InputError(f"prior must have the plan's shape {plan.shape}, got {tuple(plan.prior.shape)}")
    learnt = plan.learnt
    if learnt is None:
        return
    from fpld.codecs.samples.symbol_model import MODEL_COUNT  # imports numba

    if learnt.shape != (MODEL_COUNT,) or learnt.dtype != np.uint16 or learnt.min() < 1:
        raise InputError(f"learnt must be {MODEL_COUNT} probabilities in 2^-16, uint16, none zero, got {learnt!r:.80}")


SAMPLES = SamplesCodec()
