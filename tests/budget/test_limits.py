"""What each node may send: one function for the run and for the planner, and a link that carries whole frames."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fpld import config as configuration
from fpld.budget.limits import Sender, Uplinks
from fpld.budget.policy import Budget
from fpld.errors import BudgetError
from fpld.federation.state import configured_budget, update_budget
from fpld.planner import forecast
from fpld.planner.inputs import read_plan_source
from fpld.protocol.round_statistics import RunningStatistics
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.types import Plan


@pytest.mark.parametrize("name", configuration.presets())
def test_the_run_and_the_planner_agree(name: str) -> None:
    vocab = 512
    config, _ = configuration.read_config(name)
    contexts = config.probe.contexts + config.contexts_by_model
    source = read_plan_source(name, vocab=vocab)
    inputs = source.inputs
    if config.update_bits is None:
        budget = configured_budget(config, contexts=contexts, vocab=vocab)
    else:
        budget = update_budget(config, weights=inputs.units, contexts=contexts, vocab=vocab)
    assert np.array_equal(budget.caps, inputs.caps())
    assert np.array_equal(budget.floors, inputs.floors())
    assert budget.weights is not None
    assert np.array_equal(budget.weights, inputs.weights)
    assert budget.total == source.total
    if budget.estimator == "none":
        assert forecast(inputs, budget.allocator or "optimal", source.total).bits.tolist() == budget.bits(1).tolist()


def test_a_link_carries_the_frame_with_its_overhead() -> None:
    uplinks = Uplinks([Sender("a", 1e5), Sender("b", 1e5, cap=40.0)], 512, 100, 60.0, "predictive", OVERHEAD_BYTES)
    caps = uplinks.limits().caps
    assert uplinks.plan(uplinks.nodes[0], caps[0]).budget_bytes + OVERHEAD_BYTES == 1e5 * 60 / 8
    assert caps[1] == 40.0  # a cap is on the payload


def test_bits_that_a_node_had_no_use_for_go_to_others() -> None:
    budget = Budget(np.array([100.0, 100.0]), np.array([1.0, 1.0]), 100, total=120.0, allocator="uniform")
    assert budget.bits(2, useful=np.array([20.0, np.inf])).tolist() == [20.0, 100.0]
    assert budget.bits(2, useful=np.array([20.0, 0.5])).tolist() == [20.0, 1.0]  # never below the floor
    alone = replace(budget, total=None, allocator=None)
    assert alone.bits(2, useful=np.array([20.0, np.inf])).tolist() == [20.0, 100.0]


def test_a_node_that_uses_its_room_gets_more_again() -> None:
    statistics = RunningStatistics(2, Budget(np.full(2, 100.0), np.ones(2), 100))
    plans = {i: Plan(bytes(16), 1, i, bytes(32), 80, 100, 100.0, None) for i in range(2)}
    statistics.record_usage(plans, {0: 180, 1: 1000})  # 18 of 100 bits, and all
    assert statistics.useful_bits.tolist() == [1.25 * 18, np.inf]
    statistics.record_usage({0: replace(plans[0], bits=22.5)}, {0: 225})
    assert statistics.useful_bits.tolist() == [np.inf, np.inf]
    arrays, meta = statistics.state()
    again = RunningStatistics(2, Budget(np.full(2, 100.0), np.ones(2), 100))
    again.restore(arrays, meta)
    assert again.useful_bits.tolist() == statistics.useful_bits.tolist()


def test_limits_say_what_holds_a_node() -> None:
    nodes = [Sender("link", 1e3), Sender("cap", 1e9, cap=150.0), Sender("codec", clip=1.0), Sender("range")]
    limits = Uplinks(nodes, 100, 100, 60.0, "uniform", OVERHEAD_BYTES).limits()
    assert limits.most.argmin(axis=0).tolist() == [0, 1, 2, 2]
    assert limits.caps.tolist()[1:] == [150.0, 1500.0, 1532.0]
    assert limits.floors.tolist() == [140.0, 140.0, 100.0, 140.0]
    paper = Uplinks(nodes, 100, 100, 60.0, None, 0).limits()
    assert paper.floors.tolist() == [0.0] * 4
    assert paper.caps.tolist() == [600.0, 150.0, math.inf, math.inf]


def test_what_is_infeasible_says_what_would_do() -> None:
    thin = Uplinks([Sender("far", 1e3)], 1000, 100, 60.0, "uniform", OVERHEAD_BYTES)
    with pytest.raises(BudgetError, match=r"'far' .* feasible is a deadline of at least 141\.1 s, or at most 420 con"):
        thin.feasible()
    assert Uplinks(thin.nodes, 1000, 100, 141.1, "uniform", OVERHEAD_BYTES).feasible().caps[0] >= 140
    assert Uplinks(thin.nodes, 420, 100, 60.0, "uniform", OVERHEAD_BYTES).feasible().caps[0] >= 140
    with pytest.raises(BudgetError, match=r"node 'near' may send 50 bits per context .* needs 140: raise its con"):
        Uplinks([Sender("near", cap=50.0)], 1000, 100, None, "uniform", OVERHEAD_BYTES).feasible()
