"""Raw float32 logits, as FedMD and FedDF send them: the codec to compare others with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fpld import validation
from fpld.codecs.base import MAX_LOGIT, CodecTraits, SeekReader, checked_blocks
from fpld.errors import BudgetError, FrameError, InputError
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fpld.codecs.base import Reader
    from fpld.types import Plan, Reals

BITS_PER_LOGIT = 32


@dataclass(frozen=True, slots=True)
class Float32Codec:
    """Send each logit as a little-endian float32; the budget must be 32 bits per coordinate."""

    code: int = 2
    traits: ClassVar[CodecTraits] = CodecTraits(seeks=True)

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget in bits per probe context."""
        return float(BITS_PER_LOGIT * plan.vocab)

    def encode(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Return the logits' bytes."""
        if plan.bits < self.least_bits(plan):
            raise BudgetError(
                f"bits must be at least {BITS_PER_LOGIT * plan.vocab} per probe context, got {plan.bits:g}"
            )
        parts = []
        for rows, part in checked_blocks(blocks, plan):
            validation.finite(part, rows.start)
            if np.abs(part).max() > MAX_LOGIT:
                raise InputError(f"logits must lie within ±{MAX_LOGIT:g}, got {np.abs(part).max():g}")
            parts.append(part.astype("<f4", copy=False).tobytes())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def reader(self, payload: bytes | memoryview, plan: Plan) -> Reader:
        """Return a reader of the logits, which have no variance."""
        if len(payload) != 4 * plan.contexts * plan.vocab:
            raise FrameError(f"payload must be {4 * plan.contexts * plan.vocab} bytes, got {len(payload)}")
        logits = np.frombuffer(payload, "<f4").reshape(plan.shape)
        exact = np.zeros((1, 1), np.float32)

        def decode(rows: range) -> Decoded:
            values = logits[rows.start : rows.stop]
            if not (np.abs(values) <= MAX_LOGIT).all():  # false for NaN too
                raise FrameError(f"payload holds a logit that is not within ±{MAX_LOGIT:g}")
            return Decoded(values.astype(np.float32), exact, exact)

        return SeekReader(plan, decode)


FLOAT32 = Float32Codec()
