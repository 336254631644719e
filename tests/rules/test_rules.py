"""Rules, one row each: shape, order of nodes, agreement, the definition in numpy; then what each is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import Decoded, InputError
from fpld.codecs.uniform.codec import uniform_error_bias
from fpld.numerics import softmax
from fpld.registry import rules
from fpld.rules import GEOMETRIC, GUARDED, MEAN, MEDIAN, MIXTURE, PRECISION, TRIMMED, Rule, combine
from fpld.rules.mixture import Mixture
from fpld.rules.robust import Trimmed

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.types import Array


def weighted(values: Array, variance: Array, _bias: Array) -> Array:
    variance = np.broadcast_to(variance, values.shape)
    variance = np.maximum(variance, np.quantile(variance, 0.5, axis=0, method="lower"))
    exact = np.broadcast_to(variance == 0, values.shape)
    weights = np.where(exact.any(axis=0), exact, 1 / np.where(exact, 1, variance))
    found: Array = (weights * values).sum(axis=0) / weights.sum(axis=0)
    return found


def median_point(chances: Array) -> Array:
    """Weiszfeld's iteration on the points themselves, context by context."""
    points: Array = np.asarray(chances, np.float64)
    middle: Array = points.mean(axis=0)
    for _ in range(32):
        pull = 1 / np.maximum(np.linalg.norm(points - middle, axis=-1, keepdims=True), 1e-12)
        middle = (pull * points).sum(axis=0) / pull.sum(axis=0)
    return middle


def guarded(chances: Array) -> Array:
    """The mixture by a trust that falls with how much farther off a node is than a multiple of the median node.

    The multiple is 1.25 context by context, and 1.5 over all contexts together.
    """
    excess = np.zeros(len(chances))
    views = ((chances.reshape(len(chances), 1, -1), 1.25), (chances.mean(axis=1, keepdims=True), 1.5))
    for points, tolerance in views:
        away = np.linalg.norm(points - median_point(points), axis=(1, 2))
        excess = np.maximum(excess, away / np.median(away) - tolerance)
    trust = np.exp(-4 * excess)[:, None, None]
    found: Array = (trust * chances).sum(axis=0) / trust.sum(axis=0)
    return found


# What rules of probabilities are, of all nodes' probabilities [K, n, V].
OF_PROBABILITIES: dict[str, Callable[[Array], Array]] = {
    "mixture": lambda chances: chances.mean(axis=0),
    "geometric": median_point,
    "guarded": guarded,
    "fitted": lambda chances: chances.mean(axis=0),  # nobody says what followed
}


def of_logits(name: str, values: Array, bias: Array) -> Array:
    found: Array = np.log(OF_PROBABILITIES[name](softmax(values - bias)))
    return found


# What each rule is, of all nodes' values, variances and biases [K, n, V].
DEFINITIONS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "mean": lambda values, *_: values.mean(axis=0),
    "precision": weighted,
    "mixture": lambda values, _, bias: of_logits("mixture", values, bias),
    "trimmed": lambda values, *_: np.sort(values, axis=0)[1:-1].mean(axis=0),
    "median": lambda values, *_: np.median(values, axis=0),
    "geometric": lambda values, _, bias: of_logits("geometric", values, bias),
    "guarded": lambda values, _, bias: of_logits("guarded", values, bias),
    "fitted": lambda values, _, bias: of_logits("fitted", values, bias),
}
each_rule = pytest.mark.parametrize("rule", [pytest.param(rules.get(name), id=name) for name in DEFINITIONS])


def replies(values: Array, variance: Any = 0.0, bias: Any = 0.0) -> list[Decoded]:
    """Decoded blocks of nodes, from values [K, n, V] and what broadcasts to them."""
    others = (np.broadcast_to(np.asarray(other, values.dtype), values.shape) for other in (variance, bias))
    return [Decoded(*fields) for fields in zip(values, *others, strict=True)]


