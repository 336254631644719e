"""Audit a configuration: run it with canaries in one node's text, and attack them as the aggregator could."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld.audit.attacks import (
    ObservedReply,
    distill_surrogate,
    insert_canaries,
    label_scores,
    model_scores,
    node_target,
    probe_canaries,
    text_canaries,
)
from fpld.audit.statistics import auc, epsilon_bound, true_positive_rate
from fpld.engines.local import LocalEngine
from fpld.engines.pool import make_pool
from fpld.errors import InputError
from fpld.federation.prepare import claim, prepare
from fpld.federation.rounds import Federation, Lesson, distillation_arguments
from fpld.node.training import open_student, run_epsilon
from fpld.protocol.wire import payload_of
from fpld.registry import codecs
from fpld.seeds import derive_seed
from fpld.storage.run_folder import HELDOUT, RunFolder, record_digests, text_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from fpld.audit.attacks import Canaries
    from fpld.config import Config
    from fpld.data import ProbeSet
    from fpld.protocol import Receipt
    from fpld.types import Arrays

    Scores = dict[tuple[str, str], np.ndarray[Any, Any]]

log = logging.getLogger(__name__)

AUDIT_PLAN_FILE = "canaries.json"
DEFAULT_DELTA = 1e-5
"""The delta of the lower bound where the configuration promises no privacy."""


class AuditPlan(NamedTuple):
    """The node that is attacked, the canaries of each kind, and the copies of each in its text."""

    node: int
    canaries: int
    copies: int


def run_audit(config: Config, text: str, out: Path, plan: AuditPlan) -> list[dict[str, Any]]:
    """Run a configuration with canaries into a folder.

    Parameters
    ----------
    text
        The configuration as TOML, for the folder.
    out
        A folder without a run.

    Returns
    -------
    A row for each kind of canary and each attack; scores are summed over the rounds.
    """
    _check_auditable(config)
    store = RunFolder(out)
    seed = config.run.seed
    with store.lock(), make_pool(config.engine.workers) as pool:
        claim(store, text, False)
        prepared = prepare(config, store)
        sets = draw_canaries(store, prepared.probe, plan, seed)
        store.write_json(AUDIT_PLAN_FILE, plan._asdict())
        insert_canaries(store.path / text_file(plan.node), sets, copies=plan.copies)
        record_digests(store, text_file(plan.node))
        federation = Federation(config, store, prepared, "fpld", pool=pool)
        engine = LocalEngine(federation, prepared.bytes_per_token)
        scores: Scores = {}
        while not federation.done:
            for key, round_scores in _attack_round(federation, engine, plan.node, sets).items():
                scores[key] = scores.get(key, 0.0) + round_scores
        delta = DEFAULT_DELTA if config.privacy is None else config.privacy.delta
        upper = run_epsilon(federation.store.path / f"nodes/{plan.node}", delta)
    rows = [
        attack_row(canaries, attack, scores[canaries.kind, attack], delta, upper, derive_seed(seed, "ties"))
        for canaries in sets
        for attack in ("labels", "surrogate", "student")
        if (canaries.kind, attack) in scores
    ]
    store.write_json("audit.json", rows)
    return rows


def draw_canaries(store: RunFolder, probe: ProbeSet, plan: AuditPlan, seed: int) -> list[Canaries]:
    """Return the canaries of both kinds; they follow from the run's seed."""
    heldout = store.read_arrays(HELDOUT)[0][str(plan.node)]
    width = probe.sequences.shape[1] + 1
    return [
        probe_canaries(probe.sequences, probe.vocab, plan.canaries, seed=derive_seed(seed, "canaries")),
        text_canaries(heldout, width, plan.canaries, seed=derive_seed(seed, "text canaries")),
    ]


def _check_auditable(config: Config) -> None:
    if config.probe.fresh:
        raise InputError("probe.fresh must be false for an audit: canaries have their contexts in one probe set")
    if config.written is not None:
        raise InputError("[written] must be left out for an audit of labels: the written text is audited by itself")
    if config.codec.against != "nothing":
        raise InputError("codec.against must be 'nothing' for an audit")


def _attack_round(federation: Federation, engine: LocalEngine, node: int, sets: Sequence[Canaries]) -> Scores:
    """Run a round, and score the canaries by what the aggregator has seen of it."""
    setup = federation.setup
    state = federation.state
    codec = codecs.get(setup.config.codec.name)
    tasks = federation.open()
    frames: dict[int, bytes] = {}

    def deliver(sender: int, data: bytes) -> Receipt:
        receipt = federation.deliver(sender, data)
        if receipt.verdict == "accepted":
            frames[sender] = data
        return receipt

    absent = engine.collect(tasks, deliver).absent
    if node not in frames:
        reasons = "; ".join(map(str, absent))
        raise InputError(f"the audited node {federation.names[node]!r} gave no answer: {reasons}")
    sent = ObservedReply(codec, bytes(payload_of(memoryview(frames[node]))), tasks[node].plan)
    before = open_student(setup.base, state.student)
    probe = setup.probe(state.round + 1)
    lesson = Lesson(probe.sequences, node_target(sent, setup.settings.combining))
    surrogate = setup.pool.submit(distill_surrogate, *distillation_arguments(setup, state, lesson))
    scores: Scores = {
        (canaries.kind, "labels"): label_scores(sent, canaries, before, probe.sequences)
        for canaries in sets
        if canaries.contexts is not None
    }
    record = federation.close(absent)
    models: dict[str, Arrays] = {"student": federation.student, "surrogate": surrogate.result()}
    for name, weights in models.items():
        model = open_student(setup.base, weights)
        scores |= {(canaries.kind, name): model_scores(model, before, canaries) for canaries in sets}
    federation.commit(record, engine.evaluate(federation.student))
    return scores


def attack_row(
    canaries: Canaries, attack: str, scores: np.ndarray[Any, Any], delta: float, upper: float | None, seed: int
) -> dict[str, Any]:
    """Return AUC, true positives and the bounds of epsilon for the scores of an attack.

    `upper` is the epsilon that the accountant guarantees, None without privacy; `seed` breaks ties.
    """
    area = auc(scores, canaries.included)
    positives = true_positive_rate(scores, canaries.included)
    return {
        "canaries": canaries.kind,
        "attack": attack,
        "in": int(canaries.included.sum()),
        "out": int((~canaries.included).sum()),
        "auc": area.value,
        "auc_low": area.low,
        "auc_high": area.high,
        "tpr_at_1_percent": positives.value,
        "tpr_low": positives.low,
        "tpr_high": positives.high,
        "epsilon_lower": epsilon_bound(scores, canaries.included, delta, seed=seed),
        "epsilon_upper": upper,
        "delta": delta,
    }
