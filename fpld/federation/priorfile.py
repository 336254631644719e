"""A prior as a file of integers, mapped when it is read: what was computed once is not computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs import ArrayPrior
from fpld.codecs.prior import block_digest, ranges
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.codecs import Prior
    from fpld.protocol.priors import ComputedPrior, Notes

FILE = "prior.i16"
KEPT = 1 << 31
"""Bytes up to which a prior is kept in a file; a larger one is computed again, block by block."""


def fits(shape: tuple[int, int]) -> bool:
    """Return whether a prior of this shape is kept in a file."""
    return 2 * shape[0] * shape[1] <= KEPT


def map_prior(path: Path, shape: tuple[int, int]) -> ArrayPrior:
    """Return the prior in a file; its memory is the system's to take back.

    It is mapped as a private copy: kernels are compiled anew for memory that cannot be written to.
    """
    return ArrayPrior(np.memmap(path, np.int16, "c", shape=shape))


def agree(computed: ComputedPrior, known: Sequence[Path], own: Path) -> tuple[Prior, list[int]]:
    """Return the prior that the aggregator noted, and the blocks of it that have to be asked for.

    It is read from one of the `known` files if that holds it; else it is computed, and kept in the file `own`.
    """
    for path in (*known, own):
        if (found := _noted(path, computed.notes)) is not None:
            return found, []
    if not fits(computed.shape):
        return computed, computed.missing()
    own.parent.mkdir(parents=True, exist_ok=True)
    missing = []
    with own.open("wb") as file:
        for block, (integers, agreed) in enumerate(computed.blocks()):
            file.write(integers.tobytes())
            if not agreed:
                missing.append(block)
    return (computed, missing) if missing else (map_prior(own, computed.shape), [])


def _noted(path: Path, notes: Notes) -> ArrayPrior | None:
    """Return the prior in a file if it is there and is the one that was noted."""
    if not path.exists() or path.stat().st_size != 2 * notes.shape[0] * notes.shape[1]:
        return None
    try:
        prior = map_prior(path, notes.shape)
    except InputError:  # integers that no prior has
        return None
    same = all(
        block_digest(prior.block(rows)) == digest.tobytes()
        for rows, digest in zip(ranges(notes.shape), notes.digests, strict=True)
    )
    return prior if same else None
