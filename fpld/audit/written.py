"""Attacks on written text: what a node's model has copied from its text, and what the copies tell of canaries.

The text that a node's model writes reaches the aggregator in the clear, so these attacks need no decoding. Each is made
twice: on the text that was *sent*, after the site's check (`fpld.node.writing`), and on the *unchecked* text that the
model wrote first. The difference is what the check is worth.

Copies are runs of tokens that stand in the private text and not in the probe set. For a canary three scores are taken,
high if it seems to be in the private text:

    run     the longest run of its tokens that stands in the text
    edit    the least edit distance to any piece of the text, negated: near matches
    ngram   the likelihood ratio of an n-gram model of the text to the student before the rounds

Only tokens from `Canaries.first` on count: the beginning of a probe canary is public. The n-gram model is the student's
prediction, refined by counts: with a context of k tokens seen c times, n times before this token,

    p_k = (n + SMOOTHING p_{k-1}) / (c + SMOOTHING),        p_0 the student's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.audit.attacks import token_log_likelihoods
from fpld.node.writing import PrivateRuns, write_checked
from fpld.protocol.written import beginnings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.audit.attacks import Canaries
    from fpld.students import Student
    from fpld.types import Array, Ints, Plan, Tokens

RUN_LENGTHS = (6, 8, 12, 16)
"""Tokens of the runs that are looked for."""
NEAR_EDITS = 2
"""Edits within which a canary counts as nearly copied."""
SMOOTHING = 4.0
"""Counts that the shorter context is worth."""
MAX_ORDER = 8
"""The longest context of the n-gram model, in tokens."""


class WrittenSample(NamedTuple):
    """The sequences [n, T] that a node has sent, and as many that its model wrote first, unchecked."""

    sent: Tokens
    unchecked: Tokens


class CanaryMatches(NamedTuple):
    """How well each canary [N] matches a text: its longest common run, and its least edit distance."""

    runs: Ints
    edits: Ints


def write_unchecked(model: Student, plan: Plan, probe: Tokens, *, seed: int, temperature: float) -> Tokens:
    """Return the sequences that a node's model writes under a plan before any check; `seed` as at the node."""
    no_runs = PrivateRuns(np.empty(0, np.int32), probe, 1)
    places = beginnings(plan, probe)
    return write_checked(model, probe, places, no_runs, seed=seed, temperature=temperature).sequences


def joined_samples(samples: Sequence[WrittenSample]) -> WrittenSample:
    """Return the text of all rounds."""
    return WrittenSample(*(np.concatenate(parts) for parts in zip(*samples, strict=True)))


def canary_matches(canaries: Canaries, sequences: Tokens) -> CanaryMatches:
    """Match each canary with all pieces of the sequences [S, T].

    Both are dynamic programs over the tokens of a canary, for all sequences at once: the run that ends at each place,
    and the edit distance of the canary's beginning to the best piece that ends there (Sellers 1980).
    """
    count, length = sequences.shape
    places = np.arange(length + 1, dtype=np.int16)
    runs = np.zeros(len(canaries.tokens), np.int64)
    edits = np.full(len(canaries.tokens), canaries.tokens.shape[1], np.int64)
    if not count:
        return CanaryMatches(runs, edits)
    for number, canary in enumerate(canaries.tokens):
        run = np.zeros((count, length + 1), np.int16)
        distance = np.zeros((count, length + 1), np.int16)
        for k, token in enumerate(canary):
            equal = sequences == token
            run[:, 1:] = (run[:, :-1] + np.int16(1)) * equal
            if k >= canaries.first:
                runs[number] = max(runs[number], run.max())
            following = distance + np.int16(1)
            np.minimum(following[:, 1:], distance[:, :-1] + ~equal, out=following[:, 1:])
            # Tokens of the text between two of the canary cost one each: the least over all earlier places.
            distance = np.minimum.accumulate(following - places, axis=1) + places
        edits[number] = distance.min()
    return CanaryMatches(runs, edits)


