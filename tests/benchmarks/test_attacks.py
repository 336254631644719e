"""Attacks, triggers and adaptive labels on tiny sizes, and the table that several processes write."""

from __future__ import annotations

import json
import multiprocessing
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.adaptive import Scales, half_reach, reach_of, worst_labels
from benchmarks.attacks import ATTACKS, COMMON, TOKEN, TRIGGERS, Trigger, View
from benchmarks.byzantine import HIDDEN_TRUST, Cell, add_row, read_rows
from docs import kept_results, table_lines
from fpld.numerics import softmax

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.byzantine import Federation
    from fpld.types import Array

K = 6
M = 400
V = 24
ENDS = 8
WEIGHT = 0.25


@cache
def nodes() -> Array:
    """Probabilities [K, M, V] of nodes that differ."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1.5, (M, V)) + 0.5 * rng.normal(0, 1, (K, M, V))
    return np.asarray(softmax(logits))


def scales() -> Scales:
    last = np.random.default_rng(4).integers(0, ENDS, M)
    return Scales.of(nodes().mean(axis=0), last)


def loss(labels: Array) -> float:
    """The loss of a mixture of the honest mean with these labels."""
    honest = nodes().mean(axis=0)
    mixed = (1 - WEIGHT) * honest + WEIGHT * labels
    return float(-(honest * np.log(mixed)).sum(axis=1).mean())


def test_adaptive_labels_do_harm_the_more_the_farther_they_may_go_and_stay_probabilities() -> None:
    honest = nodes().mean(axis=0)
    reach = reach_of(list(nodes()), scales(), 1.5)
    worst = worst_labels(honest, scales(), reach, WEIGHT)
    less = worst_labels(honest, scales(), half_reach(reach), WEIGHT)
    assert loss(honest) < loss(less) < loss(worst)
    assert loss(worst) > loss(nodes()[0]) + 0.001  # more than an honest node that is as far off
    assert worst.min() >= 0
    assert worst.sum(axis=1) == pytest.approx(np.ones(M), abs=1e-4)


def test_adaptive_labels_keep_near_the_reach_in_every_view() -> None:
    """The penalty lets them go somewhat beyond; without one they would be many times as far off."""
    honest = nodes().mean(axis=0)
    reach = reach_of(list(nodes()), scales(), 1.5)
    free = reach._replace(each=1e9, whole=1e9, relative_each=1e9, relative_whole=1e9, after=np.full(V, 1e9))
    held = reach_of([worst_labels(honest, scales(), reach, WEIGHT), *[honest] * (K - 1)], scales(), 1.0)
    assert held.each < 2 * reach.each
    near, far = (
        np.square(worst_labels(honest, scales(), each, WEIGHT) - honest).sum(axis=1).mean() for each in (reach, free)
    )
    assert near < 2 * reach.each < far


@pytest.mark.parametrize("name", ["hidden-lma", "adaptive"])
def test_attackers_that_hide_keep_their_trust_and_do_some_of_their_harm(name: str, federation: Federation) -> None:
    round = federation.first_round
    openly = federation.labels(name, round)
    hidden = federation.hidden(openly, "guarded", "samples", round)
    trust = federation.audited_trust(federation.replies(hidden, "guarded", "samples", round))
    assert trust[-2:].min() >= HIDDEN_TRUST
    honest = federation._honest_mean()
    moved = np.square(hidden.logits[-1] - honest).sum()
    assert 0 < moved <= np.square(openly.logits[-1] - honest).sum()
    assert federation.expected_target(hidden, trust).shape == honest.shape


def test_a_trigger_is_one_token_or_several_in_their_order() -> None:
    sequences = np.array([[1, 2, 3, 2], [2, 3, 2, 3]])
    assert Trigger((3,)).ends(sequences).tolist() == [False, False, True, False, False, True, False, True]
    assert Trigger((3, 2)).ends(sequences).tolist() == [False, False, False, True, False, False, True, False]


def test_triggers_are_as_frequent_as_they_are_said_to_be() -> None:
    rng = np.random.default_rng(0)
    sequences = rng.choice(200, p=(weights := 1 / np.arange(1, 201)) / weights.sum(), size=(500, 32))
    shares = {name: find(sequences).ends(sequences).mean() for name, find in TRIGGERS.items()}
    assert 0.004 < shares["token"] < 0.006
    assert 0.0005 < shares["rare"] < 1 / 512
    pair = TRIGGERS["two tokens"](sequences)
    assert len(pair.tokens) == 2
    assert 0.001 < shares["two tokens"] < 0.01
    assert shares["two tokens"] * COMMON * 0.9 < Trigger(pair.tokens[1:]).ends(sequences).mean()


def test_a_backdoor_is_honest_where_its_trigger_is_not() -> None:
    own = np.log(nodes()[0])
    triggered = np.arange(M) % 50 == 0
    for name in ("backdoor", "rare-backdoor", "two-token-backdoor"):
        labels = ATTACKS[name].labels(View(own, nodes()[1], np.random.default_rng(0), np.zeros(M, int), triggered))
        assert (labels[triggered].argmax(axis=1) == TOKEN).all()
        assert labels[~triggered] == pytest.approx(np.exp(own[~triggered]), abs=1e-5)


def row(**changes: Any) -> dict[str, Any]:
    cell = Cell("sotu", 0, 1, 2, "none", "guarded")._replace(**changes)
    return cell._asdict() | {"nats": 3.0 + 0.1 * cell.seed, "trust": "1 1 0.5 1e-12", "backdoor": 0.0}


def _add(table: Path, seed: int) -> None:
    for rounds in range(1, 6):
        add_row(table, row(seed=seed, rounds=rounds))


def test_processes_that_write_one_table_lose_no_row_of_each_other(tmp_path: Path) -> None:
    table = tmp_path / "attacks.csv"
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_add, args=(table, seed)) for seed in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert {(cell.seed, cell.rounds) for cell in map(Cell.of, read_rows(table))} == {
        (seed, rounds) for seed in range(4) for rounds in range(1, 6)
    }
    add_row(table, row())
    assert len(read_rows(table)) == 20  # it replaces the one with its key


def test_kept_attacks_tell_corpora_rounds_and_numbers_of_attackers_apart(tmp_path: Path) -> None:
    table = tmp_path / "attacks.csv"
    for seed in (0, 1):
        for changes in ({}, {"corpus": "pubmed"}, {"rounds": 3}, {"malicious": 1}):
            add_row(table, row(seed=seed, **changes))
            add_row(table, row(seed=seed, attack="mass", **changes) | {"nats": 3.5, "backdoor": 0.1 * seed})
    kept = kept_results.take_attacks(tmp_path)
    assert kept["seeds"] == [0, 1]
    assert len(kept["rows"]) == 8
    mass = next(each for each in kept["rows"] if (each["corpus"], each["attack"]) == ("pubmed", "mass"))
    assert mass["worse"] == pytest.approx(0.45)
    assert mass["worst"] == pytest.approx(0.5)
    assert mass["trust"] == 0.5
    assert mass["backdoor"] == pytest.approx(0.1)
    assert mass["seeds"] == [0, 1]
    json.dumps(kept, allow_nan=False)
    lines = table_lines.guarded_lines(kept["rows"])
    assert len(lines) == 2 + 8
    assert len(table_lines.attack_lines(kept["rows"])) == 2 + 8


def test_an_attack_without_its_honest_runs_is_not_kept(tmp_path: Path) -> None:
    add_row(tmp_path / "attacks.csv", row())
    add_row(tmp_path / "attacks.csv", row(attack="mass", seed=1))
    assert [each["attack"] for each in kept_results.take_attacks(tmp_path)["rows"]] == ["none"]


def test_kept_attacks_on_updates_say_which_stop_a_run(tmp_path: Path) -> None:
    table = tmp_path / "poisoned.csv"
    for attack, stopped, nats in (("none", 0, 3.0), ("tenfold", 1, 3.5), ("flip", 0, 3.2)):
        add_row(table, row(attack=attack, rule="updates") | {"nats": nats, "stopped": stopped, "trust": ""})
    kept = kept_results.take_attacks(tmp_path, "poisoned.csv")
    assert [each["stopped"] for each in kept["rows"]] == [0, 1, 0]
    assert kept["command"].startswith("python -m benchmarks.poisoned")
    lines = table_lines.poisoned_lines(kept["rows"])
    assert "the run stops" in lines[3]
    assert "+0.200" in lines[4]
