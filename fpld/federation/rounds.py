"""A round on one screen: `open_round` makes tasks out of the state, `close_round` the next state out of the replies.

Between the two an engine carries the tasks to the nodes, and their frames to the aggregator that `open_round` returns.
Both are the same whatever the engine. What the next round needs is in the state, and nowhere else.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld import students
from fpld._check import printable
from fpld.federation import jobs
from fpld.federation.bases import base_file
from fpld.federation.budgets import configured
from fpld.federation.prior import drop_prior, round_prior
from fpld.federation.probes import PROBE, PUBLIC, round_probe
from fpld.federation.state import State
from fpld.pace import Subject, before, lasting, run_on, working_on
from fpld.paper.theory.conditions import bracket_conditions
from fpld.protocol import Aggregator, Settings
from fpld.protocol.wire import OVERHEAD
from fpld.seeds import derive_key, derive_seed
from fpld.storage.files import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor, Future
    from pathlib import Path

    from fpld.config import Config
    from fpld.data import ProbeSet
    from fpld.federation.prepare import Public
    from fpld.federation.state import Line
    from fpld.protocol import Combined, Task
    from fpld.rules.target import Target
    from fpld.storage.folder import RunFolder

log = logging.getLogger(__name__)

DOUBTFUL = 0.5  # a trust below which a person is told


@dataclass(frozen=True, eq=False, slots=True)
class Setup:
    """What does not change in a federation, which has a folder `store` of its own in that of the run.

    `pool` does the aggregator's own heavy work.
    """

    config: Config
    run: RunFolder
    store: RunFolder
    settings: Settings
    pool: Executor

    @property
    def base(self) -> Path:
        """Return the file of the student before the first round."""
        return self.run.path / base_file(self.config, None)

    @property
    def method(self) -> str:
        """Return the federation's name in the run."""
        return self.store.path.name

    def probe(self, round: int) -> ProbeSet:
        """Return the probe set of a round."""
        public = self.run.path / PUBLIC if self.config.probe.fresh else None
        return round_probe(self.run.path / PROBE, public, self.config.run.seed, round)


class Info(NamedTuple):
    """What happened in a round: what was combined, and the line of the trace so far. No result depends on it."""

    combined: Combined
    line: Line


def identity(setup: Setup, name: str) -> str:
    """Name a federation of a run by all that it comes from: its key, its configuration, its probe set."""
    said = {"name": name, "config": setup.config.model_dump(mode="json"), "probe": setup.settings.probe.hex()}
    return hashlib.blake2b(
        canonical_json(said), key=setup.settings.run_key, digest_size=32, person=b"fpld federation"
    ).hexdigest()


def begin(setup: Setup) -> State:
    """Return the state before the first round."""
    return State(students.read_state(setup.base), *Aggregator(setup.settings).state())


def open_round(setup: Setup, state: State) -> tuple[Aggregator, dict[int, Task]]:
    """Begin the round after a state: return an aggregator that collects its frames, and the task of each node."""
    aggregator, probe = Aggregator(setup.settings), setup.probe(state.round + 1)
    aggregator.restore(state.learnt, state.known)
    prior, notes = round_prior(setup, state.student, probe)
    about: dict[str, Any] = {"probe": bytes.fromhex(probe.digest), "following": probe.following}
    if setup.config.combine.broadcast == "weights":
        return aggregator, aggregator.open("weights", state.student, prior, notes=notes, **about)
    # Nodes without the student's weights cannot compute its prediction: the plan holds it.
    if state.target is None:
        return aggregator, aggregator.open("none", {}, prior, **about)
    return aggregator, aggregator.open("logits", {"logits": state.target}, prior, **about)


def close_round(setup: Setup, state: State, aggregator: Aggregator, phase: Callable[[str], None]) -> tuple[State, Info]:
    """Combine what was collected and distil the student from it; return the next state, and what happened.

    `phase` is told what goes on; below the quorum `QuorumError` is raised, and collecting may go on.
    """
    aggregator.close()
    phase("combining")
    with working_on(Subject(setup.method, aggregator.round)), before("distilling"), lasting("combining"):
        combined = aggregator.combine()
    _warn(aggregator, combined)
    phase("distilling")
    subject = Subject(setup.method, aggregator.round, "student")
    arguments = distillation(setup, state, combined.target)
    student, divergence = setup.pool.submit(run_on, subject, jobs.distill, *arguments).result()
    line = _summary(aggregator, combined, divergence)
    aggregator.distilled()
    target = None
    if setup.config.combine.broadcast == "logits":
        prior = aggregator.prior
        target = (combined.target if prior is None else combined.target.absolute(prior)).array
    drop_prior(setup)
    return State(student, *aggregator.state(), target), Info(combined, line)


