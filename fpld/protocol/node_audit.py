"""The audit of nodes: the inner products of their labels, on contexts that no node can foresee.

Sampled labels are few numbers, so all contexts are audited. Dense ones are audited on a share, chosen by a digest of
all payloads together. No node knows the others' payloads, so none can behave well on those contexts only. A round that
is combined again after a crash is audited on the same contexts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from fpld.numerics import split
from fpld.protocol.group_audit import GroupSums, last_tokens
from fpld.registry import codecs
from fpld.rules.base import Audit, Masses, RelativeProducts, probabilities, sum_products

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fpld.codecs.samples.decoder import SamplesReader, SparseLabels
    from fpld.protocol.combine import Replies
    from fpld.types import Decoded, Floats, Ints, Reals

_BLOCK = 1 << 20  # coordinates of all nodes that are decoded at a time
_AUDIT_SIZE = 1 << 22  # coordinates of a node that are audited


def audit_nodes(replies: Replies) -> Audit:
    """Return the inner products of all nodes' labels."""
    return _sparse(replies) if replies.codec == codecs.get("samples") and replies.one_prior else _dense(replies)


def audit_key(replies: Replies) -> bytes:
    """Return a digest of all payloads together."""
    digest = hashlib.blake2b(digest_size=32, person=b"fpld audit")
    for payload in replies.payloads:
        digest.update(hashlib.blake2b(payload).digest())
    return digest.digest()


