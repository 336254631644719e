"""The reader of sampled labels: symbols as a sparse change of the prior, or dense labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import _check
from fpld.codecs.samples.chances import prior_chances
from fpld.codecs.samples.draws import keys_of, shares
from fpld.codecs.samples.grid import OCTAVE
from fpld.codecs.samples.head import Head
from fpld.codecs.samples.listing import Lister, Room
from fpld.codecs.samples.model import learnt_from
from fpld.codecs.samples.rangecoder import to_read
from fpld.codecs.samples.reading import Symbols, prior_block
from fpld.errors import FrameError, InputError
from fpld.numerics import split
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from fpld.codecs.prior import Eighths
    from fpld.types import Plan

    Array = np.ndarray[Any, np.dtype[Any]]
    Found = tuple[Array, Array, Array]
    Piece = tuple[range, Eighths, list[Found]]

_BLOCK = 1 << 20  # coordinates at a time
_TOGETHER = 1 << 21  # of all nodes that are read together: of many nodes, fewer contexts at a time
_ALIKE = 4 * OCTAVE  # steps that nodes are read together with
_LISTED = 128  # nodes whose places are listed at once: as many as the coordinates of each, they take room
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
        self._plan = plan
        self._learning: Array | None = None
        self._head = Head.from_bytes(payload) if len(payload) else None
        if self._head and self._head.finer >= plan.contexts:
            raise FrameError(f"payload's finer step must be that of fewer contexts than {plan.contexts}")
        start = self._head.size if self._head else 0
        self._code = to_read(payload)[start:]

    @property
    def learnt(self) -> npt.NDArray[np.uint16] | None:
        """Return what was learnt from the payload, once all of it was read."""
        return None if self._learning is None else learnt_from(self._learning)

    def check(self) -> None:
        """Refuse an unsound payload; note what was learnt from it."""
        for _ in _pieces([self], split(*self._plan.shape, _BLOCK)):
            pass

    def sparse(self, ranges: Sequence[range] | None = None) -> Iterator[Sparse]:
        """Decode consecutive ranges of contexts, from the first on, as changes of the prior."""
        for (block,) in sparse_together([self], ranges):
            yield block

    def squares(self, block: Sparse) -> float:
        """Return an unbiased estimate of |p - pi|^2, summed over a block: of what a node reports it trusts nothing.

        Of a symbol s = floor(x + u), s (s + 1 - 2 u) is x^2 on average over u, which the reader knows. Zeros count for
        nothing, and no symbol for less: a node cannot push further than its squares say.
        """
        places = np.repeat(np.arange(len(block.rows)), np.diff(block.starts))
        u = shares(keys_of(self._plan, block.rows)[places], block.tokens)
        changes = block.changes.astype(np.float64)
        return float((changes * (changes + self._taus(block.rows)[places] * (1 - 2 * u))).sum())

    def blocks(self, ranges: Sequence[range] | None = None) -> Iterator[Decoded]:
        """Decode consecutive ranges of contexts, from the first on, as dense labels."""
        for _, found in _ranges([self], ranges):
            parts = [self._dense(rows, prior, *symbols) for rows, prior, (symbols,) in found]
            values, variance, chances = (np.concatenate(part) for part in zip(*parts, strict=True))
            yield Decoded(values, variance, np.zeros((1, 1), np.float32), chances)

    def _dense(
        self, rows: range, prior: Eighths, starts: Array, tokens: Array, symbols: Array
    ) -> tuple[Array, Array, Array]:
        """Return logarithms of labels, their variances by the delta method, and the labels.

        What is known of the noise is its sum; over tokens it is spread as the prior's probabilities.
        """
        known = prior_chances(prior)
        chances = known.copy()
        places = np.repeat(np.arange(len(prior)), np.diff(starts))
        chances[places, tokens] += symbols.astype(np.float32) * self._taus(rows)[places]
        least = np.maximum(chances, known * np.float32(_LEAST_RATIO))
        return np.log(least), known * np.float32(self._noise) / np.square(least), chances

    def _sparse(self, rows: range, parts: list[Found]) -> Sparse:
        starts, tokens, symbols = _joined(parts)
        changes = symbols.astype(np.float32) * np.repeat(self._taus(rows), np.diff(starts))
        return Sparse(rows, starts, tokens, changes, self._noise * len(rows))

    @property
    def _noise(self) -> float:
        return _UNSENT if self._head is None else self._head.noise

    def _taus(self, rows: range) -> npt.NDArray[np.float32]:
        """Return the step of each of these contexts."""
        return np.zeros(len(rows), np.float32) if self._head is None else self._head.taus(rows)


def sparse_together(readers: Sequence[SamplesReader], ranges: Sequence[range] | None = None) -> Iterator[list[Sparse]]:
    """Decode the same ranges of nodes with one prior, which is read once, and draws that they share as well.

    Without ranges: by a few contexts, so that the number of nodes costs no memory.
    """
    ranges = split(*readers[0]._plan.shape, _at_once(len(readers))) if ranges is None else ranges
    for rows, found in _ranges(readers, ranges):
        nodes = zip(*(symbols for *_, symbols in found), strict=True)
        yield [reader._sparse(rows, list(parts)) for reader, parts in zip(readers, nodes, strict=True)]


def _ranges(readers: Sequence[SamplesReader], ranges: Sequence[range] | None) -> Iterator[tuple[range, list[Piece]]]:
    """Return each range with its priors and symbols, a few contexts at a time."""
    plan = readers[0]._plan
    wanted = split(*plan.shape, _BLOCK) if ranges is None else ranges
    cuts = [_cut(rows, plan.vocab, len(readers)) for rows in wanted]
    pieces = _pieces(readers, (piece for cut in cuts for piece in cut))
    start = 0
    for rows, cut in zip(wanted, cuts, strict=True):
        if _check.rows(rows, plan.contexts).start != start:
            raise InputError(f"rows must follow each other from the first context on, got {rows} where {start} is next")
        start = rows.stop
        yield rows, [next(pieces) for _ in cut]


def _pieces(readers: Sequence[SamplesReader], cuts: Iterable[range]) -> Iterator[Piece]:
    """Return each cut with its prior and all nodes' symbols."""
    plan = readers[0]._plan
    nodes = {k: Symbols(node._code, node._head, node._plan) for k, node in enumerate(readers) if node._head}
    room = Room()
    listers = [
        (group, Lister([nodes[k].plan for k in group], min(nodes[k].finest for k in group), room))
        for group in _groups(nodes)
    ]
    for rows in cuts:
        prior = prior_block(plan, rows)
        none = np.zeros(len(rows) + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
        found = [none] * len(readers)
        for group, lister in listers:
            for k, places in zip(group, lister.list(rows, prior), strict=True):
                found[k] = nodes[k].read(rows, prior, places)
        if rows and rows.stop == plan.contexts:
            for k, symbols in nodes.items():
                symbols.end()
                readers[k]._learning = symbols.learning
        yield rows, prior, found


def _groups(nodes: Mapping[int, Symbols]) -> list[list[int]]:
    """Return the nodes by the draws that they share, each slot of them once, not too many together.

    Steps are alike too: a node with a far finer one has candidates nearly everywhere, and others need not look there.
    """
    groups: dict[tuple[object, ...], dict[int, int]] = {}
    for k, symbols in nodes.items():
        plan = symbols.plan
        name = (plan.run_key, plan.round, plan.slots, symbols.finest // _ALIKE) if plan.slots > 1 else (k,)
        if plan.slot in groups.setdefault(name, {}):
            name = (k,)
        groups.setdefault(name, {})[plan.slot] = k
    found = [list(group.values()) for group in groups.values()]
    return [group[at : at + _LISTED] for group in found for at in range(0, len(group), _LISTED)]


def _cut(rows: range, vocab: int, nodes: int) -> list[range]:
    """Cut contexts into ranges that are read at once; none at all are one such range."""
    cuts = [rows[part.start : part.stop] for part in split(len(rows), vocab, _at_once(nodes))]
    return cuts or [rows]


def _at_once(nodes: int) -> int:
    """Return how many coordinates of each of so many nodes are read at once."""
    return min(_BLOCK, _TOGETHER // nodes)


def _joined(parts: list[Found]) -> Found:
    """Join the symbols of consecutive contexts."""
    if len(parts) == 1:
        return parts[0]
    starts, tokens, symbols = zip(*parts, strict=True)
    bases = np.cumsum([0, *map(len, tokens)])
    moved = [own[:-1] + base for own, base in zip(starts, bases[:-1], strict=True)]
    return np.concatenate([*moved, bases[-1:]]), np.concatenate(tokens), np.concatenate(symbols)