def ngram_scores(canaries: Canaries, sequences: Tokens, before: Student) -> Array:
    """Score canaries by how much likelier an n-gram model of the sequences [S, T] makes their tokens than a student."""
    reference = token_log_likelihoods(before, canaries)
    if not len(sequences):
        return np.zeros(len(reference))
    probabilities = np.exp(reference)
    written = sequences.astype(np.int64)
    tokens = canaries.tokens.astype(np.int64)
    vocab = int(max(written.max(), tokens.max())) + 1
    # Contexts of k tokens are numbered; those of k + 1 tokens by the pair of such a number and a token.
    text_ids = written
    canary_ids = tokens
    for order in range(1, min(MAX_ORDER, sequences.shape[1] - 1, tokens.shape[1] - 1) + 1):
        contexts = canary_ids[:, :-1]
        pairs = text_ids[:, :-1] * vocab + written[:, order:]
        canary_pairs = contexts * vocab + tokens[:, order:]
        _, numbers = np.unique(np.concatenate([pairs.ravel(), canary_pairs.ravel()]), return_inverse=True)
        size = int(max(numbers.max(), text_ids.max(), canary_ids.max())) + 1
        seen = np.bincount(text_ids[:, :-1].ravel(), minlength=size)[contexts]
        text_ids = numbers[: pairs.size].reshape(pairs.shape)
        canary_ids = numbers[pairs.size :].reshape(canary_pairs.shape)
        times = np.bincount(text_ids.ravel(), minlength=size)[canary_ids]
        shorter = probabilities[:, order - 1 :]
        probabilities[:, order - 1 :] = (times + SMOOTHING * shorter) / (seen + SMOOTHING)
    ratios = np.log(probabilities) - reference
    return np.asarray(ratios[:, canaries.first - 1 :].sum(axis=1))


def written_scores(canaries: Canaries, sequences: Tokens, matches: CanaryMatches, before: Student) -> dict[str, Array]:
    """Return the scores of the canaries by attack."""
    return {
        "run": matches.runs.astype(np.float64),
        "edit": -matches.edits.astype(np.float64),
        "ngram": ngram_scores(canaries, sequences, before),
    }


def copied_share(sequences: Tokens, private: Tokens, public: Tokens, length: int) -> float | None:
    """Return the share of sequences with a run of `length` private tokens that the public ones do not have."""
    return float(PrivateRuns(private, public, length).stand_in(sequences).mean()) if len(sequences) else None


def copy_rows(sample: WrittenSample, private: Tokens, public: Tokens) -> list[dict[str, Any]]:
    """Return the shares of written sequences with runs of the private text, a row for each length."""
    return [
        {
            "of": "sequences",
            "count": len(sample.sent),
            "match": f"a run of {length} tokens",
            **{name: copied_share(text, private, public, length) for name, text in sample._asdict().items()},
        }
        for length in RUN_LENGTHS
    ]


def canary_rows(canaries: Canaries, sent: CanaryMatches, unchecked: CanaryMatches) -> list[dict[str, Any]]:
    """Return the shares of canaries that are found in written text: those in the private text, and those not."""
    rows = []
    for name, chosen in (("in", canaries.included), ("out", ~canaries.included)):
        head = {"of": f"{canaries.kind} canaries, {name}", "count": int(chosen.sum())}
        for length in RUN_LENGTHS:
            if length <= canaries.tokens.shape[1]:
                shares = [float((matches.runs[chosen] >= length).mean()) for matches in (sent, unchecked)]
                rows.append(_shares(head, f"a run of {length} tokens", shares))
        shares = [float((matches.edits[chosen] <= NEAR_EDITS).mean()) for matches in (sent, unchecked)]
        rows.append(_shares(head, f"all within {NEAR_EDITS} edits", shares))
    return rows


def _shares(head: dict[str, Any], match: str, shares: list[float]) -> dict[str, Any]:
    return {**head, "match": match, "sent": shares[0], "unchecked": shares[1]}
