"""The audit of a configuration: a run with canaries in one node's text, and what its aggregator can tell of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld.audit.attacks import Sent, label_scores, model_scores, own_target, surrogate
from fpld.audit.canaries import insert, probe_canaries, text_canaries
from fpld.audit.statistics import auc, epsilon_bound, true_positives
from fpld.engines.local.engine import LocalEngine
from fpld.engines.pool import make_pool
from fpld.errors import InputError
from fpld.federation.claim import claim
from fpld.federation.federation import Federation
from fpld.federation.prepare import prepare
from fpld.federation.private import spent_in
from fpld.federation.rounds import distillation
from fpld.federation.training import open_student
from fpld.protocol.wire import payload_of
from fpld.registry import codecs
from fpld.seeds import derive_seed
from fpld.storage.folder import HELDOUT, RunFolder, text_file
from fpld.storage.seals import seal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from fpld.audit.canaries import Canaries
    from fpld.config import Config
    from fpld.data import ProbeSet
    from fpld.protocol import Receipt
    from fpld.storage.folder import Arrays

    Scores = dict[tuple[str, str], np.ndarray[Any, Any]]

log = logging.getLogger(__name__)

PLAN = "canaries.json"
DELTA = 1e-5
"""The delta of the lower bound where the configuration promises nothing."""


class Plan(NamedTuple):
    """What is audited: which node, with how many canaries of each kind, each how often in its text."""

    node: int
    canaries: int
    copies: int


def audit(config: Config, text: str, out: Path, plan: Plan) -> list[dict[str, Any]]:
    """Run a configuration with canaries into a folder; return a row for each kind of canary and each attack."""
    _check(config)
    store, seed = RunFolder(out), config.run.seed
    with store.lock(), make_pool(config.engine.workers) as pool:
        claim(store, text, False)
        prepared = prepare(config, store)
        sets = draw_canaries(store, prepared.probe, plan, seed)
        store.write_json(PLAN, plan._asdict())
        insert(store.path / text_file(plan.node), sets, copies=plan.copies)
        seal(store, text_file(plan.node))
        federation = Federation(config, store, prepared, "fpld", pool=pool)
        engine = LocalEngine(federation, prepared.bytes_per_token)
        scores: Scores = {}
        while not federation.done:
            for key, found in _round(federation, engine, plan.node, sets).items():
                scores[key] = scores.get(key, 0.0) + found
        promised = config.privacy
        delta = DELTA if promised is None else promised.delta
        upper = spent_in(federation.store.path / f"nodes/{plan.node}", delta)
    rows = [
        attack_row(canaries, attack, scores[canaries.kind, attack], delta, upper, derive_seed(seed, "ties"))
        for canaries in sets
        for attack in ("labels", "surrogate", "student")
        if (canaries.kind, attack) in scores
    ]
    store.write_json("audit.json", rows)
    return rows


def draw_canaries(store: RunFolder, probe: ProbeSet, plan: Plan, seed: int) -> list[Canaries]:
    """Return the canaries of an audit, which follow from the run's seed: both kinds."""
    heldout, width = store.read_arrays(HELDOUT)[0][str(plan.node)], probe.sequences.shape[1] + 1
    return [
        probe_canaries(probe.sequences, probe.vocab, plan.canaries, seed=derive_seed(seed, "canaries")),
        text_canaries(heldout, width, plan.canaries, seed=derive_seed(seed, "text canaries")),
    ]


def _check(config: Config) -> None:
    if config.probe.fresh:
        raise InputError("probe.fresh must be false for an audit: canaries have their contexts in one probe set")
    if config.codec.against != "nothing":
        raise InputError("codec.against must be 'nothing' for an audit")


def _round(federation: Federation, engine: LocalEngine, node: int, sets: Sequence[Canaries]) -> Scores:
    """Run a round as any other, and score the canaries by what the aggregator has seen of it."""
    setup, state = federation.setup, federation.state
    codec = codecs.get(setup.config.codec.name)
    tasks = federation.open()
    frames: dict[int, bytes] = {}

    def deliver(sender: int, data: bytes) -> Receipt:
        receipt = federation.deliver(sender, data)
        if receipt.verdict == "accepted":
            frames[sender] = data
        return receipt

    absent = engine.collect(tasks, deliver)
    if node not in frames:
        reasons = "; ".join(map(str, absent))
        raise InputError(f"the audited node {federation.names[node]!r} gave no answer: {reasons}")
    sent = Sent(codec, bytes(payload_of(memoryview(frames[node]))), tasks[node].plan)
    before, probe = open_student(setup.base, state.student), setup.probe(state.round + 1)
    target = own_target(sent, setup.settings.combining)
    alone = setup.pool.submit(surrogate, *distillation(setup, state, target))
    scores: Scores = {
        (canaries.kind, "labels"): label_scores(sent, canaries, before, probe.sequences)
        for canaries in sets
        if canaries.contexts is not None
    }
    federation.close(absent)
    models: dict[str, Arrays] = {"student": federation.student, "surrogate": alone.result()}
    for name, weights in models.items():
        model = open_student(setup.base, weights)
        scores |= {(canaries.kind, name): model_scores(model, before, canaries) for canaries in sets}
    federation.finish(engine.evaluate(federation.student))
    return scores


def attack_row(
    canaries: Canaries, attack: str, scores: np.ndarray[Any, Any], delta: float, upper: float | None, seed: int
) -> dict[str, Any]:
    """Return what an attack's scores come to."""
    area, found = auc(scores, canaries.included), true_positives(scores, canaries.included)
    return {
        "canaries": canaries.kind,
        "attack": attack,
        "in": int(canaries.included.sum()),
        "out": int((~canaries.included).sum()),
        "auc": area.value,
        "auc_low": area.low,
        "auc_high": area.high,
        "tpr_at_1_percent": found.value,
        "tpr_low": found.low,
        "tpr_high": found.high,
        "epsilon_lower": epsilon_bound(scores, canaries.included, delta, seed=seed),
        "epsilon_upper": upper,
        "delta": delta,
    }
