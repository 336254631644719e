"""The audit of nodes: the inner products of their labels, on contexts that no node can foresee.

Sampled labels are few numbers, so all contexts are audited. Dense ones are audited on a share, chosen by a digest of
all payloads together. No node knows the others' payloads, so none can behave well on those contexts only. A round that
is combined again after a crash is audited on the same contexts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

import numpy as np

from fpld.numerics import split
from fpld.registry import codecs
from fpld.rules.base import Audit, probabilities, sum_products

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


def audited_contexts(replies: Replies) -> Ints:
    """Return the contexts of dense labels that are audited, in order; all of them, if they are few."""
    contexts, vocab = replies.shape
    digest = hashlib.blake2b(digest_size=32, person=b"fpld audit")
    for payload in replies.payloads:
        digest.update(hashlib.blake2b(payload).digest())
    chosen = np.random.default_rng(list(digest.digest())).permutation(contexts)
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
    for rows, nodes in _blocks(replies):
        here = (chosen >= rows.start) & (chosen < rows.stop)
        offsets = chosen[here] - rows.start
        labels = [_probabilities(replies, k, rows, node)[offsets] for k, node in enumerate(nodes)]
        block_products, block_sums = sum_products(labels)
        products += block_products
        sums += block_sums
        if replies.next_tokens is not None:
            tokens = next_tokens[here]
            places = np.flatnonzero(tokens >= 0)
            gains += [label[places, tokens[places]].sum(dtype=np.float64) for label in labels]
    sums /= len(chosen)
    mean_gains = None if replies.next_tokens is None else gains / max(int((next_tokens >= 0).sum()), 1)
    return Audit(products / len(chosen), sums @ sums.T, mean_gains)


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


def _sparse(replies: Replies) -> Audit:
    """Sum inner products of the labels' changes to the prior: unbiased estimates for the nodes' true changes.

    The product of a label with itself contains its noise, which is subtracted. The noise follows from symbols and
    draws, not from what the node reports.
    """
    from fpld.codecs.samples.decoder import decode_sparse  # brings numba along

    count = len(replies.plans)
    contexts, vocab = replies.shape
    products = np.zeros((count, count))
    sums = np.zeros((count, vocab))
    noise = np.zeros(count)
    gains = np.zeros(count)
    ranges = split(contexts, vocab, _BLOCK)
    readers = [
        cast("SamplesReader", replies.codec.reader(payload, plan))
        for payload, plan in zip(replies.payloads, replies.plans, strict=True)
    ]
    for blocks in decode_sparse(readers, ranges):
        block_products = _products(blocks, vocab)
        squares = np.array([reader.squares(block) for reader, block in zip(readers, blocks, strict=True)])
        noise += np.diag(block_products) - squares
        products += block_products
        for k, block in enumerate(blocks):
            sums[k] += np.bincount(block.tokens, block.changes, minlength=vocab)
        if replies.next_tokens is not None:
            gains += _gains(replies, blocks, replies.next_tokens)
    sums /= contexts
    products = (products - np.diag(noise)) / contexts
    mean_gains = None if replies.next_tokens is None else gains / max(int((replies.next_tokens >= 0).sum()), 1)
    return Audit(products, sums @ sums.T - np.diag(noise) / contexts**2, mean_gains)


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


def _products(blocks: Sequence[SparseLabels], vocab: int) -> Floats:
    """Return the inner products [K, K] of all nodes' changes in the same contexts."""
    places = [np.repeat(np.arange(len(b.rows)), np.diff(b.starts)) * vocab + b.tokens for b in blocks]
    distinct, where = np.unique(np.concatenate(places), return_inverse=True)
    table = np.zeros((len(blocks), distinct.size))
    table[np.repeat(np.arange(len(blocks)), list(map(len, places))), where] = np.concatenate(
        [b.changes for b in blocks]
    )
    return table @ table.T
