"""The guarded mixture against each attack, on synthetic labels: dense and sampled; what an audit costs honest nodes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.attacks import ATTACKS, View, backdoor, forge, mass
from fpld import InputError, encode
from fpld.codecs import make_prior
from fpld.codecs.float32 import FLOAT32
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.samples.draws import context_draws, draw_fractions, draw_keys
from fpld.federation.rounds import DOUBTFUL_TRUST
from fpld.numerics import log_softmax, softmax
from fpld.protocol import Aggregator, Budget, Settings
from fpld.protocol.combine import NullObserver, Replies
from fpld.protocol.fast_paths import combine_replies
from fpld.protocol.group_audit import MIN_CONTEXTS, GroupSums, last_tokens
from fpld.protocol.node_audit import audit_nodes, audited_contexts
from fpld.rules import GUARDED, MIXTURE
from fpld.rules.base import Audit, RelativeProducts
from fpld.rules.guarded import Guarded
from fpld.rules.robust import weiszfeld
from tests.helpers import make_plan

if TYPE_CHECKING:
    from fpld.codecs import Codec
    from fpld.protocol.aggregator import AggregatorState
    from fpld.types import Array


K = 8
BAD = 2
M = 1000
V = 64
BITS = 32.0
ENDS = 16  # tokens that contexts end with: some 60 contexts to each
CODECS: dict[str, Codec] = {"samples": SAMPLES, "float32": FLOAT32}
LAST = np.random.default_rng(99).integers(0, ENDS, M)  # each context's last token
FOLLOWING = np.append(LAST[1:], -1)
# Within what honest nodes differ by, honest in the first round, or by a trigger in no group: docs/attacks.md, limits.
HIDDEN = {"swap", "sleeper", "rare-backdoor", "two-token-backdoor"} | {
    name for name, attack in ATTACKS.items() if attack.hides
}


@cache
def honest(seed: int) -> tuple[Array, Array]:
    """Log-probabilities [K, M, V] of nodes that differ, some more than others, and a prediction of them."""
    rng = np.random.default_rng(seed)
    common = -0.5 * np.log(1 + rng.permutation(V)) + rng.normal(0, 1.5, (M, V))
    apart = rng.uniform(0.5, 0.7, (K, 1, 1)) * rng.normal(0, 1, (K, M, V)) + rng.normal(0, 0.05, (K, 1, V))
    return log_softmax((common + apart).astype(np.float32)), common + rng.normal(0, 0.4, common.shape)


def replies(codec: Codec, logits: Array, base: Array, name: str = "") -> Replies:
    prior = make_prior(base) if codec.traits.prior else None
    bits = BITS if codec.traits.sparse else 64.0 * V
    plans = [
        make_plan(contexts=M, vocab=V, bits=bits, clip=None, node=k, prior=prior, slot=k, slots=K) for k in range(K)
    ]
    payloads = [encode(codec, logits[k], plan) for k, plan in enumerate(plans)]
    if name and codec.traits.sparse:
        payloads[-BAD:] = [ATTACKS[name].payload(payload) for payload in payloads[-BAD:]]
    if name and ATTACKS[name].forged and codec.traits.sparse:
        payloads[-BAD:] = [forge(np.exp(logits[k]), plans[k]) for k in range(K - BAD, K)]
    return Replies(codec, GUARDED, payloads, plans, next_tokens=FOLLOWING)


def attacked(name: str, seed: int = 0) -> tuple[Array, Array]:
    """The last nodes' labels are an attack's."""
    logits, base = honest(seed)
    others = softmax(logits[:-BAD]).mean(axis=0)
    bad = [
        _logarithm(ATTACKS[name].labels(View(own, others, np.random.default_rng(k), LAST, LAST == 0, k)))
        for k, own in enumerate(logits[-BAD:])
    ]
    return np.concatenate([logits[:-BAD], bad]), base


def seen(name: str, codec: str) -> bool:
    """Whether an attack is for this codec: labels that need not add up to one are of sampled ones."""
    return codec == "samples" or not ATTACKS[name].forged


def _logarithm(labels: Array) -> Array:
    """Logits of labels from 0 to 1, which need not add up to one."""
    return np.asarray(np.log(np.maximum(labels, 1e-9)), np.float32)


@pytest.mark.parametrize(("name", "codec"), [(n, c) for n in ATTACKS for c in CODECS if n not in HIDDEN and seen(n, c)])
def test_attackers_count_for_nothing_and_honest_nodes_for_as_much_as_before(name: str, codec: str) -> None:
    """A fixed draw; by the next test an honest node of such a federation is doubted with probability below 0.025."""
    given = replies(CODECS[codec], *attacked(name), name)
    trust = GUARDED.trust(audit_nodes(given))
    assert trust[-BAD:].max() < 0.05
    assert trust[:-BAD].min() > DOUBTFUL_TRUST
    found = combine_replies(given, NullObserver())
    assert found.trust is not None
    assert np.array_equal(found.trust, trust)
    if codec == "float32":
        logits = attacked(name)[0]
        bent, straight = (softmax(logits[:n]).mean(axis=0) for n in (K, K - BAD))
        target = softmax(found.target.array)
        assert np.abs(target - straight).sum() < 0.2 * np.abs(bent - straight).sum()


@pytest.mark.parametrize(("codec", "share"), [("samples", 0.07), ("float32", 0.125)])
def test_a_backdoor_shows_in_the_contexts_after_its_trigger_and_nowhere_else(codec: str, share: float) -> None:
    """A little of the mass in 6 % of the contexts: without the view of groups its nodes keep their trust."""
    logits, base = honest(0)
    views = [View(own, softmax(own), np.random.default_rng(0), LAST, LAST == 0) for own in logits[-BAD:]]
    bad = [np.asarray(backdoor(view, share), np.float32) for view in views]
    audit = audit_nodes(replies(CODECS[codec], np.concatenate([logits[:-BAD], bad]), base))
    assert audit.groups is not None
    assert GUARDED.trust(audit)[:-BAD].min() > DOUBTFUL_TRUST
    assert GUARDED.trust(audit)[-BAD:].max() < 0.05
    assert GUARDED.trust(audit._replace(groups=None)).min() > 0.5


def test_groups_of_contexts_have_the_means_of_what_was_meant() -> None:
    """Inner products of sampled labels' means, within 5 of the stated standard errors; of float32 ones exactly."""
    logits, base = honest(4)
    key = bytes(32)
    given = replies(SAMPLES, logits, base)
    pi = softmax(given.plans[0].prior.array / 8)  # type: ignore[union-attr]
    meant = softmax(logits) - pi
    exact = GroupSums(K, V, last_tokens(FOLLOWING), key)
    for k in range(K):
        exact.add_dense(k, np.arange(M), (meant / np.sqrt(pi + 1 / V))[k])
    whole = exact.products(np.arange(M))
    found = audit_nodes(given).groups
    assert whole is not None
    assert found is not None
    means = np.stack([(meant / np.sqrt(pi + 1 / V))[:, last_tokens(FOLLOWING) == t].mean(axis=1) for t in range(ENDS)])
    large = np.bincount(LAST[:-1], minlength=ENDS) >= MIN_CONTEXTS
    assert sorted(np.trace(whole.means, axis1=1, axis2=2)) == pytest.approx(sorted(np.square(means[large]).sum((1, 2))))
    # Which group is which follows from a hash of the payloads: of all of them together there is no doubt.
    errors = np.sqrt(np.square(found.errors).sum(axis=0))
    diagonal = np.arange(K)
    apart = found.means[:, diagonal, diagonal].sum(axis=0) - whole.means[:, diagonal, diagonal].sum(axis=0)
    assert (np.abs(apart) < 5 * errors).all()
    assert (np.abs(apart) < 0.2 * whole.means[:, diagonal, diagonal].sum(axis=0)).all()


