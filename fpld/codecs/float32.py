"""Raw float32 logits: what FedMD and FedDF average, as a codec, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.errors import BudgetError, FrameError
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from fpld.types import Plan, Reals

BITS = 32


@dataclass(frozen=True, slots=True)
class Float32Codec:
    """Send each logit as a little-endian float32; the budget must be 32 bits per coordinate."""

    code: int = 2

    def least_bits(self, plan: Plan) -> float:
        """Return the least budget in bits per probe context."""
        return float(BITS * plan.vocab)

    def encode(self, logits: Reals, plan: Plan) -> bytes:
        """Return the logits' bytes."""
        return self.encode_blocks([_check.shape(logits, plan.shape)], plan)

    def encode_blocks(self, blocks: Iterable[Reals], plan: Plan) -> bytes:
        """Encode logits as they come, by blocks of contexts in order."""
        if plan.bits < self.least_bits(plan):
            raise BudgetError(f"bits must be at least {BITS * plan.vocab} per probe context, got {plan.bits:g}")
        parts, start = [], 0
        for block in blocks:
            part = _check.block(block, plan.shape, start)
            _check.finite(part, start)
            parts.append(part.astype("<f4", copy=False).tobytes())
            start += len(part)
        _check.all_rows(start, plan.contexts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def decode(
        self, payload: bytes | memoryview, plan: Plan, rows: range | None = None, dtype: npt.DTypeLike = np.float32
    ) -> Decoded:
        """Return the logits of the rows, and no variance."""
        if len(payload) != 4 * plan.contexts * plan.vocab:
            raise FrameError(f"payload must be {4 * plan.contexts * plan.vocab} bytes, got {len(payload)}")
        rows = range(plan.contexts) if rows is None else _check.rows(rows, plan.contexts)
        values = np.frombuffer(payload, "<f4").reshape(plan.shape)[rows.start : rows.stop]
        if not np.isfinite(values).all():
            raise FrameError("payload holds a logit that is not finite")
        return Decoded(values.astype(dtype), np.zeros((1, 1), dtype))


FLOAT32 = Float32Codec()
