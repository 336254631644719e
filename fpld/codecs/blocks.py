"""Helpers for codecs: join blocks of logits, cut decoded ones anew, and readers that decode any range by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import _check
from fpld.errors import InputError
from fpld.numerics import split
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fpld.types import Plan, Reals

    Array = np.ndarray[Any, np.dtype[Any]]


def checked_blocks(blocks: Iterable[Reals], plan: Plan) -> Iterator[tuple[range, Array]]:
    """Return blocks of logits with the contexts that they hold; refuse those that are not the plan's contexts."""
    start = 0
    for block in blocks:
        part = _check.block(block, plan.shape, start)
        yield range(start, start + len(part)), part
        start += len(part)
    _check.all_rows(start, plan.contexts)


def joined(blocks: Iterable[Reals], plan: Plan) -> Array:
    """Return all contexts in one array, for a codec that needs them at once: float64 if they are, float32 otherwise."""
    whole: Array = np.empty((0, plan.vocab))
    for rows, part in checked_blocks(blocks, plan):
        _check.finite(part, rows.start)
        dtype = np.float64 if part.dtype == np.float64 else np.float32
        if len(rows) == plan.contexts:
            whole = part.astype(dtype, copy=False)
        elif rows:
            whole = whole if rows.start else np.empty(plan.shape, dtype)
            whole[rows.start : rows.stop] = part
    return whole


def recut(blocks: Iterable[Decoded], ranges: Sequence[range], contexts: int) -> Iterator[Decoded]:
    """Cut consecutive decoded blocks anew, into ranges that follow each other from the first context on.

    Fields have two axes each, the first as long as that of `values`, or 1.
    """
    source, start = iter(blocks), 0
    waiting: list[Decoded] = []
    for rows in ranges:
        if _check.rows(rows, contexts).start != start:
            raise InputError(f"rows must follow each other from the first context on, got {rows} where {start} is next")
        start = rows.stop
        while not waiting or sum(len(block.values) for block in waiting) < len(rows):
            waiting.append(next(source))
        whole = _concatenated([block for block in waiting if len(block.values)] or waiting[:1])
        yield _part(whole, slice(0, len(rows)))
        waiting = [_part(whole, slice(len(rows), None))]


def _part(block: Decoded, rows: slice) -> Decoded:
    """Return some contexts of a block; a field with one row for all of them stays as it is."""
    count = len(block.values)

    def cut(field: Reals) -> Reals:
        return field[rows] if len(field) == count else field

    chances = None if block.chances is None else cut(block.chances)
    return Decoded(cut(block.values), cut(block.variance), cut(block.bias), chances)


def _concatenated(blocks: Sequence[Decoded]) -> Decoded:
    if len(blocks) == 1:
        return blocks[0]
    counts = [len(block.values) for block in blocks]
    chances = [block.chances for block in blocks if block.chances is not None]
    return Decoded(
        stacked([block.values for block in blocks], counts),
        stacked([block.variance for block in blocks], counts),
        stacked([block.bias for block in blocks], counts),
        stacked(chances, counts) if chances else None,
    )


def stacked(parts: Sequence[Reals], counts: Sequence[int]) -> Reals:
    """Stack a field of blocks with so many contexts each; a single one may keep one row for all of its contexts."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    whole: Reals = np.concatenate(
        [np.broadcast_to(part, (count, width)) for part, count in zip(parts, counts, strict=True)]
    )
    return whole


class SeekReader:
    """Read with a function that decodes any range of contexts, of one context at least.

    `check` is a function that refuses an unsound payload; without one, all of it is decoded.
    """

    learnt = None

    def __init__(self, plan: Plan, decode: Callable[[range], Decoded], check: Callable[[], None] | None = None) -> None:
        self._plan, self._decode, self._check = plan, decode, check

    def check(self) -> None:
        """Refuse an unsound payload."""
        if self._check is not None:
            self._check()
            return
        for _ in self.blocks():
            pass

    def blocks(self, ranges: Sequence[range] | None = None) -> Iterator[Decoded]:
        """Decode ranges of contexts."""
        nothing = np.zeros((0, self._plan.vocab), np.float32)
        for rows in split(*self._plan.shape) if ranges is None else ranges:
            if _check.rows(rows, self._plan.contexts):
                yield self._decode(rows)
            else:
                yield Decoded(nothing, nothing, nothing)