def test_sketches_of_many_tokens_keep_distances() -> None:
    """2000 tokens in 256 buckets: a square is right within a standard error of sqrt(2 / 256), 9 %; 4 of them here."""
    rng = np.random.default_rng(0)
    vocab = 2000
    labels = rng.normal(0, 1, (2, 64, vocab))
    last = np.arange(64) % 2
    sums = GroupSums(2, vocab, last, bytes(range(32)))
    for k in range(2):
        sums.add_dense(k, np.arange(64), labels[k])
    found = sums.products(np.arange(64))
    assert found is not None
    means = np.stack([labels[:, last == g].mean(axis=1) for g in range(2)])
    truth = np.square(means[:, 0] - means[:, 1]).sum(axis=1)
    squares = found.means[:, 0, 0] + found.means[:, 1, 1] - 2 * found.means[:, 0, 1]
    assert sorted(squares) == pytest.approx(sorted(truth), rel=4 * np.sqrt(2 / 256))


@pytest.mark.slow
def test_honest_nodes_are_rarely_distrusted() -> None:
    """24 federations of eight honest nodes and sampled labels: one node of 192 is doubted, a rate below 0.025 (95 %).

    It is this scene's: where few tokens make up the difference of the means, honest nodes are doubted more often.
    """
    alarms = sum(
        int((GUARDED.trust(audit_nodes(replies(SAMPLES, *honest(seed)))) < DOUBTFUL_TRUST).sum()) for seed in range(24)
    )
    assert alarms <= 1


