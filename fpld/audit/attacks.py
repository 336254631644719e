"""Attacks: what the aggregator sees of a round, and a score for each canary: high if it seems to be in the text.

Every score compares with a model that has not seen the node's text, the student before the round. That is the
likelihood ratio of RMIA (Zarifzadeh, Liu and Shokri, 2024) with this one reference; comparing it with a population
besides keeps the order of the scores, and so AUC and true positives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.federation import jobs
from fpld.federation.training import open_student
from fpld.numerics import log_softmax
from fpld.protocol.combine import combine
from fpld.protocol.replies import Replies, Silent

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.audit.canaries import Canaries
    from fpld.codecs import Codec
    from fpld.rules import Rule
    from fpld.rules.target import Target
    from fpld.storage.folder import Arrays
    from fpld.students import Student
    from fpld.types import Plan

    Array = np.ndarray[Any, np.dtype[Any]]


class Sent(NamedTuple):
    """What a node sent in a round, and under which plan: the aggregator can decode it."""

    codec: Codec
    payload: bytes
    plan: Plan


def label_scores(sent: Sent, canaries: Canaries, before: Student, sequences: Array) -> Array:
    """Score by the node's own labels at the canaries' contexts: how likely they make the last token, to before.

    Sampled labels are mostly what the student said before, plus rare changes: there the difference counts.
    """
    if canaries.contexts is None:
        raise ValueError(f"canaries of kind {canaries.kind!r} have no contexts in the probe set")
    asked, last = canaries.contexts, canaries.tokens[:, -1]
    scores = np.empty(len(asked))
    length, start = sequences.shape[1], 0
    for block in sent.codec.reader(sent.payload, sent.plan).blocks():
        some = np.flatnonzero((asked >= start) & (asked < start + len(block.values)))
        rows, tokens = asked[some] - start, last[some]
        start += len(block.values)
        if not some.size:
            continue
        known = before.logits(sequences[asked[some] // length]).reshape(len(some), length, -1)
        known = log_softmax(known[np.arange(len(some)), asked[some] % length])[np.arange(len(some)), tokens]
        if block.chances is None:
            bias = np.broadcast_to(block.bias, block.values.shape)[rows]
            scores[some] = log_softmax(block.values[rows] - bias)[np.arange(len(some)), tokens] - known
        else:
            scores[some] = block.chances[rows, tokens] - np.exp(known)
    return scores


def model_scores(model: Student, before: Student, canaries: Canaries) -> Array:
    """Score by a model: how much likelier than before it makes the tokens of a canary."""
    return _likelihoods(model, canaries) - _likelihoods(before, canaries)


def own_target(sent: Sent, rule: Rule) -> Target:
    """Return what a student would be distilled to from this node's labels alone."""
    return combine(Replies(sent.codec, rule, [sent.payload], [sent.plan]), Silent()).target


def surrogate(base: Path, state: Arrays, *how: Any) -> Arrays:
    """Distil a model from one node's labels, with the arguments of a distillation job; return its weights.

    It need not become better than it was: the labels may say little.
    """
    student = open_student(base, state)
    jobs.learn(student, *how)
    return student.state()


def _likelihoods(model: Student, canaries: Canaries) -> Array:
    """Return the log-likelihood of each canary's tokens from its `first` on."""
    inputs, following = canaries.tokens[:, :-1], canaries.tokens[:, 1:]
    chances = log_softmax(model.logits(inputs)).reshape(*inputs.shape, -1)
    taken = np.take_along_axis(chances, following[..., None].astype(np.int64), axis=-1)[..., 0]
    return np.asarray(taken[:, canaries.first - 1 :].sum(axis=1, dtype=np.float64))
