"""Canaries, and attacks that try to tell which of them are in a node's text.

A canary is a short text that goes into the node's text or stays out, by a fair coin of its own. There are two kinds. A
`probe` canary begins as a sequence of the public probe set and continues with a random token. No other text does so,
and the node's label at that very context shows whether it has learnt the token: it is the sharpest canary we know, and
a privacy guarantee must hold for it too. A `text` canary is a window of the node's held-out text: an ordinary record.

An attack gives each canary a score, high if it seems to be in the text, from what the aggregator sees of a round: the
node's labels, a surrogate distilled from them alone, and the student. Every score is relative to a model that has not
seen the node's text, the student before the round. That is the likelihood ratio of RMIA (Zarifzadeh, Liu and Shokri,
2024) with this one reference. Comparing with a population besides would keep the order of the scores, and so AUC and
true positives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.data.token_stream import open_text
from fpld.errors import InputError
from fpld.federation import workers
from fpld.node.training import open_student
from fpld.numerics import log_softmax
from fpld.protocol.combine import NullObserver, Replies
from fpld.protocol.fast_paths import combine_replies
from fpld.storage.arrays import read_arrays, write_arrays

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fpld.codecs.base import Codec
    from fpld.node.labels import ProbeFiles
    from fpld.rules import Rule
    from fpld.students import Student
    from fpld.target import Target
    from fpld.types import Array, Arrays, Plan, Tokens

CANARY_PREFIX_TOKENS = 8
"""Tokens of a probe sequence that a canary begins with."""


@dataclass(frozen=True, eq=False, slots=True)
class Canaries:
    """Canaries of one kind: `tokens` [N, L], and which of them are `included` [N]; scores count tokens from `first` on.

    `contexts` [N] are the rows of the probe set at which the last token is predicted; None for text canaries.
    """

    kind: str
    tokens: Array
    included: Array
    first: int
    contexts: Array | None = None


def probe_canaries(sequences: Array, vocab: int, count: int, *, seed: int) -> Canaries:
    """Draw canaries from probe sequences [S, T] with different beginnings."""
    length = sequences.shape[1]
    prefix = min(CANARY_PREFIX_TOKENS, length)
    _, places = np.unique(sequences[:, :prefix], axis=0, return_index=True)
    if len(places) < count:
        raise InputError(f"canaries must be at most the different probe sequences, {len(places)}, got {count}")
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(places)[:count])
    last = rng.integers(vocab, size=(count, 1))
    tokens = np.concatenate((sequences[chosen, :prefix], last), axis=1).astype(np.int32)
    return Canaries("probe", tokens, rng.random(count) < 0.5, prefix, chosen * length + prefix - 1)


def text_canaries(heldout: Array, width: int, count: int, *, seed: int) -> Canaries:
    """Draw disjoint windows of `width` tokens from a held-out text; fewer than `count` if it is short."""
    windows = heldout[: len(heldout) // width * width].reshape(-1, width)
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(len(windows))[:count])
    return Canaries("text", windows[chosen], rng.random(len(chosen)) < 0.5, 1)


def insert_canaries(path: Path, sets: Iterable[Canaries], *, copies: int) -> None:
    """Add `copies` of each included canary to a node's text file; all copies of one are one document."""
    arrays, meta = read_arrays(path)
    # Of a text in the cache the canaries are put beside a copy of all tokens: an audit is of a text that fits memory.
    tokens = [np.asarray(open_text(path).tokens)]
    lengths = [arrays["lengths"]]
    groups = [arrays["groups"]]
    group = int(arrays["groups"].max()) + 1
    for canaries in sets:
        for canary in canaries.tokens[canaries.included]:
            tokens += [canary] * copies
            lengths.append(np.full(copies, len(canary), np.int64))
            groups.append(np.full(copies, group, np.int64))
            group += 1
    joined = {"tokens": tokens, "lengths": lengths, "groups": groups}
    write_arrays(path, {name: np.concatenate(parts) for name, parts in joined.items()}, meta)


class ObservedReply(NamedTuple):
    """What the aggregator needs to decode a node's labels of a round."""

    codec: Codec
    payload: bytes
    plan: Plan


def label_scores(sent: ObservedReply, canaries: Canaries, before: Student, sequences: Array) -> Array:
    """Score canaries by how much likelier the node's labels make their last token than the student before.

    With logits that is the log-likelihood ratio. Sampled labels are mostly the student's prediction plus rare changes,
    often to 0, so there it is the difference of probabilities.
    """
    if canaries.contexts is None:
        raise ValueError(f"canaries of kind {canaries.kind!r} have no contexts in the probe set")
    contexts = canaries.contexts
    scores = np.empty(len(contexts))
    length = sequences.shape[1]
    start = 0
    for block in sent.codec.reader(sent.payload, sent.plan).blocks():
        inside = np.flatnonzero((contexts >= start) & (contexts < start + len(block.values)))
        rows = contexts[inside] - start
        tokens = canaries.tokens[inside, -1]
        start += len(block.values)
        if not inside.size:
            continue
        each = np.arange(len(inside))
        logits = before.logits(sequences[contexts[inside] // length]).reshape(len(inside), length, -1)
        reference = log_softmax(logits[each, contexts[inside] % length])[each, tokens]
        if block.probabilities is None:
            bias = np.broadcast_to(block.bias, block.values.shape)[rows]
            scores[inside] = log_softmax(block.values[rows] - bias)[each, tokens] - reference
        else:
            scores[inside] = block.probabilities[rows, tokens] - np.exp(reference)
    return scores


def model_scores(model: Student, before: Student, canaries: Canaries) -> Array:
    """Score canaries by how much likelier a model makes their tokens than the student before."""
    return _log_likelihoods(model, canaries) - _log_likelihoods(before, canaries)


def node_target(sent: ObservedReply, rule: Rule) -> Target:
    """Return the target of distillation from one node's labels alone."""
    return combine_replies(Replies(sent.codec, rule, [sent.payload], [sent.plan]), NullObserver()).target


def distill_surrogate(
    base: Path,
    state: Arrays,
    sequences: Tokens,
    target: Target,
    options: dict[str, Any],
    public: Path | None,
    bits: int = 32,
    strings: ProbeFiles | None = None,
) -> Arrays:
    """Distil a model with the arguments of `workers.distill`; return its weights.

    The weights are taken even if they are not better than before: one node's labels may say little.
    """
    model = open_student(base, state)
    workers.learn(model if strings is None else strings.view(model), sequences, target, options, public, bits)
    return model.state()


def token_log_likelihoods(model: Student, canaries: Canaries) -> Array:
    """Return the log-likelihood [N, L - 1] of each canary's tokens but the first."""
    inputs = canaries.tokens[:, :-1]
    following = canaries.tokens[:, 1:, None].astype(np.int64)
    logs = log_softmax(model.logits(inputs)).reshape(*inputs.shape, -1)
    return np.take_along_axis(logs, following, axis=-1)[..., 0].astype(np.float64)


def _log_likelihoods(model: Student, canaries: Canaries) -> Array:
    """Return the log-likelihood of each canary's tokens from `first` on."""
    return np.asarray(token_log_likelihoods(model, canaries)[:, canaries.first - 1 :].sum(axis=1))