def submit_continuations(setup: Setup, state: State) -> Future[list[dict[str, str]]] | None:
    """Let the student of a state write a few lines, while others evaluate it; None if none are asked for."""
    run, folder = setup.config.run, setup.run.path
    if not run.continuations:
        return None
    subject = Subject(setup.method, state.round, "student")
    files = folder / "tokenizer.json", folder / PUBLIC
    write = partial(jobs.continuations, setup.base, state.student, *files, run.continuations, run.seed)
    return setup.pool.submit(run_on, subject, write)


def distillation(setup: Setup, state: State, target: Target) -> tuple[Any, ...]:
    """Return the arguments of a distillation job to a target, in the round after a state."""
    config, round = setup.config, state.round + 1
    options = {
        "steps": config.distill.steps,
        "rate": config.distill.rate_in(round, config.run.rounds),
        "seed": derive_seed(config.run.seed, "distill", round),
        "public_weight": config.distill.public_weight,
        "batch": config.distill.batch,
        "average": config.distill.average,
    }
    public = setup.run.path / PUBLIC if config.distill.public_weight > 0 else None
    return setup.base, state.student, setup.probe(round), target, options, public, config.combine.weight_bits


def _warn(aggregator: Aggregator, combined: Combined) -> None:
    """Tell a person of nodes that an audit has found far off."""
    for node, trust in zip(combined.nodes, () if combined.trust is None else combined.trust, strict=False):
        if trust < DOUBTFUL:
            name = aggregator.settings.names[node]
            log.warning("round %d: %s counts for %.2g of a node: its labels are far off", aggregator.round, name, trust)


def _summary(aggregator: Aggregator, combined: Combined, divergence: float) -> Line:
    """Return the line of the trace, as far as the aggregator knows it."""
    settings, sent, weights = aggregator.settings, aggregator.sent, aggregator.weights
    names, nodes = settings.names, range(len(settings.names))
    return {
        "round": aggregator.round,
        "nodes": [names[node] for node in combined.nodes],
        "bits_allotted": [bits / settings.vocab for bits in aggregator.bits],
        "bits_sent": [8 * sent.get(node, 0) / (settings.contexts * settings.vocab) for node in nodes],
        "payload_bytes": sum(sent.values()),
        "overhead_bytes": OVERHEAD * len(sent),
        "node_bytes": [sent[node] + OVERHEAD if node in sent else 0 for node in nodes],
        "weights": None if weights is None else weights.tolist(),
        "trust": None if aggregator.trust is None else aggregator.trust.tolist(),
        "curves": aggregator.curves,
        "noise": [float(aggregator.noise[node]) if node in sent else None for node in nodes],
        "kl": None if combined.target.relative else divergence,
        "gain": -divergence if combined.target.relative else None,
        "bandwidth_upper": combined.upper,
        "bandwidth_lower": combined.lower,
        "conditions": _conditions(combined, settings.vocab),
        "refused": [
            {"node": names[receipt.node], "state": receipt.verdict, "reason": printable(receipt.reason)}
            for receipt in aggregator.receipts
            if receipt.verdict == "refused"
        ],
    }


def _conditions(combined: Combined, vocab: int) -> dict[str, bool] | None:
    """Return whether the conditions of the paper's bounds hold at the noise that was decoded, if there are bounds."""
    if combined.lower is None or combined.upper is None:
        return None
    return bracket_conditions(combined.lower, combined.upper, vocab)


def settings(config: Config, prepared: Public, mac_keys: Mapping[int, bytes], run_key: bytes | None) -> Settings:
    """Turn a configuration into the aggregator's settings; bits per probe context from here on.

    Without a key of its own, a run has one that follows from the seed: the same configuration gives the same bits.
    """
    vocab, contexts = prepared.vocab, prepared.probe.contexts
    return Settings(
        names=[node.name for node in config.nodes],
        run_key=derive_key(config.run.seed) if run_key is None else run_key,
        probe=bytes.fromhex(prepared.probe.digest),
        contexts=contexts,
        vocab=vocab,
        rounds=config.run.rounds,
        budget=configured(config, contexts=contexts, vocab=vocab),
        clips=[node.clip for node in config.nodes],
        codec=config.codec.name,
        rule=config.combine.rule,
        trim=config.combine.trim,
        against=config.codec.against,
        stratified=config.codec.dither == "stratified",
        quorum=config.run.quorum or len(config.nodes),
        mac_keys=mac_keys,
    )
