"""The reader of sampled labels: symbols as a sparse change of the prior, or dense labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import _check
from fpld.codecs.samples.draws import keys_of, shares
from fpld.codecs.samples.head import HEAD_BYTES, Head
from fpld.codecs.samples.material import prior_chances
from fpld.codecs.samples.model import learnt_from
from fpld.codecs.samples.reading import Symbols, prior_block
from fpld.errors import FrameError, InputError
from fpld.numerics import split
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from fpld.codecs.prior import Eighths
    from fpld.types import Plan

    Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 20  # coordinates at a time
_LEAST_RATIO = 1 / 64  # of a label to the prior, before its logarithm is taken
_UNSENT = 1.0  # the noise of a label that is the prior itself


class Sparse(NamedTuple):
    """Hold the labels of contexts `rows` as what they add to the prior's probabilities.

    Context number k changes in tokens[starts[k] : starts[k + 1]], each of them once, by `changes`. `noise` is the
    labels' variance, summed over tokens and contexts, as the node reports it.
    """

    rows: range
    starts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    changes: npt.NDArray[np.float32]
    noise: float


class SamplesReader:
    """Read a payload of sampled labels; every pass reads the prior once, block by block, in order."""

    def __init__(self, payload: bytes | memoryview, plan: Plan) -> None:
        if len(payload) > plan.budget_bytes:
            raise FrameError(f"payload must have at most {plan.budget_bytes} bytes, got {len(payload)}")
        self.learnt: npt.NDArray[np.uint16] | None = None
        self._plan = plan
        self._head = Head.from_bytes(payload) if len(payload) else None
        self._code = np.frombuffer(payload, np.uint8)[HEAD_BYTES:].copy()  # kernels that write take it too

    def check(self) -> None:
        """Refuse an unsound payload; note what was learnt from it."""
        for _ in self._pieces(split(*self._plan.shape, _BLOCK)):
            pass

    def sparse(self, ranges: Sequence[range] | None = None) -> Iterator[Sparse]:
        """Decode consecutive ranges of contexts, from the first on, as changes of the prior."""
        noise = _UNSENT if self._head is None else self._head.noise
        tau = np.float32(0 if self._head is None else self._head.tau)
        for rows, found in self._ranges(ranges):
            starts, tokens, symbols = _joined([symbols for _, symbols in found])
            yield Sparse(rows, starts, tokens, symbols.astype(np.float32) * tau, noise * len(rows))

    def squares(self, block: Sparse) -> float:
        """Return an unbiased estimate of |p - pi|^2, summed over a block: of what a node reports it trusts nothing.

        Of a symbol s = floor(x + u), s (s + 1 - 2 u) is x^2 on average over u, which the reader knows. Zeros count for
        nothing, and no symbol for less: a node cannot push further than its squares say.
        """
        tau = 0.0 if self._head is None else self._head.tau
        places = np.repeat(np.arange(len(block.rows)), np.diff(block.starts))
        u = shares(keys_of(self._plan, block.rows)[places], block.tokens)
        changes = block.changes.astype(np.float64)
        return float((changes * (changes + tau * (1 - 2 * u))).sum())

    def blocks(self, ranges: Sequence[range] | None = None) -> Iterator[Decoded]:
        """Decode consecutive ranges of contexts, from the first on, as dense labels."""
        for _, found in self._ranges(ranges):
            parts = [self._dense(prior, *symbols) for prior, symbols in found]
            values, variance, chances = (np.concatenate(part) for part in zip(*parts, strict=True))
            yield Decoded(values, variance, np.zeros((1, 1), np.float32), chances)

    def _dense(self, prior: Eighths, starts: Array, tokens: Array, symbols: Array) -> tuple[Array, Array, Array]:
        """Return logarithms of labels, their variances by the delta method, and the labels.

        What is known of the noise is its sum; over tokens it is spread as the prior's probabilities.
        """
        known = prior_chances(prior)
        chances = known.copy()
        tau, noise = (0.0, _UNSENT) if self._head is None else (self._head.tau, self._head.noise)
        rows = np.repeat(np.arange(len(prior)), np.diff(starts))
        chances[rows, tokens] += symbols.astype(np.float32) * np.float32(tau)
        least = np.maximum(chances, known * np.float32(_LEAST_RATIO))
        return np.log(least), known * np.float32(noise) / np.square(least), chances

    def _ranges(
        self, ranges: Sequence[range] | None
    ) -> Iterator[tuple[range, list[tuple[Eighths, tuple[Array, Array, Array]]]]]:
        """Return each range with its priors and symbols, a few contexts at a time."""
        wanted = split(*self._plan.shape, _BLOCK) if ranges is None else ranges
        pieces = self._pieces(piece for rows in wanted for piece in _cut(rows, self._plan.vocab))
        start = 0
        for rows in wanted:
            if _check.rows(rows, self._plan.contexts).start != start:
                raise InputError(
                    f"rows must follow each other from the first context on, got {rows} where {start} is next"
                )
            start = rows.stop
            yield rows, [next(pieces) for _ in _cut(rows, self._plan.vocab)]

    def _pieces(self, cuts: Iterable[range]) -> Iterator[tuple[Eighths, tuple[Array, Array, Array]]]:
        symbols = None if self._head is None else Symbols(self._code, self._head.step, self._plan)
        for rows in cuts:
            prior = prior_block(self._plan, rows)
            if symbols is None:
                none = np.empty(0, np.int32)
                yield prior, (np.zeros(len(rows) + 1, np.int64), none, none)
                continue
            found = symbols.read(rows, prior)
            if rows and rows.stop == self._plan.contexts:
                symbols.end()
                self.learnt = learnt_from(symbols.learning)
            yield prior, found


def _cut(rows: range, vocab: int) -> list[range]:
    """Cut contexts into ranges that are read at once; none at all are one such range."""
    cuts = [rows[part.start : part.stop] for part in split(len(rows), vocab, _BLOCK)]
    return cuts or [rows]


def _joined(parts: list[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    """Join the symbols of consecutive contexts."""
    if len(parts) == 1:
        return parts[0]
    starts, tokens, symbols = zip(*parts, strict=True)
    bases = np.cumsum([0, *map(len, tokens)])
    moved = [own[:-1] + base for own, base in zip(starts, bases[:-1], strict=True)]
    return np.concatenate([*moved, bases[-1:]]), np.concatenate(tokens), np.concatenate(symbols)
