"""The prior at a node: a student's logits by ranges of contexts, and a file of integers that keeps the prior.

A prior is asked for in order, block by block. It is computed a few whole sequences at a time, and written to a file
that is mapped when the prior is needed again.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.prior import ArrayPrior, block_digest, block_ranges, join_digests
from fpld.errors import FrameError, InputError
from fpld.progress import LoopProgress
from fpld.protocol.shared_prior import RoundingNotes, round_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from fpld.codecs.prior import Prior, PriorGrid
    from fpld.protocol.shared_prior import ComputedPrior, PriorNotes, RoundedBlock
    from fpld.students import Student

_CHUNK_VALUES = 1 << 24  # coordinates that are predicted at a time
MAX_FILE_BYTES = 1 << 31
"""Bytes up to which a prior is kept in a file; a larger one is computed again, block by block."""


class Predictions:
    """Return the logits [n, V] of any range of contexts; the last chunk of predictions is kept.

    >>> from fpld.students import NGram, NGramConfig
    >>> student, sequences = NGram(NGramConfig(vocab=8)), np.arange(12).reshape(3, 4) % 8
    >>> bool(np.array_equal(Predictions(student, sequences)(range(3, 6)), student.logits(sequences)[3:6]))
    True
    """

    def __init__(self, student: Student, sequences: np.ndarray[Any, Any]) -> None:
        self._predictor = student.predictor(sequences)
        self._count = len(sequences)
        self._length = sequences.shape[1]
        self._some = max(_CHUNK_VALUES // (student.vocab * self._length), 1)  # sequences
        self._chunk = -1
        self._logits = np.empty((0, student.vocab), np.float32)
        self._progress = LoopProgress("predicting the probe set", len(sequences), "sequence", tokens=self._length)

    def __call__(self, rows: range) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits of a range of contexts."""
        width = self._some * self._length
        chunks = range(rows.start // width, -(-rows.stop // width))
        parts = []
        for chunk in chunks:
            start = chunk * width
            logits = self._predict(chunk)
            parts.append(logits[max(rows.start - start, 0) : rows.stop - start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _predict(self, chunk: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        if chunk != self._chunk:
            # Ranges come in order, and may start again from the first.
            if chunk == 0:
                self._progress = self._progress.restarted()
            some = np.arange(chunk * self._some, min((chunk + 1) * self._some, self._count))
            self._logits = self._predictor.logits(some)
            self._chunk = chunk
            self._progress.add(len(some))
        return self._logits


def fits_in_file(shape: tuple[int, int]) -> bool:
    """Return whether a prior of this shape is kept in a file."""
    return 2 * shape[0] * shape[1] <= MAX_FILE_BYTES


def map_prior(path: Path, shape: tuple[int, int]) -> ArrayPrior:
    """Map the prior in a file, so that the system can take its memory back.

    The mapping is copy-on-write, since numba compiles kernels again for arrays that are read-only.
    """
    return ArrayPrior(np.memmap(path, np.int16, "c", shape=shape))


@contextmanager
def write_prior(
    student: Student, sequences: np.ndarray[Any, Any], path: Path, grid: PriorGrid, *, margin: float
) -> Iterator[tuple[ArrayPrior, RoundingNotes]]:
    """Predict sequences that a node has written; yield the prior and notes on it. Its file is deleted in the end."""
    shape = sequences.size, student.vocab
    predict = Predictions(student, sequences)
    blocks = round_blocks((predict(rows) for rows in block_ranges(shape)), shape, margin=margin, grid=grid)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as output:
            notes = RoundingNotes.collect(saved_to(output, blocks), student.vocab)
        yield map_prior(path, shape), notes
    finally:
        path.unlink(missing_ok=True)


def saved_to(output: BinaryIO, blocks: Iterable[RoundedBlock]) -> Iterator[RoundedBlock]:
    """Yield blocks of a prior, and write the integers of each to a file."""
    for block in blocks:
        output.write(block.integers.tobytes())
        yield block


@contextmanager
def read_rounded_prior(
    student: Student, sequences: np.ndarray[Any, Any], notes: RoundingNotes, path: Path, grid: PriorGrid
) -> Iterator[ArrayPrior]:
    """Predict sequences as a node has that sent notes on its rounding; yield the prior, as `write_prior` does.

    Raises
    ------
    FrameError
        If this machine's prediction differs from the node's by more than the notes allow for.
    """
    shape = sequences.size, student.vocab
    predict = Predictions(student, sequences)
    digests = bytearray()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as output:
            for integers in notes.apply((predict(rows) for rows in block_ranges(shape)), shape, grid):
                output.write(integers.tobytes())
                digests += block_digest(integers)
        if join_digests(bytes(digests)) != notes.digest:
            raise FrameError(
                "the node's prediction of its written text differs from the aggregator's by more than probe.margin: "
                "set it higher, or give both machines the same libraries"
            )
        yield map_prior(path, shape)
    finally:
        path.unlink(missing_ok=True)


def open_prior(computed: ComputedPrior, cached: Sequence[Path], path: Path) -> tuple[Prior, list[int]]:
    """Return the prior that the aggregator's notes describe, and the numbers of the blocks that must be requested.

    It is read from one of the `cached` files or from `path` if that holds it; else it is computed, and kept in `path`.
    """
    for file in (*cached, path):
        prior = _read_noted(file, computed.notes)
        if prior is not None:
            return prior, []
    if not fits_in_file(computed.shape):
        return computed, computed.missing()
    path.parent.mkdir(parents=True, exist_ok=True)
    missing = []
    with path.open("wb") as output:
        for block, (integers, agreed) in enumerate(computed.blocks()):
            output.write(integers.tobytes())
            if not agreed:
                missing.append(block)
    return (computed, missing) if missing else (map_prior(path, computed.shape), [])


def _read_noted(path: Path, notes: PriorNotes) -> ArrayPrior | None:
    """Return the prior in a file if the notes describe it; None otherwise."""
    if not path.exists() or path.stat().st_size != 2 * notes.shape[0] * notes.shape[1]:
        return None
    try:
        prior = map_prior(path, notes.shape)
    except InputError:  # integers that no prior has
        return None
    same = all(
        block_digest(prior.block(rows)) == digest.tobytes()
        for rows, digest in zip(block_ranges(notes.shape), notes.digests, strict=True)
    )
    return prior if same else None