@pytest.mark.parametrize("total", [0.25, 1.0])
def test_labels_that_do_not_add_up_to_one_are_seen_whatever_nodes_differ_by(total: float) -> None:
    """Plain distances do not show so little mass, spread over all tokens; what is missing in the sums does.

    Honest nodes are within 4 standard errors of nothing: false-alarm rate about 1e-3 for 16 of them, by a fixed draw.
    """
    logits, base = honest(3)
    given = replies(SAMPLES, logits, base)
    views = [View(own, softmax(own), np.random.default_rng(0), LAST, LAST == 0) for own in logits[-BAD:]]
    forged = [forge(mass(view, total), given.plans[K - BAD + k]) for k, view in enumerate(views)]
    audit = audit_nodes(replace(given, payloads=[*given.payloads[:-BAD], *forged]))
    assert audit.masses is not None
    assert (np.abs(audit.masses.squares) < 4 * audit.masses.errors)[:-BAD].all()
    assert audit.masses.squares[-BAD:] == pytest.approx([_missing(mass(view, total)) for view in views], rel=0.2)
    trust = GUARDED.trust(audit)
    assert trust[:-BAD].min() > DOUBTFUL_TRUST
    assert trust[-BAD:].max() < 0.05
    assert GUARDED.trust(Audit(audit.each, np.zeros((K, K)))).min() > DOUBTFUL_TRUST


def _missing(labels: Array) -> float:
    return float(np.square(labels.sum(axis=1) - 1).mean())


def test_a_relative_view_finds_the_distances_of_what_was_meant() -> None:
    """From 1000 labels of 32 bits, within 0.15 of the true distances, whose standard error is stated as some 3 %."""
    logits, base = honest(0)
    prior = make_prior(base)
    plans = [make_plan(contexts=M, vocab=V, bits=BITS, clip=None, node=k, prior=prior) for k in range(K)]
    payloads = [encode(SAMPLES, logits[k], plan) for k, plan in enumerate(plans)]
    found = audit_nodes(Replies(SAMPLES, GUARDED, payloads, plans)).relative
    assert found is not None
    pi = softmax(prior.array / 8)
    divided = ((softmax(logits) - pi) / np.sqrt(pi + 1 / V)).reshape(K, -1)
    truth = divided @ divided.T / M
    means = divided.reshape(K, M, V).mean(axis=1)
    assert np.diag(found.each) == pytest.approx(np.diag(truth), rel=0.15)
    assert (np.abs(np.diag(found.each - truth)) < 4 * found.each_errors).all()
    assert (np.abs(np.diag(found.whole - means @ means.T)) < 5 * found.whole_errors + 0.3 * np.diag(found.whole)).all()
    assert (found.each_errors < 0.05 * np.diag(found.each)).all()


def test_a_distance_within_its_error_is_none() -> None:
    """One noisy node among exact ones: without its error it is the farthest."""
    points = np.concatenate([np.eye(7), np.full((1, 7), 0.95)])
    gram = points @ points.T
    calm = Audit(np.eye(8), np.eye(8))
    errors = np.zeros(8)
    sure = RelativeProducts(gram, np.eye(8), errors, errors)
    unsure = sure._replace(each_errors=np.where(np.arange(8) == 7, 2.0, 0.0))
    assert GUARDED.trust(calm._replace(relative=sure))[7] < 1
    assert GUARDED.trust(calm._replace(relative=unsure)).tolist() == [1.0] * 8