def test_every_rule_has_a_row() -> None:
    assert set(DEFINITIONS) == set(rules.names())
    assert [rule for rule in map(rules.get, rules.names()) if rule.traits.needs_all] == [
        GEOMETRIC,
        GUARDED,
        MEDIAN,
        PRECISION,
        TRIMMED,
    ]


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rules_are_what_they_say(name: str, dtype: type) -> None:
    rng = np.random.default_rng(0)
    values: Array = rng.normal(0, 3, (5, 4, 30)).astype(dtype)
    variance, bias = rng.uniform(0.1, 2, (2, 5, 4, 30)).astype(dtype)
    variance[2, :, 7] = variance[3, 1] = 0  # exact nodes
    values[4] *= 0.1 + 3 * (name == "guarded")  # a node that is not trusted wholly
    found = combine(rules.get(name), replies(values, variance, bias))
    assert found.dtype == dtype
    assert found == pytest.approx(DEFINITIONS[name](values, variance, bias), rel=1e-4, abs=1e-5)


@each_rule
def test_rules_keep_shape_type_and_what_all_agree_on(rule: Rule) -> None:
    values = np.broadcast_to(np.arange(12, dtype=np.float32).reshape(3, 4), (5, 3, 4))
    combined = combine(rule, [Decoded(each, np.full((1, 1), 0.5), np.zeros((1, 1))) for each in values])
    assert combined.shape == (3, 4)
    assert softmax(combined) == pytest.approx(softmax(values[0]), abs=1e-6)


@each_rule
def test_rules_do_not_depend_on_the_order_of_nodes(rule: Rule) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(7, 4, 5))
    variance = rng.uniform(0.1, 2, (7, 4, 5))
    order = rng.permutation(7)
    found, other = (combine(rule, replies(values[o], variance[o], variance[o] / 2)) for o in (order, slice(None)))
    assert found == pytest.approx(other)


@each_rule
def test_what_was_taken_in_may_change_afterwards(rule: Rule) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    expected = combine(rule, replies(values))
    work = rule.start((4, 5))
    room = np.empty((4, 5), np.float32)
    for each in values:
        room[:] = each
        work.add(Decoded(room, np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)))
    room[:] = 99
    assert np.array_equal(work.result(), expected)


@each_rule
def test_bad_shapes_are_refused(rule: Rule) -> None:
    none = np.zeros((1, 1))
    with pytest.raises(InputError, match="variance must broadcast"):
        combine(rule, [Decoded(np.zeros((3, 4)), np.zeros((5, 4)), none)])
    with pytest.raises(InputError, match="bias must broadcast"):
        combine(rule, [Decoded(np.zeros((3, 4)), none, np.zeros((2, 3, 4)))])
    with pytest.raises(InputError, match=r"\(contexts, vocab\)"):
        combine(rule, [Decoded(np.zeros(4), none, none)])
    with pytest.raises(InputError, match=r"values must have the first node's shape \(3, 4\), got \(2, 4\)"):
        combine(rule, [Decoded(np.zeros((n, 4)), none, none) for n in (3, 2)])
    with pytest.raises(InputError, match="at least one node"):
        combine(rule, [])


def test_precision_beats_the_mean_under_unequal_noise_by_as_much_as_it_should() -> None:
    """Variance 1/sum(1/v) against sum(v)/K^2, each within 3 %: the relative error of 2e5 squares is 0.3 %."""
    rng = np.random.default_rng(1)
    noise = np.array([1.0, 1.0, 4.0]).reshape(3, 1, 1)
    values = rng.normal(0, np.sqrt(noise), (3, 1, 200_000))
    assert combine(PRECISION, replies(values, noise)).var() == pytest.approx(1 / (1 / noise).sum(), rel=0.03)
    assert combine(MEAN, replies(values, noise)).var() == pytest.approx(noise.sum() / 9, rel=0.03)


def test_a_node_that_claims_no_variance_counts_for_no_more_than_others() -> None:
    """One of eight claims exact one-hot logits: beside seven that agree it has an eighth, not everything."""
    values = np.concatenate([np.full((1, 1, 50), -50.0), np.random.default_rng(3).normal(0, 0.1, (7, 1, 50))])
    values[0, 0, 7] = 50.0
    for claimed in (0.0, 1e-12, 1e-3):
        variance = np.array([claimed, *[1.0] * 7]).reshape(8, 1, 1)
        found = combine(PRECISION, replies(values, variance))
        assert np.allclose(found, values.mean(axis=0))


def test_exact_nodes_decide_alone() -> None:
    values = np.array([1.0, 2.0, 9.0]).reshape(3, 1, 1)
    variance = np.array([0.0, 0.0, 1.0]).reshape(3, 1, 1)
    assert combine(PRECISION, replies(values, variance)).tolist() == [[1.5]]


