"""How a uniform payload is laid out: ranges first, if contexts state their own, then each context's share of bytes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.codecs.base import LARGEST
from fpld.codecs.uniform import radix
from fpld.errors import BudgetError, FrameError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.types import Floats, Plan

MAX_BITS = 15  # per coordinate: beyond this a float32 logit has little more to say
RANGE_BYTES = 4  # centre and half-range of a context
_BLOCK = 1 << 20  # coordinates at a time


class Shares(NamedTuple):
    """How the payload is shared out: the first `longer` contexts have the first layout, the others the second."""

    side: int
    longer: int
    layouts: tuple[radix.Layout, radix.Layout]

    def at(self, row: int) -> int:
        """Return the byte where a context begins."""
        size = self.layouts[1].size
        return self.side + row * size + min(row, self.longer)

    def blocks(self, rows: range) -> Iterator[tuple[radix.Layout, range]]:
        """Cut rows into blocks of one layout that are small enough to work on."""
        for layout, first, last in ((self.layouts[0], 0, self.longer), (self.layouts[1], self.longer, rows.stop)):
            stride = max(_BLOCK // layout.vocab, 1)
            for start in range(max(first, rows.start), min(last, rows.stop), stride):
                yield layout, range(start, min(start + stride, last, rows.stop))


def least_bits(plan: Plan) -> float:
    """Return the least budget in bits per probe context: a bit per coordinate, and a context's own range."""
    return float(plan.vocab if plan.clip is not None else plan.vocab + 8 * RANGE_BYTES + 8)


def payload_bytes(plan: Plan) -> int:
    """Return the exact length of a payload: the whole bytes of the budget, less what could be of no use."""
    if plan.bits < plan.vocab:
        raise BudgetError(
            f"bits must be at least {plan.vocab} per probe context (one bit per coordinate) for the uniform "
            f"codec, got {plan.bits:g}"
        )
    side = side_bytes(plan)
    if side and (plan.budget_bytes - side) * 8 < plan.contexts * plan.vocab:
        raise BudgetError(
            f"bits must be at least {least_bits(plan):g} per probe context without a clip "
            f"(each context states its own range in {8 * RANGE_BYTES} bits), got {plan.bits:g}; "
            "raise bits, or set clip"
        )
    return min(plan.budget_bytes, side + math.ceil(plan.contexts * plan.vocab * MAX_BITS / 8))


def check_size(payload: bytes | memoryview, plan: Plan) -> None:
    """Refuse a payload that has not the length which the plan asks for."""
    size = payload_bytes(plan)
    if len(payload) != size:
        raise FrameError(f"payload must be {size} bytes under this plan, got {len(payload)}")


def side_bytes(plan: Plan) -> int:
    """Return the bytes of all contexts' ranges: none with a clip."""
    return 0 if plan.clip is not None else RANGE_BYTES * plan.contexts


def shares_of(plan: Plan, size: int) -> Shares:
    """Share a payload of `size` bytes out to the contexts: the first ones take a byte more, so that none is lost."""
    return _shares(plan.contexts, plan.vocab, side_bytes(plan), size)


@lru_cache(maxsize=1024)
def _shares(contexts: int, vocab: int, side: int, size: int) -> Shares:
    share, longer = divmod(size - side, contexts)
    return Shares(side, longer, (radix.layout(vocab, share + bool(longer)), radix.layout(vocab, share)))


def read_ranges(payload: bytes | memoryview, plan: Plan, rows: range) -> tuple[Floats, Floats]:
    """Return centre and half-range of contexts; refuse what no encoder writes."""
    if plan.clip is not None:
        return np.zeros(len(rows)), np.full(len(rows), plan.clip)
    pairs = np.frombuffer(payload, "<f2", 2 * len(rows), RANGE_BYTES * rows.start).reshape(-1, 2).astype(np.float64)
    if not np.isfinite(pairs).all() or (pairs[:, 1] < 0).any():
        raise FrameError("payload states a range that is not a finite, non-negative number")
    # A sixty-fourth more: centre and half-range are rounded to float16.
    if len(pairs) and (np.abs(pairs[:, 0]) + pairs[:, 1]).max() > LARGEST * (1 + 1 / 64):
        raise FrameError(f"payload states a range that reaches beyond ±{LARGEST:g}")
    return pairs[:, 0], pairs[:, 1]
