"""The decoder of sampled labels: symbols as a sparse change of the prior, or as dense labels.

A payload is decoded context by context, from the first on, and nothing of the size of the vocabulary is kept. For each
block of contexts the candidates are found first (`CandidateIndex`, one pass for all nodes that share draws), then each
node's symbols are read. A decoder never trusts the bytes: symbols must be such as a probability gives, escapes and the
number of symbols are bounded, and the code must end as a writer ends it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import validation
from fpld.codecs import rangecoder
from fpld.codecs.samples.candidates import CandidateBuffer, CandidateIndex, prefilter_bounds, unpack_coordinate
from fpld.codecs.samples.draws import (
    DRAW_RANGE,
    HALF_RANGE,
    draw_fractions,
    draw_keys,
    log_index,
    token_draw,
    upper_half,
)
from fpld.codecs.samples.probabilities import (
    LEVEL_PROBABILITY,
    check_range,
    prior_block,
    prior_probabilities,
    prior_totals,
)
from fpld.codecs.samples.steps import (
    MAX_SYMBOLS_PER_BYTE,
    MINUS_BINS,
    PLUS_BINS,
    STEPS_PER_OCTAVE,
    LabelHeader,
    log_ratios,
    possible_symbol,
    ratio_bins,
    step_to_tau,
)
from fpld.codecs.samples.symbol_model import (
    code_escape,
    code_gap,
    code_symbol,
    initial_models,
    learnt_probabilities,
    new_activity,
    reset_activity,
)
from fpld.errors import FrameError, InputError
from fpld.kernels import borrowing_kernel
from fpld.numerics import split
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from fpld.codecs.prior import Eighths
    from fpld.codecs.rangecoder import Coder
    from fpld.codecs.samples.candidates import Candidates
    from fpld.types import Array, Floats, Floats32, Ints, Plan, Tokens

_BLOCK = 1 << 20  # coordinates that are decoded at a time, of one node
_TOGETHER = 1 << 21  # coordinates that are decoded at a time, of all nodes: of many nodes, fewer contexts
_ALIKE_STEPS = 4 * STEPS_PER_OCTAVE  # nodes whose steps lie within such a range are decoded together
_MAX_INDEXED_NODES = 128  # that share an index: its memory grows with their number
_MIN_RATIO = 1 / 64  # of a label to the prior, before its logarithm is taken
_UNSENT_NOISE = 1.0  # the noise of an empty payload, whose label is the prior

# What `_read` returns instead of a count.
_CORRUPT = -1
_BAD_PRIOR = -2
_IMPOSSIBLE = -3
# The places of a decoder's progress: the coordinate of the next escape, and the nonzero symbols so far.
_NEXT = 0
_COUNT = 1


class SparseLabels(NamedTuple):
    """Hold the labels of contexts `rows` as what they add to the prior's probabilities.

    Context number k changes in tokens[starts[k] : starts[k + 1]], each of them once, by `changes`. `prior` has the
    prior's probabilities of these tokens. `noise` is the labels' variance, summed over tokens and contexts, as the node
    reports it.
    """

    rows: range
    starts: Ints
    tokens: Tokens
    changes: Floats32
    noise: float
    prior: Floats32


class SymbolBlock(NamedTuple):
    """Hold the nonzero symbols of consecutive contexts: where each context starts, and the symbols' tokens and values.

    `prior` has the prior's probability of each token.
    """

    starts: Array
    tokens: Array
    symbols: Array
    prior: Array

    @classmethod
    def allocate(cls, contexts: int, capacity: int) -> SymbolBlock:
        """Allocate memory for so many symbols."""
        starts = np.zeros(contexts + 1, np.int64)
        return cls(starts, np.empty(capacity, np.int32), np.empty(capacity, np.int32), np.empty(capacity, np.float32))


class PriorBlock(NamedTuple):
    """Hold a prior's integers [n, V], and the sum of their exponentials in each context, [n]."""

    integers: Eighths
    totals: Floats32

    @classmethod
    def make(cls, integers: Eighths) -> PriorBlock:
        """Sum the exponentials; raise `InputError` for an integer out of range."""
        return cls(integers, prior_totals(integers))


class _Piece(NamedTuple):
    """Hold contexts with their prior and the symbols of each node."""

    rows: range
    prior: Eighths
    nodes: list[SymbolBlock]


class _Source(NamedTuple):
    """Hold a block of contexts: number of the first, keys of the draws, prior, and the fields of `Candidates`."""

    first: int
    keys: Array
    prior: Array
    totals: Array
    packed: Array
    ends: Array


class _Steps(NamedTuple):
    """Hold what a payload's header and plan say of its symbols.

    `ratios` has the log ratios of the step, and of the finer one that the first `finer` contexts have, and `inverses`
    1 / tau of both. `level_reach` and `level_width` are the prefilter's bounds for the finest step. `coordinates` is
    how many there are in all.
    """

    vocab: int
    coordinates: int
    finer: int
    inverses: Array
    ratios: Array
    level_reach: Array
    level_width: Array


