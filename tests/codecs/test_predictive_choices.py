"""What a predictive node chooses for itself, and what goes on from round to round."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.budget import try_blocks
from fpld import FrameError, InputError, decode, encode
from fpld.codecs import PredictiveCodec, make_prior
from fpld.codecs.predictive import tokens
from fpld.codecs.predictive.accumulate import add_payloads
from fpld.codecs.predictive.header import DITHER, PRIOR
from fpld.paper import theory
from tests.codecs.test_predictive import CODEC, NODES, M, V, combined_kl, scene
from tests.helpers import make_plan, without_numba

if TYPE_CHECKING:
    from fpld.types import Array


def kl_of_mean(logits: Array, bits: float, *, slots: int, codec: PredictiveCodec = CODEC) -> tuple[float, int]:
    """All nodes hold the same logits: KL of their mean, and the mode of the first."""
    decoded = []
    modes = []
    for node in range(NODES):
        plan = make_plan(
            node=node, contexts=len(logits), vocab=V, bits=bits * V, clip=None, slot=node % slots, slots=slots
        )
        payload = encode(codec, logits, plan)
        modes.append(payload[0])
        decoded.append(decode(codec, payload, plan, dtype=np.float64).values)
    return float(theory.kl(logits, np.mean(decoded, axis=0) - logits).mean()), modes[0]


def test_a_good_prior_is_used_and_a_wrong_one_is_not() -> None:
    logits, prior = scene()
    wrong = make_prior(np.random.default_rng(9).normal(0, 6, (M, V)))
    for bits in (0.1, 1.0):
        modes = []
        for shared in (prior, wrong):
            plan = make_plan(contexts=M, vocab=V, bits=bits * V, clip=None, prior=shared)
            modes.append(encode(CODEC, logits[0], plan)[0] & PRIOR)
        assert modes == [PRIOR, 0]
        # What a wrong prior costs is the bit that says so.
        assert combined_kl(CODEC, bits, logits, prior=wrong) == pytest.approx(
            combined_kl(CODEC, bits, logits), rel=1e-3
        )


def test_nodes_that_agree_win_by_stratified_dither_and_choose_it() -> None:
    logits = np.random.default_rng(4).normal(0, 1, (M, V))
    alone, mode = kl_of_mean(logits, 2.0, slots=1)
    together, dithered = kl_of_mean(logits, 2.0, slots=NODES)
    assert not mode & DITHER
    assert dithered & DITHER
    assert together < alone / 5


def test_below_half_a_bit_it_does_not_dither() -> None:
    logits = np.random.default_rng(4).normal(0, 1, (M, V))
    assert not kl_of_mean(logits, 0.2, slots=NODES)[1] & DITHER


@pytest.mark.parametrize("bits", [0.1, 1.0])
@pytest.mark.parametrize("some", [np.arange(3), np.array([2, 77, 78, 199])], ids=["first", "spread"])
def test_nodes_add_up_to_what_is_decoded(bits: float, some: Array) -> None:
    logits, prior = scene()
    fields: dict[str, Any] = {"contexts": M, "vocab": V, "bits": bits * V, "clip": None}
    plans = [make_plan(node=node, prior=prior, **fields) for node in range(NODES)]
    payloads = [encode(CODEC, node, plan) for node, plan in zip(logits, plans, strict=True)]
    payloads[1] = b""  # sent nothing
    wrong = replace(plans[2], prior=make_prior(np.random.default_rng(9).normal(0, 6, (M, V))))
    payloads[2] = encode(CODEC, logits[2], wrong)  # codes without the prior
    assert not payloads[2][0] & PRIOR
    decoded = [decode(CODEC, payload, plan) for payload, plan in zip(payloads, plans, strict=True)]
    found = list(add_payloads(payloads, plans, some, mixture=False, threads=2))
    total = np.concatenate([part.total for part in found])
    assert np.allclose(total, np.sum([each.values for each in decoded], axis=0), atol=1e-4)
    assert np.array_equal(np.concatenate([part.sampled for part in found]), some)
    for field in ("values", "variance"):
        sampled = np.concatenate([getattr(part, field) for part in found], axis=1)
        assert np.allclose(sampled, [getattr(each, field)[some] for each in decoded], rtol=1e-4, atol=1e-5)
    assert sum(part.noise for part in found) == pytest.approx(
        np.array([each.variance.sum(dtype=np.float64) for each in decoded]), rel=1e-4
    )
    mixed = (
        np.concatenate([part.total for part in add_payloads(payloads, plans, some, mixture=True, threads=1)]) / NODES
    )
    assert np.allclose(mixed, np.mean([theory.softmax(each.values) for each in decoded], axis=0), rtol=1e-4)


def test_what_was_learnt_in_the_round_before_saves_bits() -> None:
    logits, prior = scene()
    plan = make_plan(contexts=M, vocab=V, bits=0.05 * V, clip=None, prior=prior)
    reader = CODEC.reader(encode(CODEC, logits[0], plan), plan)
    reader.check()
    learnt = reader.learnt
    assert learnt is not None
    error = [
        float(theory.kl(logits[1], decode(CODEC, encode(CODEC, logits[1], each), each).values - logits[1]).mean())
        for each in (plan, replace(plan, learnt=learnt))
    ]
    assert error[1] < error[0]
    with pytest.raises(InputError, match="learnt must be"):
        encode(CODEC, logits[1], replace(plan, learnt=learnt[:-1]))
    with pytest.raises(InputError, match="learnt must be"):
        encode(CODEC, logits[1], replace(plan, learnt=0 * learnt))


def test_a_payload_against_a_prior_needs_it() -> None:
    logits, prior = scene()
    plan = make_plan(contexts=M, vocab=V, bits=0.5 * V, clip=None, prior=prior)
    payload = encode(CODEC, logits[0], plan)
    with pytest.raises(FrameError, match="the plan has none"):
        CODEC.reader(payload, replace(plan, prior=None)).check()


@pytest.mark.slow
def test_random_and_adversarial_blocks() -> None:
    """The command `python benchmarks/budget.py` tries a hundred thousand."""
    assert try_blocks((500, 0, 500))["predictive"] > 500 / 3


@pytest.mark.slow
def test_without_numba_the_bytes_are_the_same() -> None:
    """The kernels as plain Python: what a site without numba sends."""
    assert without_numba("tests.codecs.test_predictive_choices", "small") == small()


def small() -> list[str]:
    """Payloads of every mode, in hexadecimal, and a digest of what they decode to."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (6, 40))
    prior = make_prior(logits + rng.normal(0, 0.5, logits.shape))
    out = []
    for codec, fields in (
        (CODEC, {"prior": prior}),
        (CODEC, {}),
        (CODEC, {"slots": 4, "slot": 1}),
    ):
        plan = make_plan(contexts=6, vocab=40, bits=60.0, clip=None, **fields)
        payload = encode(codec, logits, plan)
        out += [payload.hex(), str(decode(codec, payload, plan).values.round(3).sum(dtype=np.float64).round(2))]
    return out


def test_what_was_learnt_is_what_the_next_begins_with() -> None:
    totals = np.full(tokens.CLASSES, 1000)
    table = tokens.learnt_token_probabilities(tokens.new_models(totals, 100, None, decoder=False))
    again = tokens.learnt_token_probabilities(tokens.new_models(totals, 100, table, decoder=False))
    assert np.abs(again.astype(int) - table).max() < 65536 / 100
