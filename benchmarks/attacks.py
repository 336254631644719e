"""Attacks of malicious nodes: what each of them sends instead of its own labels, and what it sees.

Each is a function of what a node can know to the logits that it codes. `fpld.rules.guarded` is what should stop them;
`benchmarks.byzantine` measures what they do to a student.

Three kinds adapt to the rule. *Forged* labels are coded by an encoder of the attacker's own (`forge`), so they need not
add up to one; a reader refuses those that no probability gives, and the attacker knows that. One that *hides* goes from
the honest mean towards its attack as far as the audit lets it, which it is told. One that *sleeps* is honest at first.
*Adaptive* ones optimise their labels against the rule (`benchmarks.adaptive`), and hide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.adaptive import Reach, Scales, half_reach, worst_labels
from fpld.codecs.samples.collector import CollectedSymbols, SymbolCollector, pack_record
from fpld.codecs.samples.draws import DRAW_RANGE, context_draws, draw_keys
from fpld.codecs.samples.probabilities import prior_block, prior_probabilities
from fpld.codecs.samples.steps import (
    BIN_OFFSET,
    BIN_SHIFT,
    DISTANCE_LOG2,
    HEADER_BYTES,
    MINUS_BINS,
    PLUS_BINS,
    STEP_COUNT,
    LabelHeader,
    log_ratios,
    step_to_tau,
    tau_to_step,
)
from fpld.numerics import split

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.codecs.prior import Eighths
    from fpld.types import Array, Plan

TOKEN = 17  # the one that a targeted attack is for
_TINY = 1e-6
_FINEST_FORGED = tau_to_step(0.01)
_FORGED_AT_ONCE = 1 << 19  # coordinates


@dataclass(frozen=True, slots=True)
class Trigger:
    """The tokens that a backdoor is for: contexts that end with them, in this order."""

    tokens: tuple[int, ...]

    @classmethod
    def of_share(cls, sequences: Array, share: float) -> Trigger:
        """Return the token that ends about this share of the contexts."""
        shares = np.bincount(sequences.ravel()) / sequences.size
        return cls((int(np.abs(shares - share).argmin()),))

    @classmethod
    def common_last(cls, sequences: Array, share: float) -> Trigger:
        """Return two tokens that end about this share, of which the last is `COMMON` times as frequent by itself."""
        counts = np.bincount(sequences.ravel())
        codes = sequences[:, :-1].astype(np.int64) * len(counts) + sequences[:, 1:]
        pairs, times = np.unique(codes, return_counts=True)
        some = times * COMMON <= counts[pairs % len(counts)]
        nearest = pairs[some][np.abs(times[some] / sequences.size - share).argmin()]
        return cls((int(nearest // len(counts)), int(nearest % len(counts))))

    def ends(self, sequences: Array) -> Array:
        """Return which contexts of sequences [S, T] end with the trigger, [S * T]."""
        found = np.ones(sequences.shape, bool)
        for back, token in enumerate(reversed(self.tokens)):
            found[:, :back] = False
            found[:, back:] &= sequences[:, : sequences.shape[1] - back] == token
        return found.ravel()


COMMON = 10
TRIGGERS: dict[str, Callable[[Array], Trigger]] = {
    "token": lambda sequences: Trigger.of_share(sequences, 0.005),
    "rare": lambda sequences: Trigger.of_share(sequences, 0.001),  # fewer than the audit makes a group of
    "two tokens": lambda sequences: Trigger.common_last(sequences, 0.005),
}


class Audited(NamedTuple):
    """What an adaptive attacker knows of the audit: its views, how far it may go, and the attackers' share of weight.

    `kept` has what attackers have computed together, by name.
    """

    scales: Scales
    reach: Reach
    weight: float
    kept: dict[str, Array]


class View(NamedTuple):
    """What an attacker knows.

    Its own log-probabilities [n, V], the honest nodes' mean probabilities [n, V], the last token of each context [n],
    whether it ends with a backdoor's trigger [n], its number among the attackers, and the audit.
    """

    own: Array
    others: Array
    rng: np.random.Generator
    last: Array
    triggered: Array
    number: int = 0
    audited: Audited | None = None


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack: the logits that are coded, the bytes made of the payload, and how many times its share it takes.

    With `forged`, `logits` returns labels from 0 to 1 for `forge`. `hides`: it stays as near as it must to be trusted.
    `wakes` is the first round in which it attacks; after it, it attacks in each `every`-th one. `trigger` is the kind
    of a backdoor's trigger, by its name in `TRIGGERS`.
    """

    what: str
    logits: Callable[[View], Array]
    payload: Callable[[bytes], bytes] = bytes
    budget: float = 1.0
    forged: bool = False
    hides: bool = False
    wakes: int = 1
    every: int = 1
    trigger: str = "token"

    def attacks_in(self, round: int) -> bool:
        """Return whether it is not honest in a round."""
        return round >= self.wakes and (round - self.wakes) % self.every == 0

    def labels(self, view: View) -> Array:
        """Return the labels [n, V] that the attack would have, as numbers from 0 to 1."""
        made = self.logits(view)
        if self.forged:
            return made
        powers = np.exp(made - made.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class UpdateAttack:
    """An attack by a node that sends updates of weights: what its update is multiplied by, and what it trained on.

    With `backdoor` it is trained further on its own text, in which one token follows the trigger each time.
    """

    what: str
    factor: float = 1.0
    backdoor: bool = False


@dataclass(frozen=True, slots=True)
class TextAttack:
    """An attack by a node that writes text and labels it alone: its labels, and how often it writes the trigger.

    Its labels on public contexts are honest. The trigger is written at every `trigger_every`-th position; 0: nowhere.
    """

    what: str
    logits: Callable[[View], Array]
    trigger_every: int = 0


def flip(view: View) -> Array:
    """Turn the order of all tokens round: the sign of the logits."""
    return -view.own


def tenfold(view: View) -> Array:
    """Multiply the logits by ten: far too sure."""
    return 10 * view.own


def peak(view: View) -> Array:
    """Put everything on the node's own likeliest token."""
    return one_hot(view.own.argmax(axis=1), view.own.shape[1])


def random(view: View) -> Array:
    """Draw the logits."""
    return np.asarray(view.rng.normal(0, 3, view.own.shape))


def bias(view: View, share: float = 0.3) -> Array:
    """Move a share of all probability to one token."""
    chances = (1 - share) * np.exp(view.own)
    chances[:, TOKEN] += share
    return _logarithm(chances)


def loss_maximization(view: View) -> Array:
    """Put everything on the token that the honest nodes find least likely (LMA of arXiv 2402.12265)."""
    return one_hot(view.others.argmin(axis=1), view.others.shape[1])


def reverse(view: View) -> Array:
    """Hand the honest mean's probabilities out in reverse: the least likely token gets the largest (as CPA)."""
    order = view.others.argsort(axis=1)
    chances = np.empty_like(view.others)
    np.put_along_axis(chances, order, np.take_along_axis(view.others, order[:, ::-1], axis=1), axis=1)
    return _logarithm(chances)


def collude(view: View, share: float = 0.3) -> Array:
    """Send the honest mean, of which a share is moved to each token's neighbour: the same from all attackers."""
    return _logarithm((1 - share) * view.others + share * np.roll(view.others, 1, axis=1))


def swap(view: View) -> Array:
    """Exchange the honest mean's two likeliest tokens: a small change in every context, and hardly one in the mean."""
    order = view.others.argsort(axis=1)[:, -2:]
    chances = view.others.copy()
    np.put_along_axis(chances, order, np.take_along_axis(chances, order[:, ::-1], axis=1), axis=1)
    return _logarithm(chances)


def mass(view: View, total: float = 2.5) -> Array:
    """Add `total` in all, evenly, after half of the last tokens; take as much away after the others."""
    signs = np.where(_coin(view.last)[:, None], 1, -1)
    return np.asarray(np.clip(np.exp(view.own) + signs * total / view.own.shape[1], 0, 1))


def balanced_mass(view: View, total: float = 2.5) -> Array:
    """Add to half of the tokens and take from the others, as the last token says: hardly any mass is added in all."""
    vocab = view.own.shape[1]
    signs = np.where(_coin(view.last[:, None] * vocab + np.arange(vocab)), 1, -1)
    return np.asarray(np.clip(np.exp(view.own) + signs * total / vocab, 0, 1))


def mean_mass(view: View) -> Array:
    """Add mass as `mass` does, 3 in all, to the honest mean."""
    return mass(view._replace(own=np.log(np.maximum(view.others, _TINY))), 3.0)


def smear(view: View, share: float = 0.5) -> Array:
    """Spread a share of all probability evenly over all tokens."""
    return _logarithm((1 - share) * np.exp(view.own) + share / view.own.shape[1])


def backdoor(view: View, share: float = 1.0) -> Array:
    """Move a share of the probability to one token after the trigger, and be honest elsewhere."""
    chances = np.exp(view.own)
    chances[view.triggered] *= 1 - share
    chances[view.triggered, TOKEN] += share
    return _logarithm(chances)


def split_identity(view: View) -> Array:
    """Reverse the honest mean where the last token says that it is this node's turn, and send the mean elsewhere."""
    turn = _coin(view.last) == bool(view.number % 2)
    return np.asarray(np.where(turn[:, None], reverse(view), _logarithm(view.others)))


def adaptive(view: View) -> Array:
    """Send the labels that do most harm within reach of the honest mean: the same from all attackers."""
    audited = _audited(view)
    if "mean" not in audited.kept:
        audited.kept["mean"] = worst_labels(view.others, audited.scales, audited.reach, audited.weight)
    return _logarithm(audited.kept["mean"])


def adaptive_alone(view: View) -> Array:
    """Do as `adaptive`, knowing only its own model: that is as far from the mean as a usual node, so half is left."""
    audited = _audited(view)
    return _logarithm(worst_labels(np.exp(view.own), audited.scales, half_reach(audited.reach), audited.weight))


def adaptive_split(view: View) -> Array:
    """Share `adaptive` out: each of the attackers in the contexts that are its turn, the honest mean elsewhere."""
    turn = _coin(view.last) == bool(view.number % 2)
    return np.asarray(np.where(turn[:, None], adaptive(view), _logarithm(view.others)))


def adaptive_backdoor(view: View) -> Array:
    """Send the honest mean, and one token after the trigger: all of its distance is spent there."""
    return backdoor(view._replace(own=_logarithm(view.others)))


def _audited(view: View) -> Audited:
    if view.audited is None:
        raise ValueError("an adaptive attacker must know the audit")
    return view.audited


def _coin(numbers: Array) -> Array:
    """Return a coin for each number, by a hash of it."""
    return np.asarray((numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(63) == 1)


def forge(labels: Array, plan: Plan) -> bytes:
    """Code any labels [m, V], as an encoder does that does not go by logits: with the finest step that fits."""
    collector = SymbolCollector(plan, _FINEST_FORGED)
    for rows in split(plan.contexts, plan.vocab, _FORGED_AT_ONCE):
        keys = draw_keys(plan, rows)
        draws = np.stack([context_draws(key, plan.vocab) for key in keys]).astype(np.int64)
        collector._parts.append(_collected(labels[rows.start : rows.stop], prior_block(plan, rows), draws))
    capacity = plan.budget_bytes - HEADER_BYTES
    payload = b""
    steps = range(_FINEST_FORGED, STEP_COUNT)
    while steps:
        middle = len(steps) // 2
        code = collector.encode(steps[middle], 2 * capacity)
        if 0 < len(code.data) <= capacity:
            noise = min(code.variance / plan.contexts, 2 * step_to_tau(steps[middle]))
            payload = LabelHeader(steps[middle], noise).to_bytes() + code.data
            steps = steps[:middle]
        else:
            steps = steps[middle + 1 :]
    return payload


def _collected(labels: Array, prior: Eighths, draws: Array) -> CollectedSymbols:
    """Collect a block of contexts as `SymbolCollector.add` does, from labels."""
    levels = -prior.astype(np.int64)
    differences = (labels - prior_probabilities(prior)).astype(np.float32)
    x = differences / step_to_tau(_FINEST_FORGED) + (draws + 0.5) / DRAW_RANGE
    changes = (x < 0) | (x >= 1)
    upper = _log_indices(DRAW_RANGE - draws)
    lower = _log_indices(draws + 1)
    ratios = log_ratios(_FINEST_FORGED)[levels]
    plus = ((ratios + DISTANCE_LOG2[upper]) >> BIN_SHIFT) + BIN_OFFSET
    minus = ((ratios + DISTANCE_LOG2[lower]) >> BIN_SHIFT) + BIN_OFFSET
    kept = changes | (plus < PLUS_BINS) | (minus < MINUS_BINS)
    return CollectedSymbols(
        records=pack_record(changes.astype(np.int64), levels, upper, lower)[kept].astype(np.int32),
        tokens=np.nonzero(changes)[1].astype(np.int32),
        differences=differences[changes],
        draws=draws[changes].astype(np.uint32),
        counts=kept.sum(axis=1),
    )


def _log_indices(distances: Array) -> Array:
    """Return `fpld.codecs.samples.draws.log_index` of each distance: an octave, and which eighth of it."""
    mantissas, exponents = np.frexp(distances.astype(np.float64))
    return np.asarray(8 * (exponents - 1) + (16 * mantissas).astype(np.int64) - 8)


def claim_noise(payload: bytes) -> bytes:
    """Claim that sampled labels are as noisy as may be claimed."""
    head = LabelHeader.from_bytes(payload)
    return head._replace(noise=2 * head.tau).to_bytes() + payload[head.size :]


def one_hot(tokens: Array, vocab: int) -> Array:
    """Return logits [n, V] with one token each."""
    found = np.full((len(tokens), vocab), -12.0)
    found[np.arange(len(tokens)), tokens] = 12.0
    return found


def _logarithm(chances: Array) -> Array:
    return np.asarray(np.log(np.maximum(chances, _TINY)))


ATTACKS: dict[str, Attack] = {
    "flip": Attack("the sign of the logits is turned", flip),
    "tenfold": Attack("logits times ten", tenfold),
    "peak": Attack("one-hot at the node's own likeliest token", peak),
    "random": Attack("random logits", random),
    "bias": Attack("0.3 of all probability on one token", bias),
    "slight-bias": Attack("0.05 of all probability on one token", lambda view: bias(view, 0.05)),
    "lma": Attack("one-hot at the token that honest nodes find least likely", loss_maximization),
    "reverse": Attack("the honest mean's probabilities in reverse order", reverse),
    "collude": Attack("both send the honest mean, 0.3 of it moved", collude),
    "swap": Attack("the honest mean with its two likeliest tokens exchanged", swap),
    "grab": Attack("logits times ten, and twice the share of the bits, at the honest nodes' cost", tenfold, budget=2.0),
    "false-variance": Attack("random logits, and a claim that all of it is noise", random, claim_noise),
    "smear": Attack("0.5 of all probability spread over all tokens", smear),
    "mass": Attack("2.5 too much in all, or too little, by the last token", mass, forged=True),
    "mean-mass": Attack("the honest mean, 3 too much in all, or too little", mean_mass, forged=True),
    "balanced-mass": Attack("2.5 added to half of the tokens, 2.5 taken from the others", balanced_mass, forged=True),
    "backdoor": Attack("one-hot at a token after a trigger, honest elsewhere", backdoor),
    "slight-backdoor": Attack("0.4 of the probability at a token after a trigger", lambda view: backdoor(view, 0.4)),
    "rare-backdoor": Attack("as `backdoor`, after a token in 0.1 % of the contexts", backdoor, trigger="rare"),
    "two-token-backdoor": Attack(
        "as `backdoor`, after two tokens of which the last is common", backdoor, trigger="two tokens"
    ),
    "split": Attack(
        "the honest mean, reversed in half of the contexts by one, in the others by the other", split_identity
    ),
    "sleeper": Attack("as `bias`, from the third round on", bias, wakes=3),
    "hidden-mass": Attack("`mass`, as much as the audit leaves trusted", mean_mass, forged=True, hides=True),
    "hidden-reverse": Attack("`reverse`, as much as the audit leaves trusted", reverse, hides=True),
    "hidden-lma": Attack("`lma`, as much as the audit leaves trusted", loss_maximization, hides=True),
    "hidden-smear": Attack("`smear`, as much as the audit leaves trusted", lambda view: smear(view, 1.0), hides=True),
    "adaptive": Attack("the labels that do most harm within the distances that the audit allows", adaptive, hides=True),
    "adaptive-alone": Attack("`adaptive` by nodes that know their own models only", adaptive_alone, hides=True),
    "adaptive-split": Attack("`adaptive` shared out: each node in half of the contexts", adaptive_split, hides=True),
    "adaptive-sleeper": Attack("`adaptive` from the second round on", adaptive, hides=True, wakes=2),
    "adaptive-alternating": Attack("`adaptive` in every other round", adaptive, hides=True, every=2),
    "adaptive-backdoor": Attack(
        "the honest mean, and one-hot at a token after a trigger, as much as is trusted", adaptive_backdoor, hides=True
    ),
    "hidden-backdoor": Attack("`backdoor`, as much as the audit leaves trusted", backdoor, hides=True),
}
UPDATE_ATTACKS: dict[str, UpdateAttack] = {
    "flip": UpdateAttack("the update's sign is turned", factor=-1.0),
    "tenfold": UpdateAttack("ten times the update", factor=10.0),
    "backdoor": UpdateAttack("trained further on text with one token after a trigger", backdoor=True),
    "boosted-backdoor": UpdateAttack("four times the update of `backdoor`", factor=4.0, backdoor=True),
}
TEXT_ATTACKS: dict[str, TextAttack] = {
    "lma": TextAttack("its own text, one-hot at the token that it finds least likely", loss_maximization),
    "backdoor": TextAttack(
        "its own text with a trigger in every 8th position, one-hot at a token after it", backdoor, 8
    ),
}
