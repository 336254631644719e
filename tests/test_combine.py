"""Rules, one row each: shape, order of nodes, agreement; then what each is for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld import InputError
from fpld.rules import builtin as combine

if TYPE_CHECKING:
    from fpld.rules.builtin import Rule
from fpld.numerics import softmax

RULES = [
    pytest.param(combine.mean, id="mean"),
    pytest.param(combine.precision, id="precision"),
    pytest.param(partial(combine.precision, spread=1.0), id="precision-spread"),
    pytest.param(combine.trimmed, id="trimmed"),
    pytest.param(combine.median, id="median"),
    pytest.param(combine.mixture, id="mixture"),
]


@pytest.mark.parametrize("rule", RULES)
def test_rules_keep_shape_type_and_what_all_agree_on(rule: Rule) -> None:
    values = np.broadcast_to(np.arange(12, dtype=np.float32).reshape(3, 4), (5, 3, 4))
    combined = rule(values, np.full((5, 1, 1), 0.5, np.float32))
    assert combined.dtype == np.float32
    assert softmax(combined) == pytest.approx(softmax(values[0]), abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_rules_do_not_depend_on_the_order_of_nodes(rule: Rule) -> None:
    rng = np.random.default_rng(0)
    values, variance = rng.normal(size=(7, 4, 5)), rng.uniform(0.1, 2, (7, 4, 5))
    order = rng.permutation(7)
    assert rule(values[order], variance[order]) == pytest.approx(rule(values, variance))


@pytest.mark.parametrize("rule", RULES)
def test_bad_shapes_are_refused(rule: Rule) -> None:
    with pytest.raises(InputError, match="variance must broadcast"):
        rule(np.zeros((3, 4)), np.zeros((5, 4)))
    with pytest.raises(InputError, match="at least one node"):
        rule(np.zeros((0, 4)), np.zeros((0, 4)))


def test_precision_beats_the_mean_under_unequal_noise_by_as_much_as_it_should() -> None:
    """Variance 1/sum(1/v) against sum(v)/K^2, each within 3 %: the relative error of 2e5 squares is 0.3 %."""
    rng = np.random.default_rng(1)
    noise = np.array([0.1, 1.0, 4.0]).reshape(3, 1)
    values = rng.normal(0, np.sqrt(noise), (3, 200_000))
    assert combine.precision(values, noise).var() == pytest.approx(1 / (1 / noise).sum(), rel=0.03)
    assert combine.mean(values, noise).var() == pytest.approx(noise.sum() / 9, rel=0.03)


def test_exact_nodes_decide_alone() -> None:
    values, variance = np.array([[1.0], [2.0], [9.0]]), np.array([[0.0], [0.0], [1.0]])
    assert combine.precision(values, variance).tolist() == [1.5]


@pytest.mark.parametrize("rule", [combine.trimmed, combine.median])
def test_one_bad_node_of_five_moves_robust_rules_little(rule: Rule) -> None:
    values = np.random.default_rng(2).normal(0, 0.1, (5, 1000))
    values[3] = 1e6
    assert np.abs(rule(values, np.zeros((5, 1)))).max() < 0.5


def test_mixture_takes_the_dithers_bias_out() -> None:
    """One rare token coded coarsely, 20,000 copies: its probability comes back, uncorrected it does not."""
    rng = np.random.default_rng(3)
    truth, step = np.log(np.array([0.7, 0.28, 0.02])), 3.0
    copies = np.tile(truth, (20_000, 1))
    copies[:, 2] += rng.uniform(-step / 2, step / 2, 20_000)
    variance = np.broadcast_to(np.array([0.0, 0.0, step**2 / 12]), copies.shape)
    assert np.exp(combine.mixture(copies, variance))[2] == pytest.approx(0.02, rel=0.02)
    assert np.exp(combine.mixture(copies, np.zeros_like(copies)))[2] > 0.02 * 1.3


def test_trim_must_leave_a_node() -> None:
    with pytest.raises(InputError, match="trim must be less than half of the 4 nodes, got 2"):
        combine.trimmed(np.zeros((4, 2)), np.zeros((4, 2)), trim=2)