@pytest.mark.parametrize("slots", [1, K])
def test_an_audit_of_sampled_labels_finds_the_distances_of_what_was_meant(slots: int) -> None:
    """From 1000 labels of 32 bits: within a tenth of the true distances, whose standard error is some 2 %.

    Stratified draws do not add noise that is independent, so products of two nodes are off; less than that.
    """
    logits, base = honest(0)
    given = replies(SAMPLES, logits, base)
    if slots == 1:
        plans = [make_plan(contexts=M, vocab=V, bits=BITS, clip=None, node=k, prior=make_prior(base)) for k in range(K)]
        plans = [make_plan(**{**_fields(plan), "prior": plans[0].prior}) for plan in plans]
        given = Replies(SAMPLES, GUARDED, [encode(SAMPLES, logits[k], plans[k]) for k in range(K)], plans)
    found = audit_nodes(given)
    flat = softmax(logits).reshape(K, -1)
    truth = flat @ flat.T / M
    for gram in (found.each, truth):
        gram[:] = np.diag(gram)[:, None] + np.diag(gram) - 2 * gram
    apart = ~np.eye(K, dtype=bool)
    assert found.each[apart] == pytest.approx(truth[apart], rel=0.1 if slots == 1 else 0.3)


def _fields(plan: Any) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in ("contexts", "vocab", "bits", "clip", "node")}


def test_squares_of_sampled_labels_are_right_whatever_noise_is_claimed() -> None:
    """|p - pi|^2 from symbols and draws, within 15 % for 1000 contexts: the standard error is some 3 %."""
    logits, base = honest(1)
    prior = make_prior(base)
    plan = make_plan(contexts=M, vocab=V, bits=8.0, clip=None, prior=prior)
    payload = encode(SAMPLES, logits[0], plan)
    known = softmax(prior.array / 8)
    truth = np.square(softmax(logits[0]) - known).sum()
    for each in (payload, ATTACKS["false-variance"].payload(payload)):
        reader = SAMPLES.reader(each, plan)
        assert sum(reader.squares(block).sum() for block in reader.sparse()) == pytest.approx(truth, rel=0.15)
    naive = sum(np.square(block.changes).sum() for block in SAMPLES.reader(payload, plan).sparse())
    assert naive > 1.3 * truth  # so the test can fail


def test_draws_of_single_tokens_are_those_of_all() -> None:
    plan = make_plan(contexts=3, vocab=51, slot=2, slots=5)
    keys = draw_keys(plan, range(3))
    tokens = np.array([0, 7, 50], np.int32)
    expected = [(context_draws(keys[k], 51)[tokens[k]] + 0.5) / 2**32 for k in range(3)]
    assert draw_fractions(keys, tokens) == pytest.approx(expected, abs=2.0**-16)


def test_nobody_knows_the_audited_contexts_before_all_payloads_are_there() -> None:
    plans = [make_plan(contexts=20000, vocab=1000, node=k) for k in range(2)]
    one, same, other = (
        audited_contexts(Replies(FLOAT32, GUARDED, payloads, plans))
        for payloads in ([b"a", b"b"], [b"a", b"b"], [b"a", b"c"])
    )
    assert len(one) == (1 << 22) // 1000
    assert np.array_equal(one, same)
    assert len(np.intersect1d(one, other)) < 0.35 * len(one)


def test_the_geometric_median_is_the_point_with_the_least_sum_of_distances() -> None:
    points = np.random.default_rng(0).normal(0, 1, (7, 3))
    points[6] = 100
    middle = weiszfeld(points @ points.T) @ points
    least = np.linalg.norm(points - middle, axis=1).sum()
    for step in np.concatenate([np.eye(3), -np.eye(3)]):
        assert np.linalg.norm(points - middle - 0.05 * step, axis=1).sum() > least
    assert np.linalg.norm(middle) < 1.5


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_nodes_are_trusted_alike(count: int) -> None:
    gram = np.ones((count, count))
    assert GUARDED.trust(Audit(gram, gram)).tolist() == [1.0] * count


def test_trust_is_lost_round_by_round_and_never_comes_back() -> None:
    points = np.concatenate([np.eye(7), np.full((1, 7), 0.95)])
    audit = Audit(points @ points.T, np.zeros((8, 8)))
    once = GUARDED.trust(audit)
    twice = GUARDED.trust(audit, once)
    assert 0 < twice[7] < once[7] < 1
    assert twice[7] == pytest.approx(once[7] ** 2)
    calm = Audit(np.eye(8), np.eye(8))
    assert GUARDED.trust(calm, twice) == pytest.approx(twice)