@pytest.mark.parametrize("rule", [TRIMMED, MEDIAN])
def test_one_bad_node_of_five_moves_robust_rules_little(rule: Rule) -> None:
    values = np.random.default_rng(2).normal(0, 0.1, (5, 1, 1000))
    values[3] = 1e6
    assert np.abs(combine(rule, replies(values))).max() < 0.5


def test_trim_must_leave_a_node() -> None:
    with pytest.raises(InputError, match="trim must be less than half of the 4 nodes, got 2"):
        combine(Trimmed(trim=2), replies(np.zeros((4, 1, 2))))
    with pytest.raises(InputError, match="trim must be an integer"):
        Trimmed(trim=-1)


@pytest.mark.slow
def test_mixture_takes_a_uniform_errors_bias_out() -> None:
    """One rare token coded coarsely, 20,000 copies: its probability comes back, uncorrected it does not."""
    rng = np.random.default_rng(3)
    truth = np.log(np.array([0.7, 0.28, 0.02]))
    step = 3.0
    copies = np.tile(truth, (20_000, 1, 1))
    copies[:, 0, 2] += rng.uniform(-step / 2, step / 2, 20_000)
    factor = uniform_error_bias(np.array([0.0, 0.0, step**2 / 12]))
    assert np.exp(combine(MIXTURE, replies(copies, 0.0, factor)))[0, 2] == pytest.approx(0.02, rel=0.02)
    assert np.exp(combine(MIXTURE, replies(copies)))[0, 2] > 0.02 * 1.3


def test_mixture_averages_a_codecs_own_probabilities_and_other_rules_do_not() -> None:
    """Negative ones count as they are; where nothing is left, the most likely logarithm stands."""
    values = np.log(np.array([[[0.5, 0.3, 0.2]], [[0.2, 0.2, 0.6]]]))
    chances = np.array([[[0.9, 0.3, -0.2]], [[0.1, -0.1, 1.0 - 0.9]]])
    own = [Decoded(v, np.zeros((1, 1)), np.zeros((1, 1)), c) for v, c in zip(values, chances, strict=True)]
    assert combine(MIXTURE, own)[0] == pytest.approx(np.log([0.5, 0.1, 0.3]))
    assert np.array_equal(combine(MEAN, own), combine(MEAN, replies(values)))


def test_the_mixture_keeps_what_float32_cannot_hold() -> None:
    values = np.array([[[0.0, -200.0, -3.0]]], np.float32)
    found = combine(MIXTURE, replies(np.concatenate([values, values + 1])))
    assert found[0, 1] == pytest.approx(-200, abs=1)
    assert found[0, [0, 2]] == pytest.approx([-0.0486, -3.0486], abs=1e-3)


@pytest.mark.parametrize("kind", ["none", "rows", "columns", "all"])
@pytest.mark.parametrize("vocab", [3, 1000, 1024, 2500])
def test_the_mixture_in_loops_is_that_in_numpy(kind: str, vocab: int) -> None:
    """Biases of all shapes that broadcast; logits from flat to far apart."""
    rng = np.random.default_rng(vocab)
    shape = {"none": (1, 1), "rows": (6, 1), "columns": (1, vocab), "all": (6, vocab)}[kind]
    off = rng.uniform(0, 3, shape).astype(np.float32)
    nodes = [(scale * rng.standard_normal((6, vocab)) + 30).astype(np.float32) for scale in (0.0, 1.0, 5.0, 60.0)]
    decoded = [Decoded(values, off, off) for values in nodes]
    slow = combine(Mixture(reference=True), decoded)
    assert combine(MIXTURE, decoded) == pytest.approx(slow, rel=1e-5, abs=2e-5)


def test_the_mixture_of_a_context_does_not_depend_on_the_others() -> None:
    """A context's result does not depend on its neighbours: nor on threads and blocks."""
    values = np.random.default_rng(0).normal(0, 3, (2, 5, 1500)).astype(np.float32)
    whole = combine(MIXTURE, replies(values, 0.2, 0.1))
    parts = [combine(MIXTURE, replies(values[:, i : i + 1], 0.2, 0.1)) for i in range(5)]
    assert np.array_equal(whole, np.concatenate(parts))
