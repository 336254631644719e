"""The audit of nodes in groups of contexts: those that end with the same token.

A backdoor changes what follows a trigger, in few contexts of all, and hardly moves a mean over all of them. In the mean
of the contexts that end with the trigger it is as large as it can be, while honest nodes agree there nearly as well as
over all contexts.

Sums are kept of each node, group and token. So that they stay small whatever V is, both tokens are hashed: last tokens
into `MAX_GROUPS` groups, predicted ones into buckets with a sign, which keeps squares and inner products in the mean (a
count sketch). The hash follows from all payloads together, so no node can foresee what falls together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.rules.base import GroupProducts

if TYPE_CHECKING:
    from fpld.types import Floats, Ints, Reals

MAX_GROUPS = 512
MAX_BUCKETS = 256
MIN_BUCKETS = 16
MIN_CONTEXTS = 16  # of a group: the mean of fewer tells little
MIN_SHARE = 1 / 512  # of the audited contexts: of very many small groups, honest nodes are far off in some
_MAX_CELLS = 1 << 25  # of all nodes together


def last_tokens(next_tokens: Ints) -> Ints:
    """Return the token that ends each context, -1 for the first of a sequence, from the tokens that follow contexts.

    >>> last_tokens(np.array([5, 7, -1, 3, -1])).tolist()
    [-1, 5, 7, -1, 3]
    """
    return np.concatenate([[-1], next_tokens[:-1]]) if next_tokens.size else next_tokens


class GroupSums:
    """Sum the nodes' scaled differences over the contexts of each group; `last` [m] has each context's last token."""

    def __init__(self, nodes: int, vocab: int, last: Ints, key: bytes) -> None:
        rng = np.random.default_rng(list(key))
        self._count = min(vocab, MAX_GROUPS)
        self._buckets = min(vocab, MAX_BUCKETS, max(_MAX_CELLS // (self._count * nodes), MIN_BUCKETS))
        group_of = _hashed(rng, vocab, self._count)
        self._groups = np.where(last >= 0, group_of[last], self._count)  # the last group is of all that are in none
        self._bucket_of = _hashed(rng, vocab, self._buckets)
        self._signs = rng.choice([-1.0, 1.0], vocab)
        shape = (nodes, (self._count + 1) * self._buckets)
        self._sums = np.zeros(shape)
        self._noise = np.zeros(shape, np.float32)

    def add_sparse(self, node: int, contexts: Ints, tokens: Ints, changes: Reals, excess: Reals) -> None:
        """Add changes of single tokens, and by how much the square of each is larger than what was meant."""
        places = self._groups[contexts] * self._buckets + self._bucket_of[tokens]
        np.add.at(self._sums[node], places, changes * self._signs[tokens])
        np.add.at(self._noise[node], places, excess.astype(np.float32))

    def add_dense(self, node: int, contexts: Ints, labels: Reals) -> None:
        """Add labels [n, V] of some contexts, without noise."""
        places = self._groups[contexts, None] * self._buckets + self._bucket_of
        np.add.at(self._sums[node], places, labels * self._signs)

    def products(self, contexts: Ints) -> GroupProducts | None:
        """Return the inner products in each group that is large enough, of the audited contexts; None without any."""
        counts = np.bincount(self._groups[contexts], minlength=self._count + 1)[: self._count]
        large = np.flatnonzero(counts >= max(MIN_CONTEXTS, MIN_SHARE * len(contexts)))
        if not large.size:
            return None
        nodes = len(self._sums)
        sizes = counts[large, None]
        sums = self._sums.reshape(nodes, -1, self._buckets)[:, large] / sizes
        noise = self._noise.reshape(nodes, -1, self._buckets)[:, large].astype(np.float64) / sizes**2
        each: Floats = np.einsum("kgv,lgv->gkl", sums, sums)
        diagonal = np.arange(nodes)
        each[:, diagonal, diagonal] -= noise.sum(axis=2).T
        return GroupProducts(each, np.sqrt(2 * np.square(noise).sum(axis=2)).T)


def _hashed(rng: np.random.Generator, vocab: int, count: int) -> Ints:
    """Return a bucket for each of V tokens: equally many tokens to each, and one if there are enough buckets."""
    return np.asarray(rng.permutation(vocab) % count)