class SymbolDecoder:
    """Decode the symbols of a code, from the first context on; raise `FrameError` for one that no encoder writes."""

    def __init__(self, code: Array, header: LabelHeader, plan: Plan) -> None:
        self.plan = plan
        self.finest = header.finest
        self._coder = rangecoder.reader(code, initial_models(plan.learnt))
        self._activity = new_activity()
        self._progress = np.zeros(2, np.int64)
        self._limit = MAX_SYMBOLS_PER_BYTE * code.size
        coordinates = plan.contexts * plan.vocab
        tables = _step_tables(header.step, header.finest)
        self._steps = _Steps(plan.vocab, coordinates, header.finer, *tables)
        self._progress[_NEXT] = code_gap(self._coder, 0)
        _require(self._progress[_NEXT] <= coordinates)

    @property
    def models(self) -> Array:
        """Return the adaptive models as they are now."""
        return self._coder.models

    def read(self, rows: range, prior: PriorBlock, candidates: Candidates) -> SymbolBlock:
        """Decode the next contexts."""
        capacity = min(len(rows) * self.plan.vocab, self._limit - int(self._progress[_COUNT]))
        block = SymbolBlock.allocate(len(rows), capacity)
        keys = draw_keys(self.plan, rows)
        source = _Source(rows.start, keys, prior.integers.ravel(), prior.totals, *candidates)
        count = _read(self._coder, self._activity, self._progress, self._steps, source, block)
        if count == _BAD_PRIOR:
            check_range(prior.integers)
        if count == _IMPOSSIBLE:
            raise FrameError(
                "payload's labels must be of probabilities from 0 to 1, and a symbol is of none: it is changed, was "
                "coded against another prior, or is an attack"
            )
        _require(count >= 0)
        return SymbolBlock(block.starts, *(field[:count].copy() for field in block[1:]))

    def end(self) -> None:
        """Check that the code ends after its last symbol."""
        _require(bool(rangecoder.at_end(self._coder)))


def _require(sound: bool) -> None:
    if not sound:
        raise FrameError("payload's code is not one: it is cut or changed, or was coded against another prior")


@lru_cache(maxsize=16)  # many nodes have the same few steps
def _step_tables(step: int, finest: int) -> tuple[Array, Array, Array, Array]:
    """Return 1 / tau and the log ratios of both steps, and the prefilter's bounds by level for the finest."""
    inverses = np.array([1 / step_to_tau(number) for number in (step, finest)])
    ratios = np.stack([log_ratios(number) for number in (step, finest)])
    bounds = prefilter_bounds(ratios[1])
    return inverses, ratios, bounds.level_reach, bounds.level_width


@borrowing_kernel
def _read(coder: Coder, activity: Array, progress: Array, steps: _Steps, source: _Source, block: SymbolBlock) -> Any:
    """Read the symbols of a block of contexts; return how many are nonzero, or what is wrong."""
    vocab = steps.vocab
    level_reach = steps.level_reach
    level_width = steps.level_width
    keys = source.keys
    packed = source.packed
    ends = source.ends
    tokens = block.tokens
    symbols = block.symbols
    priors = block.prior
    n = 0
    k = 0
    for row in range(keys.shape[0]):
        key = keys[row]
        which = 1 if source.first + row < steps.finer else 0
        ratios = steps.ratios[which]
        inverse = steps.inverses[which]
        prior_factor = np.float32(1) / source.totals[row]
        reset_activity(activity)
        while k < ends[row]:
            v, level, half = unpack_coordinate(packed[k])
            k += 1
            # An index of several nodes also lists what is close for a finer step than this node's.
            if (half + level_reach[level]) & (HALF_RANGE - 1) >= level_width[level]:
                continue
            u = token_draw(key, half, v)
            ratio = ratios[level]
            plus, minus = ratio_bins(ratio, log_index(DRAW_RANGE - u), log_index(u + 1))
            if plus < PLUS_BINS or minus < MINUS_BINS:
                symbol = code_symbol(coder, activity, plus, minus, ratio, 0)
                if symbol:
                    prior = np.float32(LEVEL_PROBABILITY[level] * prior_factor)
                    if n == tokens.size:
                        return _CORRUPT
                    if not possible_symbol(symbol, prior, inverse, u):
                        return _IMPOSSIBLE
                    tokens[n] = v
                    symbols[n] = symbol
                    priors[n] = prior
                    n += 1
        start = (source.first + row) * vocab
        while progress[_NEXT] < start + vocab:
            v = progress[_NEXT] - start
            level = -np.int64(source.prior[row * vocab + v])
            if level < 0 or level >= ratios.size:
                return _BAD_PRIOR
            u = token_draw(key, upper_half(key, v), v)
            plus, minus = ratio_bins(ratios[level], log_index(DRAW_RANGE - u), log_index(u + 1))
            symbol = code_escape(coder, 0)
            prior = np.float32(LEVEL_PROBABILITY[level] * prior_factor)
            # A candidate's symbol is never sent as an escape: there is one code for the same symbols.
            if plus < PLUS_BINS or minus < MINUS_BINS or n == tokens.size:
                return _CORRUPT
            if not possible_symbol(symbol, prior, inverse, u):
                return _IMPOSSIBLE
            tokens[n] = v
            symbols[n] = symbol
            priors[n] = prior
            n += 1
            progress[_NEXT] += 1 + code_gap(coder, 0)
            if progress[_NEXT] > steps.coordinates:
                return _CORRUPT
        block.starts[row + 1] = n
    progress[_COUNT] += n
    return n