@pytest.mark.parametrize(("distance", "each", "whole"), [(1.2, True, True), (1.4, False, True), (1.6, False, False)])
def test_less_is_allowed_context_by_context_than_in_the_mean(distance: float, each: bool, whole: bool) -> None:
    points = np.concatenate([np.eye(7, 8), distance * np.eye(1, 8, 7)])
    gram = points @ points.T
    equal = np.zeros((8, 8))
    assert (GUARDED.trust(Audit(gram, equal))[7] == 1) == each
    assert (GUARDED.trust(Audit(equal, gram))[7] == 1) == whole


def test_parameters_of_the_guard_are_checked() -> None:
    with pytest.raises(InputError, match="eta must be"):
        Guarded(eta=0.0)
    with pytest.raises(InputError, match="tolerance must be"):
        Guarded(tolerance=0.5)
    with pytest.raises(InputError, match="context_tolerance must be"):
        Guarded(context_tolerance=0.5)
    with pytest.raises(InputError, match="group_tolerance must be"):
        Guarded(group_tolerance=0.5)


# ---- over rounds


def aggregator(state: AggregatorState | None = None) -> Aggregator:
    budget = Budget(caps=np.full(K, 64.0 * V), floors=np.full(K, float(V)), vocab=V)
    return Aggregator(
        Settings(
            names=[f"node {k}" for k in range(K)],
            run_key=bytes(16),
            probe=bytes(32),
            contexts=M,
            vocab=V,
            rounds=3,
            budget=budget,
            clips=[None] * K,
            codec="float32",
            rule="guarded",
        ),
        state,
    )


def play(machine: Aggregator, logits: Array, following: Array | None = None) -> tuple[Array, AggregatorState]:
    """Run a round in which nodes send these logits; return the target and the next state."""
    from fpld.protocol import Node

    for k, task in machine.open("none", {}, following=following).items():
        node, _ = Node(k, bytes(32)).receive(task)
        assert machine.frame(k, node.answer(task, logits[k])[1]).verdict == "accepted"
    machine.close()
    target = machine.combine().target.array
    return target, machine.end()


def test_trust_survives_a_checkpoint_and_an_attacker_that_behaves_stays_out() -> None:
    _, state = play(aggregator(), attacked("bias")[0])
    assert state.arrays["trust"][-BAD:].max() < 0.05
    good = honest(0)[0]
    found, _ = play(aggregator(state), good)
    resumed, last = play(aggregator(state), good)
    assert np.array_equal(found, resumed)
    straight = np.log(softmax(good[:-BAD]).mean(axis=0))
    assert np.abs(softmax(found) - softmax(straight)).max() < 0.02
    assert last.arrays["trust"][-BAD:].max() < 0.05


def test_an_aggregator_that_knows_the_public_text_sees_a_backdoor_and_one_that_does_not_is_blind() -> None:
    logits = honest(0)[0]
    views = [View(own, softmax(own), np.random.default_rng(0), LAST, LAST == 0) for own in logits[-BAD:]]
    bad = [np.asarray(backdoor(view, 0.125), np.float32) for view in views]
    sent = np.concatenate([logits[:-BAD], bad])
    assert play(aggregator(), sent, FOLLOWING)[1].arrays["trust"][-BAD:].max() < 0.05
    assert play(aggregator(), sent)[1].arrays["trust"][-BAD:].min() > 0.5


def test_a_mixture_by_weights_is_one_in_numpy_whatever_the_codec() -> None:
    logits, base = honest(2)
    weights = np.array([1, 0.5, 0.25, 1, 1e-12, 1, 1, 0.1])
    for codec in CODECS.values():
        given = replies(codec, logits, base)
        given = Replies(codec, GUARDED.with_trust(weights), given.payloads, given.plans)
        plainly = combine_replies(given, NullObserver(), paths=()).target
        quickly = combine_replies(given, NullObserver()).target
        prior = given.plans[0].prior
        fast = quickly.array if prior is None else quickly.absolute(prior).array
        there = np.minimum(plainly.array, fast) > np.log(1e-5)
        assert np.allclose(np.exp(plainly.array)[there], np.exp(fast)[there], rtol=1e-3, atol=1e-6)
        if codec == FLOAT32:
            expected = np.einsum("k,knv->nv", weights, softmax(logits)) / weights.sum()
            assert np.exp(fast) == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert GUARDED.with_trust(weights) == MIXTURE  # so the fast paths of the mixture serve it
