"""The fitted mixture: weights against a solver, from sampled labels against what was meant, and in a round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy.optimize import minimize

from fpld import encode
from fpld.codecs.prior import make_prior
from fpld.codecs.samples.codec import SAMPLES
from fpld.numerics import log_softmax, softmax
from fpld.protocol.combine import NullObserver, Replies
from fpld.protocol.fast_paths import combine_replies
from fpld.protocol.node_audit import audit_nodes
from fpld.registry import codecs
from fpld.rules.base import Audit
from fpld.rules.fitted import FITTED, fit
from tests.helpers import make_plan

if TYPE_CHECKING:
    from fpld.types import Array

M = 3000
V = 64
K = 4


def scene(seed: int = 0) -> tuple[Array, Array, Array]:
    """Two nodes that know much, one that knows little and one that knows nothing; their base; what followed."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(scale=2.0, size=(M, V))
    errors = np.array([0.7, 0.8, 2.0, 4.0])[:, None, None] * rng.normal(size=(K, M, V))
    logits = log_softmax(truth + errors).astype(np.float32)
    base = log_softmax(truth + 1.5 * rng.normal(size=(M, V))).astype(np.float32)
    following = (softmax(truth).cumsum(axis=1) > rng.random((M, 1))).argmax(axis=1)
    following[::50] = -1
    return logits, base, following


def by_solver(products: Array, gains: Array) -> Array:
    """The same minimum by SciPy."""
    found = minimize(
        lambda w: w @ products @ w - 2 * gains @ w,
        np.full(len(gains), 1 / len(gains)),
        jac=lambda w: 2 * (products @ w - gains),
        bounds=[(0, 1)] * len(gains),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    weights: Array = found.x
    return weights


def meant(logits: Array, following: Array) -> tuple[Array, Array]:
    """Products and gains of the labels themselves."""
    chances = softmax(logits.astype(np.float64))
    known = np.flatnonzero(following >= 0)
    flat = chances.reshape(K, -1)
    return flat @ flat.T / M, chances[:, known, following[known]].mean(axis=1)


@pytest.mark.parametrize("seed", range(8))
def test_weights_are_those_of_a_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = rng.dirichlet(np.ones(12), (7, 40))
    what = rng.integers(12, size=40)
    products = np.einsum("knv,lnv->kl", nodes, nodes) / 40
    gains = nodes[:, np.arange(40), what].mean(axis=1)
    found = fit(products, gains)
    assert found.sum() == pytest.approx(1)
    assert found.min() >= 0
    assert found == pytest.approx(by_solver(products, gains), abs=2e-4)


def test_an_estimate_with_a_negative_square_is_taken_as_zero() -> None:
    assert fit(np.diag([-0.1, 1.0]), np.array([0.5, 0.5])).round(6).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("bits", [24.0, 60.0])
def test_sampled_labels_give_the_weights_of_what_was_meant(bits: float) -> None:
    """3000 labels of 24 bits: the weights are within 0.1, some four standard errors over other draws."""
    logits, base, following = scene()
    prior = make_prior(base)
    plans = [
        make_plan(contexts=M, vocab=V, bits=bits, clip=None, node=k, prior=prior, slot=k, slots=K) for k in range(K)
    ]
    given = Replies(
        SAMPLES, FITTED, [encode(SAMPLES, logits[k], plans[k]) for k in range(K)], plans, next_tokens=following
    )
    right = fit(*meant(logits, following))
    trust = FITTED.trust(audit_nodes(given))
    assert trust / trust.sum() == pytest.approx(right, abs=0.1)
    combined = combine_replies(given, NullObserver())
    assert combined.trust is not None
    assert np.array_equal(combined.trust, trust)


def test_dense_labels_give_a_mixture_that_foretells_better_than_the_plain_one_and_the_best_node() -> None:
    logits, _, following = scene()
    codec = codecs.get("float32")
    plans = [make_plan(contexts=M, vocab=V, bits=32.0 * V, clip=None, node=k) for k in range(K)]
    payloads = [encode(codec, logits[k], plan) for k, plan in enumerate(plans)]
    known = np.flatnonzero(following >= 0)

    def loss(values: Array) -> float:
        return -float(log_softmax(values)[known, following[known]].mean())

    given = Replies(codec, FITTED, payloads, plans, next_tokens=following)
    fitted = loss(combine_replies(given, NullObserver()).target.array)
    plain = loss(np.log(softmax(logits).mean(axis=0)))
    assert fitted < min(plain, *map(loss, logits)) - 0.05
    right = fit(*meant(logits, following))
    assert FITTED.trust(audit_nodes(given)) == pytest.approx(np.maximum(right / right.max(), 1e-9), abs=1e-3)


def test_without_the_public_text_all_count_alike() -> None:
    assert FITTED.trust(Audit(np.eye(3), np.eye(3))).tolist() == [1.0, 1.0, 1.0]
