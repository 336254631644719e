"""Sequential refinement: in the paper's channel, with honest symbols, and as bytes through the codec."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fpld import decode, encode
from fpld.codecs import UniformCodec
from fpld.paper import quantize
from fpld.paper.quantize import Refinement, paper_channel, wire_quantizer
from fpld.paper.simulate import node_dither
from tests.helpers import make_plan

SHAPE = (3, 20, 40)
LOGITS = np.random.default_rng(0).normal(0, 1, SHAPE).clip(-3, 3)  # nodes differ by N(0, 1)


def errors(scheme: quantize.Scheme, channel: quantize.Channel, rounds: int) -> list[float]:
    state = Refinement.start(SHAPE, 3.0)
    found = []
    for t in range(rounds):
        state = scheme(state, channel, LOGITS, node_dither(SHAPE, round=t, seed=1))
        found.append(float(np.square(state.reconstruction - LOGITS).mean()))
    return found


@pytest.mark.parametrize("bits", [0.5, 1.0, 2.0, 3.3])
def test_each_round_divides_the_error_by_4_to_the_bits(bits: float) -> None:
    found = errors(quantize.refine, paper_channel(bits), 5)
    # A mean of 2400 squares of uniform errors has a standard deviation of sqrt(0.8 / 2400) = 1.8 %; five and a half
    # of them: one false alarm in a million for all twenty.
    for t, error in enumerate(found, start=1):
        assert error == pytest.approx(9 / 3 * 4 ** (-bits * t), rel=0.1)


def test_honest_symbols_divide_by_their_own_step() -> None:
    found = errors(quantize.refine, lambda half: wire_quantizer(half, 4), 4)
    # The ratio of two such means: 2.6 %, so 10 % is 3.9 of them; one false alarm in 3500 draws.
    for before, after in pairwise(found):
        assert before / after == pytest.approx(9, rel=0.1)


@pytest.mark.parametrize("scheme", [quantize.vanilla, quantize.fixed_step])
def test_the_others_stall(scheme: quantize.Scheme) -> None:
    found = errors(scheme, paper_channel(2.0), 5)
    assert max(found) / min(found) < 1.1


def test_residual_to_the_broadcast_mean_fails_when_nodes_differ() -> None:
    assert (
        errors(quantize.broadcast, paper_channel(2.0), 4)[-1] > 100 * errors(quantize.refine, paper_channel(2.0), 4)[-1]
    )


def test_refinement_in_bytes() -> None:
    """A node sends its residual in units of the range; both ends then hold the same reconstruction, bit for bit."""
    codec = UniformCodec()
    logits = LOGITS[0]
    node, aggregator = (Refinement.start(logits.shape, np.full(logits.shape, 3.0)) for _ in range(2))
    for t in range(1, 5):
        plan = make_plan(round=t, contexts=20, vocab=40, bits=100.0, clip=1.0)  # 2.5 bits a coordinate
        payload = encode(codec, (logits - node.reconstruction) / node.half_range, plan)
        assert 8 * len(payload) <= 20 * 100
        sides = []
        for state in (node, aggregator):
            sent, variance, *_ = decode(codec, payload, plan, dtype=np.float64)
            sides.append(
                Refinement(state.reconstruction + sent * state.half_range, state.half_range * np.sqrt(3 * variance))
            )
        node, aggregator = sides
        assert np.array_equal(node.reconstruction, aggregator.reconstruction)
        assert (np.abs(logits - node.reconstruction) <= node.half_range * (1 + 1e-9)).all()
    assert node.half_range.max() < 3 * (1 / 3) ** 4 * 1.01
