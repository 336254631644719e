"""Audit a configuration: run it with canaries in one node's text, and attack them as the aggregator could."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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
from fpld.audit.written import (
    WrittenSample,
    canary_matches,
    canary_rows,
    copy_rows,
    joined_samples,
    write_unchecked,
    written_scores,
)
from fpld.data import ProbeSet
from fpld.data.token_stream import open_text
from fpld.engines.local import LocalEngine
from fpld.engines.pool import make_pool
from fpld.errors import InputError
from fpld.federation import workers
from fpld.federation.lessons import Lesson, distillation_arguments
from fpld.federation.prepare import claim, prepare
from fpld.federation.rounds import Federation
from fpld.node.training import open_student, run_epsilon
from fpld.protocol.wire import payload_of
from fpld.protocol.written import public_labels
from fpld.registry import codecs
from fpld.seeds import derive_seed
from fpld.storage.run_folder import HELDOUT, OWN_MODEL, PROBE, WRITTEN_PRIOR, RunFolder, record_digests, text_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.audit.attacks import Canaries
    from fpld.config import Config
    from fpld.protocol import Receipt
    from fpld.students import Student
    from fpld.types import Arrays, Plan

    Scores = dict[tuple[str, str], np.ndarray[Any, Any]]
    Row = dict[str, Any]

log = logging.getLogger(__name__)

AUDIT_PLAN_FILE = "canaries.json"
COPIES_FILE = "copies.json"
DEFAULT_DELTA = 1e-5
"""The delta of the lower bound where the configuration promises no privacy."""


class AuditPlan(NamedTuple):
    """The node that is attacked, the canaries of each kind, and the copies of each in its text."""

    node: int
    canaries: int
    copies: int


class AuditResult(NamedTuple):
    """The rows of an audit: a row for each attack, and what was copied into written text, if nodes write some."""

    attacks: list[Row]
    copies: list[Row]


class RoundAttack(NamedTuple):
    """What came of attacking a round: the scores of the canaries, and the text that the node has written."""

    scores: Scores
    written: WrittenSample | None


def run_audit(config: Config, text: str, out: Path, plan: AuditPlan) -> AuditResult:
    """Run a configuration with canaries into a folder.

    Parameters
    ----------
    text
        The configuration as TOML, for the folder.
    out
        A folder without a run.

    Returns
    -------
    A row for each kind of canary and each attack. Scores are summed over the rounds; written text is that of all.
    """
    _check_auditable(config)
    store = RunFolder(out)
    seed = config.run.seed
    with store.lock(), make_pool(config.engine.workers, config.engine.compute) as pool:
        claim(store, text, False)
        prepared = prepare(config, store)
        probe = ProbeSet.load(store.path / PROBE)
        sets = draw_canaries(store, probe, plan, seed)
        store.write_json(AUDIT_PLAN_FILE, plan._asdict())
        insert_canaries(store.path / text_file(plan.node), sets, copies=plan.copies)
        record_digests(store, text_file(plan.node))
        federation = Federation(config, store, prepared, "fpld", pool=pool)
        engine = LocalEngine(federation, prepared.bytes_per_token)
        before = open_student(federation.setup.base, federation.student)
        scores: Scores = {}
        samples: list[WrittenSample] = []
        while not federation.done:
            attacked = _attack_round(federation, engine, plan.node, sets)
            for key, round_scores in attacked.scores.items():
                scores[key] = scores.get(key, 0.0) + round_scores
            if attacked.written is not None:
                samples.append(attacked.written)
        delta = DEFAULT_DELTA if config.privacy is None else config.privacy.delta
        upper = run_epsilon(federation.store.path / f"nodes/{plan.node}", delta)
    copies: list[Row] = []
    if samples:
        private = open_text(store.path / text_file(plan.node)).tokens
        sample = joined_samples(samples)
        copies = copy_rows(sample, private, prepared.probe.sequences)
        copies += _attack_written(sample, sets, before, scores)
        store.write_json(COPIES_FILE, copies)
    rows = [
        attack_row(canaries, attack, scores[kind, attack], delta, upper, derive_seed(seed, "ties"))
        for canaries in sets
        for kind, attack in scores
        if kind == canaries.kind
    ]
    store.write_json("audit.json", rows)
    return AuditResult(rows, copies)


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
    if config.update_bits is not None:
        raise InputError("send.updates must be left out for an audit: its attacks are on labels and written text")
    if config.over_strings:
        raise InputError("labels.over must be 'tokens' for an audit: its canaries are tokens")
    if config.codec.against != "nothing":
        raise InputError("codec.against must be 'nothing' for an audit")


def _attack_round(federation: Federation, engine: LocalEngine, node: int, sets: Sequence[Canaries]) -> RoundAttack:
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
    plan = tasks[node].plan
    payload = payload_of(memoryview(frames[node]))
    sent = ObservedReply(codec, bytes(public_labels(payload, plan)), plan.public)
    before = open_student(setup.base, state.student)
    probe = setup.probe(state.round + 1)
    sample = _written_sample(federation, plan)
    lesson = _node_lesson(federation, sent, plan)
    surrogate = setup.pool.submit(distill_surrogate, *distillation_arguments(setup, state, lesson))
    scores: Scores = {
        (canaries.kind, "labels"): label_scores(sent, canaries, before, probe.sequences)
        for canaries in sets
        if canaries.contexts is not None
    }
    record = federation.close(absent)
    models: dict[str, Arrays] = {"surrogate": surrogate.result(), "student": federation.student}
    for name, weights in models.items():
        model = open_student(setup.base, weights)
        scores |= {(canaries.kind, name): model_scores(model, before, canaries) for canaries in sets}
    federation.commit(record, engine.evaluate(federation.student))
    return RoundAttack(scores, sample)


def _node_lesson(federation: Federation, sent: ObservedReply, plan: Plan) -> Lesson:
    """Return what a surrogate is distilled from: the node's labels on public text, and what it has written."""
    setup = federation.setup
    state = federation.state
    sequences = setup.probe(state.round + 1).sequences
    target = replace(node_target(sent, setup.settings.combining), grid=setup.grid)
    text = None if federation.aggregator is None else federation.aggregator.written.get(plan.node)
    if text is None:
        return Lesson(sequences, target)
    path = setup.store.path / f"audit-{WRITTEN_PRIOR}"
    written = workers.read_written(setup.base, state.student, replace(plan, prior=None), text, path)
    return Lesson(np.concatenate([sequences, text.sequences]), target.joined([written]))