def audited_contexts(replies: Replies) -> Ints:
    """Return the contexts of dense labels that are audited, in order; all of them, if they are few."""
    contexts, vocab = replies.shape
    chosen = np.random.default_rng(list(audit_key(replies))).permutation(contexts)
    return np.sort(chosen[: max(_AUDIT_SIZE // vocab, 1)])


def _dense(replies: Replies) -> Audit:
    """Sum inner products of probabilities, and probabilities, over the audited contexts."""
    count = len(replies.plans)
    _, vocab = replies.shape
    chosen = audited_contexts(replies)
    products = np.zeros((count, count))
    sums = np.zeros((count, vocab))
    gains = np.zeros(count)
    next_tokens = np.zeros(0, int) if replies.next_tokens is None else replies.next_tokens[chosen]
    groups = _group_sums(replies)
    for rows, nodes in _blocks(replies):
        here = (chosen >= rows.start) & (chosen < rows.stop)
        offsets = chosen[here] - rows.start
        labels = [_probabilities(replies, k, rows, node)[offsets] for k, node in enumerate(nodes)]
        block_products, block_sums = sum_products(labels)
        products += block_products
        sums += block_sums
        if groups is not None:
            for k, label in enumerate(labels):
                groups.add_dense(k, chosen[here], label)
        if replies.next_tokens is not None:
            tokens = next_tokens[here]
            places = np.flatnonzero(tokens >= 0)
            gains += [label[places, tokens[places]].sum(dtype=np.float64) for label in labels]
    sums /= len(chosen)
    mean_gains = None if replies.next_tokens is None else gains / max(int((next_tokens >= 0).sum()), 1)
    group_products = None if groups is None else groups.products(chosen)
    return Audit(products / len(chosen), sums @ sums.T, mean_gains, groups=group_products)


def _group_sums(replies: Replies) -> GroupSums | None:
    """Return the sums over groups of contexts, where the aggregator knows the tokens that end them."""
    if replies.next_tokens is None:
        return None
    return GroupSums(len(replies.plans), replies.shape[1], last_tokens(replies.next_tokens), audit_key(replies))


def _blocks(replies: Replies) -> Iterator[tuple[range, Iterator[Decoded]]]:
    """Decode all nodes, block by block."""
    contexts, vocab = replies.shape
    blocks = split(contexts, vocab * len(replies.plans), _BLOCK)
    pairs = zip(replies.payloads, replies.plans, strict=True)
    streams = [replies.codec.reader(payload, plan).blocks(blocks) for payload, plan in pairs]
    for rows in blocks:
        yield rows, (next(stream) for stream in streams)


def _probabilities(replies: Replies, k: int, rows: range, decoded: Decoded) -> Reals:
    if replies.reconstructions:
        decoded = decoded._replace(values=replies.reconstructions[k][rows.start : rows.stop] + decoded.values)
    return probabilities(decoded)


class _Changes(NamedTuple):
    """Hold a node's changes in a block of contexts: their places context * V + token, and unbiased squares."""

    places: Ints
    changes: Reals
    squares: Floats


class _SparseSums:
    """Sum products of the labels' changes over blocks of contexts, each change divided by a scale of its token.

    The product of a label with itself contains its noise, which is subtracted: what a symbol's square is too large by.
    It follows from symbols and draws, not from what the node reports.
    """

    def __init__(self, count: int, vocab: int) -> None:
        self.products = np.zeros((count, count))
        self.sums = np.zeros((count, vocab))
        self.noise = np.zeros(count)
        self.token_noise = np.zeros((count, vocab))
        self.fourth_powers = np.zeros(count)

    def add(self, blocks: Sequence[_Changes]) -> None:
        """Add all nodes' changes in the same contexts."""
        vocab = self.sums.shape[1]
        products = _products(blocks)
        squares = np.array([block.squares.sum() for block in blocks])
        self.noise += np.diag(products) - squares
        self.products += products
        for k, block in enumerate(blocks):
            tokens = block.places % vocab
            self.sums[k] += np.bincount(tokens, block.changes, minlength=vocab)
            excess = np.square(block.changes, dtype=np.float64) - block.squares
            self.token_noise[k] += np.bincount(tokens, excess, minlength=vocab)
            self.fourth_powers[k] += np.square(block.squares).sum()

    def grams(self, contexts: int) -> tuple[Floats, Floats]:
        """Return the inner products [K, K] in the mean of contexts, and those of the means over contexts."""
        sums = self.sums / contexts
        return (self.products - np.diag(self.noise)) / contexts, sums @ sums.T - np.diag(self.noise) / contexts**2

    def errors(self, contexts: int) -> tuple[Floats, Floats]:
        """Return the standard errors of both diagonals [K].

        Of the first by the squares of single symbols, which are nearly independent; of the second as of normal numbers
        with each token's noise.
        """
        each = np.sqrt(self.fourth_powers) / contexts
        whole = np.sqrt(2 * np.square(self.token_noise).sum(axis=1)) / contexts**2
        return each, whole


def _sparse(replies: Replies) -> Audit:
    """Sum inner products of the labels' changes to the prior: unbiased estimates for the nodes' true changes."""
    from fpld.codecs.samples.decoder import decode_sparse  # brings numba along

    count = len(replies.plans)
    contexts, vocab = replies.shape
    plain = _SparseSums(count, vocab)
    relative = _SparseSums(count, vocab)
    mass_squares = np.zeros(count)
    mass_fourth_powers = np.zeros(count)
    gains = np.zeros(count)
    groups = _group_sums(replies)
    ranges = split(contexts, vocab, _BLOCK)
    readers = [
        cast("SamplesReader", replies.codec.reader(payload, plan))
        for payload, plan in zip(replies.payloads, replies.plans, strict=True)
    ]
    for blocks in decode_sparse(readers, ranges):
        nodes = [_changes(reader, block, vocab) for reader, block in zip(readers, blocks, strict=True)]
        plain.add(nodes)
        divided = [_divided(node, block, vocab) for node, block in zip(nodes, blocks, strict=True)]
        relative.add(divided)
        if groups is not None:
            for k, node in enumerate(divided):
                rows, tokens = np.divmod(node.places, vocab)
                excess = np.square(node.changes, dtype=np.float64) - node.squares
                groups.add_sparse(k, blocks[k].rows.start + rows, tokens, node.changes, excess)
        for k, node in enumerate(nodes):
            squares = _mass_squares(node, len(blocks[k].rows), vocab)
            mass_squares[k] += squares.sum()
            mass_fourth_powers[k] += np.square(squares).sum()
        if replies.next_tokens is not None:
            gains += _gains(replies, blocks, replies.next_tokens)
    mean_gains = None if replies.next_tokens is None else gains / max(int((replies.next_tokens >= 0).sum()), 1)
    return Audit(
        *plain.grams(contexts),
        mean_gains,
        RelativeProducts(*relative.grams(contexts), *relative.errors(contexts)),
        Masses(mass_squares / contexts, np.sqrt(mass_fourth_powers) / contexts),
        None if groups is None else groups.products(np.arange(contexts)),
    )


def _changes(reader: SamplesReader, block: SparseLabels, vocab: int) -> _Changes:
    places = np.repeat(np.arange(len(block.rows)), np.diff(block.starts)) * vocab + block.tokens
    return _Changes(places, block.changes, reader.squares(block))


def _divided(node: _Changes, block: SparseLabels, vocab: int) -> _Changes:
    """Divide changes by sqrt(pi + 1/V)."""
    square = block.prior.astype(np.float64) + 1 / vocab
    return node._replace(changes=node.changes / np.sqrt(square), squares=node.squares / square)


def _mass_squares(node: _Changes, contexts: int, vocab: int) -> Floats:
    """Return unbiased estimates of (sum_v p_v - 1)^2 in each context: the prior adds up to one, so of the changes.

    The square of a sum of independent symbols is too large by the sum of what their own squares are too large by.
    """
    rows = node.places // vocab
    masses = np.bincount(rows, node.changes, minlength=contexts)
    noise = np.bincount(rows, np.square(node.changes, dtype=np.float64) - node.squares, minlength=contexts)
    squares: Floats = np.square(masses) - noise
    return squares


def _gains(replies: Replies, blocks: Sequence[SparseLabels], next_tokens: Ints) -> Floats:
    """Return each node's changes times the one-hot next token less the prior, summed over contexts."""
    from fpld.codecs.samples.probabilities import (
        LEVEL_PROBABILITY,  # brings numba along
        prior_block,
        prior_totals,
    )

    rows = blocks[0].rows
    prior = prior_block(replies.plans[0], rows)
    tokens = next_tokens[rows.start : rows.stop]
    totals = prior_totals(prior)
    gains = []
    for block in blocks:
        places = np.repeat(np.arange(len(rows)), np.diff(block.starts))
        followed = tokens[places] >= 0
        expected = LEVEL_PROBABILITY[-prior[places, block.tokens]] / totals[places]
        gains.append(float((block.changes * ((block.tokens == tokens[places]) - expected))[followed].sum()))
    return np.array(gains)


def _products(blocks: Sequence[_Changes]) -> Floats:
    """Return the inner products [K, K] of all nodes' changes in the same contexts."""
    distinct, where = np.unique(np.concatenate([block.places for block in blocks]), return_inverse=True)
    table = np.zeros((len(blocks), distinct.size))
    nodes = np.repeat(np.arange(len(blocks)), [block.places.size for block in blocks])
    table[nodes, where] = np.concatenate([block.changes for block in blocks])
    return table @ table.T