class SamplesReader:
    """Read a payload of sampled labels; every pass reads the prior once, block by block, in order."""

    def __init__(self, payload: bytes | memoryview, plan: Plan) -> None:
        if len(payload) > plan.budget_bytes:
            raise FrameError(f"payload must have at most {plan.budget_bytes} bytes, got {len(payload)}")
        self._plan = plan
        self._models: Array | None = None
        self._header = LabelHeader.from_bytes(payload) if len(payload) else None
        if self._header and self._header.finer >= plan.contexts:
            raise FrameError(f"payload's finer step must be that of fewer contexts than {plan.contexts}")
        start = self._header.size if self._header else 0
        self._code = rangecoder.as_code(payload)[start:]

    @property
    def learnt(self) -> npt.NDArray[np.uint16] | None:
        """Return what was learnt from the payload, once all of it was read."""
        return None if self._models is None else learnt_probabilities(self._models)

    def check(self) -> None:
        """Raise `FrameError` for an unsound payload; keep what was learnt from a sound one."""
        for _ in _pieces([self], split(*self._plan.shape, _BLOCK)):
            pass

    def sparse(self, ranges: Sequence[range] | None = None) -> Iterator[SparseLabels]:
        """Decode consecutive ranges of contexts, from the first on, as changes of the prior."""
        for (labels,) in decode_sparse([self], ranges):
            yield labels

    def squares(self, labels: SparseLabels) -> Floats:
        """Return what each symbol adds to an unbiased estimate of |p - pi|^2, from symbols and draws alone.

        Of a symbol s = floor(x + u), s (s + 1 - 2 u) has the mean x^2 over u, which the reader knows. A zero counts
        for nothing and no symbol counts for less, so a node cannot push further than its squares say.
        """
        places = np.repeat(np.arange(len(labels.rows)), np.diff(labels.starts))
        u = draw_fractions(draw_keys(self._plan, labels.rows)[places], labels.tokens)
        changes = labels.changes.astype(np.float64)
        squares: Floats = changes * (changes + self._taus(labels.rows)[places] * (1 - 2 * u))
        return squares

    def blocks(self, ranges: Sequence[range] | None = None) -> Iterator[Decoded]:
        """Decode consecutive ranges of contexts, from the first on, as dense labels."""
        for _, pieces in _ranges([self], ranges):
            parts = [self._dense(piece) for piece in pieces]
            values, variance, probabilities = (np.concatenate(part) for part in zip(*parts, strict=True))
            yield Decoded(values, variance, np.zeros((1, 1), np.float32), probabilities)

    def _dense(self, piece: _Piece) -> tuple[Floats32, Floats32, Floats32]:
        """Return logarithms of labels, their variances by the delta method, and the labels.

        Of the noise only the sum is known; it is spread over tokens in proportion to the prior's probabilities.
        """
        (block,) = piece.nodes
        prior = prior_probabilities(piece.prior)
        label = prior.copy()
        places = np.repeat(np.arange(len(prior)), np.diff(block.starts))
        label[places, block.tokens] += block.symbols.astype(np.float32) * self._taus(piece.rows)[places]
        positive = np.maximum(label, prior * np.float32(_MIN_RATIO))
        return np.log(positive), prior * np.float32(self._noise) / np.square(positive), label

    def _sparse(self, rows: range, parts: list[SymbolBlock]) -> SparseLabels:
        block = _joined(parts)
        changes = block.symbols.astype(np.float32) * np.repeat(self._taus(rows), np.diff(block.starts))
        return SparseLabels(rows, block.starts, block.tokens, changes, self._noise * len(rows), block.prior)

    @property
    def _noise(self) -> float:
        return _UNSENT_NOISE if self._header is None else self._header.noise

    def _taus(self, rows: range) -> Floats32:
        """Return the step size of each of these contexts."""
        return np.zeros(len(rows), np.float32) if self._header is None else self._header.taus(rows)