def _written_sample(federation: Federation, plan: Plan) -> WrittenSample | None:
    """Return the text that a node has sent in the open round, and what its model wrote before the check, if any."""
    config = federation.setup.config
    if config.written is None:
        return None
    probe = federation.setup.probe(plan.round).sequences
    model = open_student(federation.store.path / f"nodes/{plan.node}" / OWN_MODEL)
    seed = derive_seed(config.run.seed, "written", plan.round, plan.node)
    unchecked = write_unchecked(model, plan, probe, seed=seed, temperature=config.written.temperature)
    text = None if federation.aggregator is None else federation.aggregator.written.get(plan.node)
    sent = unchecked[:0] if text is None else text.sequences
    return WrittenSample(sent, unchecked[: len(sent)])


def _attack_written(sample: WrittenSample, sets: Sequence[Canaries], before: Student, scores: Scores) -> list[Row]:
    """Add the scores of the attacks on written text; return the shares of canaries that stand in it."""
    rows = []
    for canaries in sets:
        matches = {name: canary_matches(canaries, text) for name, text in sample._asdict().items()}
        for name, text in sample._asdict().items():
            for attack, values in written_scores(canaries, text, matches[name], before).items():
                scores[canaries.kind, f"{name} text, {attack}"] = values
        rows += canary_rows(canaries, **matches)
    return rows


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
