"""Canaries: short texts that go into a node's text or stay out, each by a coin of its own; who attacks must tell which.

Two kinds. A `probe` canary begins as a sequence of the public probe set and goes on with a token drawn at random: no
text says so, and the node's label at that very context shows whether it has learnt it. It is the sharpest that we know,
and a guarantee must hold for it too. A `text` canary is a window of the node's held-out text: an ordinary record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError
from fpld.storage.arrays import read_arrays, write_arrays

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    Array = np.ndarray[Any, np.dtype[Any]]

PREFIX = 8
"""Tokens of a probe sequence that a canary begins with."""


@dataclass(frozen=True, eq=False, slots=True)
class Canaries:
    """Texts `tokens` [N, L], and which of them are `included` [N]; what is asked for are the tokens from `first` on.

    `contexts` are the rows of the probe set at which the last token is predicted, for canaries that have such.
    """

    kind: str
    tokens: Array
    included: Array
    first: int
    contexts: Array | None = None


def probe_canaries(sequences: Array, vocab: int, count: int, *, seed: int) -> Canaries:
    """Make canaries of probe sequences [S, T], each of another beginning."""
    length = sequences.shape[1]
    prefix = min(PREFIX, length)
    _, places = np.unique(sequences[:, :prefix], axis=0, return_index=True)
    if len(places) < count:
        raise InputError(f"canaries must be at most the different probe sequences, {len(places)}, got {count}")
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(places)[:count])
    last = rng.integers(vocab, size=(count, 1))
    tokens = np.concatenate((sequences[chosen, :prefix], last), axis=1).astype(np.int32)
    return Canaries("probe", tokens, rng.random(count) < 0.5, prefix, chosen * length + prefix - 1)


def text_canaries(heldout: Array, width: int, count: int, *, seed: int) -> Canaries:
    """Make canaries of a held-out text, disjoint windows of `width` tokens; fewer than `count` if it is short."""
    windows = heldout[: len(heldout) // width * width].reshape(-1, width)
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(len(windows))[:count])
    return Canaries("text", windows[chosen], rng.random(len(chosen)) < 0.5, 1)


def insert(path: Path, sets: Iterable[Canaries], *, copies: int) -> None:
    """Add the included canaries to a node's text file, so many times; all copies of one are one document."""
    arrays, meta = read_arrays(path)
    tokens, lengths, groups = [arrays["tokens"]], [arrays["lengths"]], [arrays["groups"]]
    group = int(arrays["groups"].max()) + 1
    for canaries in sets:
        for canary in canaries.tokens[canaries.included]:
            tokens += [canary] * copies
            lengths.append(np.full(copies, len(canary), np.int64))
            groups.append(np.full(copies, group, np.int64))
            group += 1
    joined = {"tokens": tokens, "lengths": lengths, "groups": groups}
    write_arrays(path, {name: np.concatenate(parts) for name, parts in joined.items()}, meta)