def decode_sparse(
    readers: Sequence[SamplesReader], ranges: Sequence[range] | None = None
) -> Iterator[list[SparseLabels]]:
    """Decode the same ranges of several nodes, which have one prior: it is read once, and so are draws that they share.

    Parameters
    ----------
    readers:
        One for each node.
    ranges:
        Consecutive ranges of contexts, from the first on. By default a few contexts at a time, so that the memory does
        not grow with the number of nodes.

    Yields
    ------
    The labels of each node in one range.
    """
    ranges = split(*readers[0]._plan.shape, _coordinates_at_once(len(readers))) if ranges is None else ranges
    for rows, pieces in _ranges(readers, ranges):
        nodes = zip(*(piece.nodes for piece in pieces), strict=True)
        yield [reader._sparse(rows, list(parts)) for reader, parts in zip(readers, nodes, strict=True)]


def _ranges(readers: Sequence[SamplesReader], ranges: Sequence[range] | None) -> Iterator[tuple[range, list[_Piece]]]:
    """Return each range with its pieces, a few contexts each."""
    plan = readers[0]._plan
    wanted = split(*plan.shape, _BLOCK) if ranges is None else ranges
    cuts = [_cut(rows, plan.vocab, len(readers)) for rows in wanted]
    pieces = _pieces(readers, (piece for cut in cuts for piece in cut))
    start = 0
    for rows, cut in zip(wanted, cuts, strict=True):
        if validation.block_range(rows, plan.contexts).start != start:
            raise InputError(f"rows must follow each other from the first context on, got {rows} where {start} is next")
        start = rows.stop
        yield rows, [next(pieces) for _ in cut]


def _pieces(readers: Sequence[SamplesReader], cuts: Iterable[range]) -> Iterator[_Piece]:
    """Decode each cut; with the last context, check the ends of all codes and keep what was learnt."""
    plan = readers[0]._plan
    decoders = {
        k: SymbolDecoder(node._code, node._header, node._plan) for k, node in enumerate(readers) if node._header
    }
    buffer = CandidateBuffer()
    indexes = []
    for group in _groups(decoders):
        finest = min(decoders[k].finest for k in group)
        indexes.append((group, CandidateIndex([decoders[k].plan for k in group], finest, buffer)))
    for rows in cuts:
        prior = prior_block(plan, rows)
        nodes = [SymbolBlock.allocate(len(rows), 0)] * len(readers)
        # The sums take a pass over the prior: once for all nodes.
        sums = PriorBlock(prior, prior_totals(prior) if decoders else np.zeros(0, np.float32))
        for group, index in indexes:
            for k, candidates in zip(group, index.find(rows, prior), strict=True):
                nodes[k] = decoders[k].read(rows, sums, candidates)
        if rows and rows.stop == plan.contexts:
            for k, decoder in decoders.items():
                decoder.end()
                readers[k]._models = decoder.models
        yield _Piece(rows, prior, nodes)


def _groups(decoders: Mapping[int, SymbolDecoder]) -> list[list[int]]:
    """Group the nodes that share an index: draws but for their slots, each slot once, and steps that are alike.

    A node with a far finer step has candidates nearly everywhere, and the others would have to skip these.
    """
    groups: dict[tuple[object, ...], dict[int, int]] = {}
    for k, decoder in decoders.items():
        plan = decoder.plan
        alone = (k,)
        name = (plan.run_key, plan.round, plan.slots, decoder.finest // _ALIKE_STEPS) if plan.slots > 1 else alone
        if plan.slot in groups.setdefault(name, {}):
            name = alone
        groups.setdefault(name, {})[plan.slot] = k
    nodes = [list(group.values()) for group in groups.values()]
    size = _MAX_INDEXED_NODES
    return [group[start : start + size] for group in nodes for start in range(0, len(group), size)]


def _cut(rows: range, vocab: int, nodes: int) -> list[range]:
    """Cut contexts into ranges that are decoded at once; an empty range stays one."""
    cuts = [rows[part.start : part.stop] for part in split(len(rows), vocab, _coordinates_at_once(nodes))]
    return cuts or [rows]


def _coordinates_at_once(nodes: int) -> int:
    """Return how many coordinates of each of so many nodes are decoded at once."""
    return min(_BLOCK, _TOGETHER // nodes)


def _joined(parts: list[SymbolBlock]) -> SymbolBlock:
    """Join the symbols of consecutive contexts."""
    if len(parts) == 1:
        return parts[0]
    starts, *fields = zip(*parts, strict=True)
    offsets = np.cumsum([0, *(part.tokens.size for part in parts)])
    moved = [part[:-1] + offset for part, offset in zip(starts, offsets[:-1], strict=True)]
    return SymbolBlock(np.concatenate([*moved, offsets[-1:]]), *(np.concatenate(field) for field in fields))
