"""The audit of a round: how far the nodes are from each other, on contexts that nobody knew beforehand.

Sampled labels are few numbers, so all contexts are audited. Dense ones are audited on a share, whose choice follows
from all payloads together: no node knows the others', so none can behave there and misbehave elsewhere; and a round
that is combined again after a crash is audited on the same contexts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs.samples.codec import SAMPLES
from fpld.numerics import split
from fpld.rules.base import Audit, probabilities
from fpld.rules.guarded import add_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fpld.codecs.samples.reader import Sparse
    from fpld.protocol.replies import Replies
    from fpld.types import Decoded, Floats, Ints, Reals

_BLOCK = 1 << 20  # coordinates of all nodes that are looked at together
_SHARE = 1 << 22  # coordinates of a node that are audited


def audit(replies: Replies) -> Audit:
    """Compare all nodes with each other."""
    one_prior = all(plan.prior is replies.plans[0].prior for plan in replies.plans)
    return _sparse(replies) if replies.codec == SAMPLES and one_prior else _dense(replies)


def audited(replies: Replies) -> Ints:
    """Return the contexts of dense labels that are audited, in order; all of them, if they are few."""
    contexts, vocab = replies.shape
    digest = hashlib.blake2b(digest_size=32, person=b"fpld audit")
    for payload in replies.payloads:
        digest.update(hashlib.blake2b(payload).digest())
    chosen = np.random.default_rng(list(digest.digest())).permutation(contexts)
    return np.sort(chosen[: max(_SHARE // vocab, 1)])


def _dense(replies: Replies) -> Audit:
    """Add up inner products of probabilities, and probabilities, over the audited contexts."""
    count, (_, vocab) = len(replies.plans), replies.shape
    chosen = audited(replies)
    products, sums, gains = np.zeros((count, count)), np.zeros((count, vocab)), np.zeros(count)
    known = np.zeros(0, int) if replies.following is None else replies.following[chosen]
    for rows, nodes in _blocks(replies):
        here = (chosen >= rows.start) & (chosen < rows.stop)
        some = chosen[here] - rows.start
        labels = [_chances(replies, k, rows, node)[some] for k, node in enumerate(nodes)]
        found = add_up(labels)
        products += found[0]
        sums += found[1]
        if replies.following is not None:
            follows = known[here]
            places = np.flatnonzero(follows >= 0)
            gains += [label[places, follows[places]].sum(dtype=np.float64) for label in labels]
    sums /= len(chosen)
    foretold = None if replies.following is None else gains / max(int((known >= 0).sum()), 1)
    return Audit(products / len(chosen), sums @ sums.T, foretold)


def _blocks(replies: Replies) -> Iterator[tuple[range, Iterator[Decoded]]]:
    """Decode all nodes, block by block."""
    contexts, vocab = replies.shape
    blocks = split(contexts, vocab * len(replies.plans), _BLOCK)
    pairs = zip(replies.payloads, replies.plans, strict=True)
    streams = [replies.codec.reader(payload, plan).blocks(blocks) for payload, plan in pairs]
    for rows in blocks:
        yield rows, (next(stream) for stream in streams)


def _chances(replies: Replies, k: int, rows: range, decoded: Decoded) -> Reals:
    if replies.own:
        decoded = decoded._replace(values=replies.own[k][rows.start : rows.stop] + decoded.values)
    return probabilities(decoded)


def _sparse(replies: Replies) -> Audit:
    """Add up inner products of what labels change of the prior: unbiased for what the nodes meant.

    A label's product with itself has its noise in it. What that is follows from symbols and draws, not from what the
    node reports.
    """
    from fpld.codecs.samples.reader import sparse_together  # brings numba along

    count, (contexts, vocab) = len(replies.plans), replies.shape
    products, sums, noise = np.zeros((count, count)), np.zeros((count, vocab)), np.zeros(count)
    gains = np.zeros(count)
    ranges = split(contexts, vocab, _BLOCK)
    readers = [SAMPLES.reader(payload, plan) for payload, plan in zip(replies.payloads, replies.plans, strict=True)]
    for blocks in sparse_together(readers, ranges):
        found = _products(blocks, vocab)
        squares = np.array([reader.squares(block) for reader, block in zip(readers, blocks, strict=True)])
        noise += np.diag(found) - squares
        products += found
        for k, block in enumerate(blocks):
            sums[k] += np.bincount(block.tokens, block.changes, minlength=vocab)
        if replies.following is not None:
            gains += _gains(replies, blocks, replies.following)
    sums /= contexts
    products = (products - np.diag(noise)) / contexts
    foretold = None if replies.following is None else gains / max(int((replies.following >= 0).sum()), 1)
    return Audit(products, sums @ sums.T - np.diag(noise) / contexts**2, foretold)


def _gains(replies: Replies, blocks: Sequence[Sparse], following: Ints) -> Floats:
    """Return the sums over contexts of each node's changes times what followed, less the prior."""
    from fpld.codecs.samples.chances import TABLE, prior_totals  # brings numba along
    from fpld.codecs.samples.reading import prior_block

    rows = blocks[0].rows
    prior, follows = prior_block(replies.plans[0], rows), following[rows.start : rows.stop]
    totals, found = prior_totals(prior), []
    for block in blocks:
        places = np.repeat(np.arange(len(rows)), np.diff(block.starts))
        known = follows[places] >= 0
        expected = TABLE[-prior[places, block.tokens]] / totals[places]
        found.append(float((block.changes * ((block.tokens == follows[places]) - expected))[known].sum()))
    return np.array(found)


def _products(blocks: Sequence[Sparse], vocab: int) -> Floats:
    """Return the inner products [K, K] of all nodes' changes in the same contexts."""
    places = [np.repeat(np.arange(len(b.rows)), np.diff(b.starts)) * vocab + b.tokens for b in blocks]
    found, where = np.unique(np.concatenate(places), return_inverse=True)
    table = np.zeros((len(blocks), found.size))
    table[np.repeat(np.arange(len(blocks)), list(map(len, places))), where] = np.concatenate(
        [b.changes for b in blocks]
    )
    return table @ table.T
