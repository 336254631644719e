"""The rounds of a federation, and who owns them.

A round is one function of the state, with two calls of an engine in the middle:

    state --open_round--> aggregator, tasks --engine.collect--> frames at the aggregator
          --close_round--> next state, record --engine.evaluate--> held-out losses --commit--> checkpoint, trace

The *state* is all that a round needs of those before it: the student's weights, what the aggregator has learnt about
the nodes (weights for the allocator, tables for the codec, trust), reconstructions where nodes code against their own,
and the combined logits where these are broadcast. A checkpoint is the state. The *record* is what a person reads of a
round (`RoundRecord`); no result depends on it.

`open_round` predicts the probe set with the student, if the codec codes against a prior, lets the budget decide how
many bits each node may send, and returns a task for each node. `close_round` decodes and combines the frames that were
accepted and distils the student to the target. Where nodes send updates of their weights (`[send] updates`), there is
no prior, and the student is distilled from the models that they stand for. Both are the same whatever the engine.

`Federation` owns the sequence: it opens a round, hands the tasks to the engine, takes frames and bytes as they come,
closes the round, and commits it. An engine whose nodes evaluate a student with the task that brings it has no losses
yet when the round ends: then the record is *pending*, the checkpoint holds it, and the losses complete it with the
next round, or at the end of the run. A process may be killed at any moment: what was committed last is where the next
one goes on, with the same bits. Callbacks (`fpld.federation.callbacks`) look on; without them the result is the same.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld.errors import ProtocolError, QuorumError
from fpld.federation import workers
from fpld.federation.callbacks import Callbacks, default_callbacks
from fpld.federation.lessons import distill_from_rebuilt, distillation_arguments, lesson_of, rebuilt_models
from fpld.federation.record import Incident, RoundRecord, Traffic, with_means
from fpld.federation.state import (
    Setup,
    State,
    commit,
    initial_state,
    label_spaces,
    protocol_settings,
    recall,
    student_weights,
)
from fpld.federation.tracking import Tracking
from fpld.node.prior_cache import Predictions, fits_in_file, map_prior
from fpld.node.training import open_student
from fpld.paper.theory import bracket_conditions
from fpld.progress import ProgressLabel, followed_by, labelled, report_elapsed, run_labelled
from fpld.protocol.aggregator import Aggregator
from fpld.protocol.shared_prior import ComputedPrior
from fpld.protocol.weights import StudentDeltas
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.registry import codecs
from fpld.storage.run_folder import BASE_LOSSES, PRIOR, RunFolder
from fpld.types import run_id
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from fpld.codecs.prior import Prior
    from fpld.config import Config
    from fpld.data import ProbeSet
    from fpld.data.places import PlaceProbe
    from fpld.engines.base import Engine
    from fpld.federation.callbacks import Callback
    from fpld.federation.prepare import Public
    from fpld.federation.record import Heldout
    from fpld.protocol import Combined, Receipt, Task
    from fpld.protocol.shared_prior import PriorNotes
    from fpld.types import Arrays

log = logging.getLogger(__name__)

DOUBTFUL_TRUST = 0.5
"""The trust below which a warning names the node."""


class RoundPrior(NamedTuple):
    """A prior, and the notes for nodes that compute it; neither if the codec needs none."""

    prior: Prior | None = None
    notes: PriorNotes | None = None


def round_prior(setup: Setup, student: Arrays, probe: ProbeSet | PlaceProbe) -> RoundPrior:
    """Predict the probe set of a round with a student, if the codec codes against a prior."""
    if setup.settings.updates or not codecs.get(setup.config.codec.name).traits.prior:
        return RoundPrior()
    shape = probe.contexts, probe.vocab
    path = setup.store.path / PRIOR if fits_in_file(shape) else None
    margin = setup.config.probe.margin
    subject = ProgressLabel(setup.method, model="student")
    notes = setup.pool.submit(
        run_labelled, subject, workers.predict, setup.base, student, probe, path, margin, setup.grid, setup.strings
    ).result()
    if path is None:
        model = open_student(setup.base, student)
        seen = model if setup.strings is None else setup.strings.view(model)
        predict = Predictions(seen, probe.sequences)
        return RoundPrior(ComputedPrior(predict, notes, grid=setup.grid), notes)
    return RoundPrior(map_prior(path, shape), notes)


def drop_prior(setup: Setup) -> None:
    """Delete the file of a round that is over."""
    (setup.store.path / PRIOR).unlink(missing_ok=True)


class OpenRound(NamedTuple):
    """A round that collects: its aggregator, and the task of each node."""

    aggregator: Aggregator
    tasks: dict[int, Task]


def open_round(setup: Setup, state: State) -> OpenRound:
    """Open the round after a state."""
    aggregator = Aggregator(setup.settings, state.aggregator)
    probe = setup.probe(aggregator.round)
    prior, notes = round_prior(setup, state.student, probe)
    about: dict[str, Any] = {"probe": bytes.fromhex(probe.digest), "following": probe.following}
    about["nodes"] = setup.asked(aggregator.round)
    if setup.settings.written:
        about["sequences"] = probe.sequences
    if setup.config.combine.broadcast == "weights":
        tasks = aggregator.open("weights", state.student, prior, notes=notes, **about)
    # Nodes without the student's weights cannot compute its prediction: the plan holds the prior itself.
    elif state.target is None:
        tasks = aggregator.open("none", {}, prior, **about)
    else:
        tasks = aggregator.open("logits", {"logits": state.target}, prior, **about)
    return OpenRound(aggregator, tasks)


def close_round(setup: Setup, state: State, aggregator: Aggregator, callbacks: Callback) -> tuple[State, RoundRecord]:
    """Combine the frames that were collected and distil the student from them.

    Parameters
    ----------
    setup, state
        The federation, and the state that the round was opened from.
    aggregator
        That of the open round.
    callbacks
        What is told of each phase that begins, and of what the frames are combined into.

    Returns
    -------
    tuple
        The next state, and the record of the round as far as the aggregator knows it.

    Raises
    ------
    QuorumError
        Below the quorum; collecting may go on.
    """
    aggregator.close()
    if setup.settings.updates:
        return learn_from_updates(setup, state, aggregator, callbacks)
    callbacks.phase(aggregator.round, "combining")
    label = ProgressLabel(setup.method, aggregator.round)
    with labelled(label), followed_by("distilling"), report_elapsed("combining"):
        combined = aggregator.combine()
    _warn_of_distrust(aggregator, combined)
    callbacks.combined(combined)
    lesson, refused = lesson_of(setup, state, aggregator, combined)
    callbacks.phase(aggregator.round, "distilling")
    label = ProgressLabel(setup.method, aggregator.round, "student")
    arguments = distillation_arguments(setup, state, lesson)
    student, divergence = setup.pool.submit(run_labelled, label, workers.distill, *arguments).result()
    record = _label_record(aggregator, combined, divergence)
    written = None
    if setup.settings.written:
        unread = {incident.node for incident in refused}
        names = setup.settings.names
        written = [0 if names[node] in unread else _contexts_of(aggregator, node) for node in range(len(names))]
    record = dataclasses.replace(record, refused=[*record.refused, *refused], written=written)
    target = None
    if setup.config.combine.broadcast == "logits":
        prior = aggregator.prior
        target = (combined.target if prior is None else combined.target.absolute(prior)).array
    drop_prior(setup)
    return State(student, aggregator.end(), target), record


def learn_from_updates(
    setup: Setup, state: State, aggregator: Aggregator, callbacks: Callback
) -> tuple[State, RoundRecord]:
    """Rebuild the nodes' models from the updates that were collected, let them write, and distil the student.

    Raises
    ------
    QuorumError
        If fewer models than the quorum can be used.
    """
    callbacks.phase(aggregator.round, "combining")
    models, refused = rebuilt_models(setup, state, aggregator)
    callbacks.phase(aggregator.round, "distilling")
    student, divergence = distill_from_rebuilt(setup, state, models)
    record = _record(aggregator, [model.node for model in models])
    record = dataclasses.replace(record, gain=-divergence, refused=[*record.refused, *refused])
    return State(student, aggregator.end()), record


def _warn_of_distrust(aggregator: Aggregator, combined: Combined) -> None:
    """Warn of nodes whose labels the rule's audit found far from the others'."""
    for node, trust in zip(combined.nodes, () if combined.trust is None else combined.trust, strict=False):
        if trust < DOUBTFUL_TRUST:
            name = aggregator.settings.names[node]
            log.warning("round %d: %s counts for %.2g of a node: its labels are far off", aggregator.round, name, trust)


def _label_record(aggregator: Aggregator, combined: Combined, divergence: float) -> RoundRecord:
    """Return the record of a round whose labels were combined."""
    settings = aggregator.settings
    sent = aggregator.sent
    conditions = None
    if combined.lower is not None and combined.upper is not None:
        conditions = bracket_conditions(combined.lower, combined.upper, settings.vocab)
    return dataclasses.replace(
        _record(aggregator, combined.nodes),
        noise=[float(aggregator.noise[node]) if node in sent else None for node in range(len(settings.names))],
        kl=None if combined.target.relative else divergence,
        gain=-divergence if combined.target.relative else None,
        bandwidth_upper=combined.upper,
        bandwidth_lower=combined.lower,
        conditions=conditions,
    )


def _record(aggregator: Aggregator, used: Sequence[int]) -> RoundRecord:
    """Return the record of a round, as far as the aggregator knows it; `used` are the nodes that taught the student."""
    settings = aggregator.settings
    sent = aggregator.sent
    weights = aggregator.weights
    names = settings.names
    nodes = range(len(names))
    coordinates = (settings.contexts + settings.written) * settings.context_coordinates
    return RoundRecord(
        round=aggregator.round,
        nodes=[names[node] for node in used],
        bits_allotted=[bits / settings.context_coordinates for bits in aggregator.bits],
        bits_sent=[8 * sent.get(node, 0) / coordinates for node in nodes],
        payload_bytes=sum(sent.values()),
        overhead_bytes=OVERHEAD_BYTES * len(sent),
        node_bytes=[sent[node] + OVERHEAD_BYTES if node in sent else 0 for node in nodes],
        weights=None if weights is None else weights.tolist(),
        trust=None if aggregator.trust is None else aggregator.trust.tolist(),
        curves=aggregator.curves,
        noise=[None for _ in nodes],
        refused=[
            Incident(names[receipt.node], receipt.verdict, receipt.reason)
            for receipt in aggregator.receipts
            if receipt.verdict == "refused"
        ],
        heldout_by_node=[None for _ in nodes],
        asked=None if len(aggregator.asked) == len(names) else [names[node] for node in aggregator.asked],
    )


def _contexts_of(aggregator: Aggregator, node: int) -> int:
    """Return how many contexts a node has written in the round."""
    return int(aggregator.written[node].sequences.size) if node in aggregator.written else 0


def _usual_callbacks(setup: Setup) -> list[Callback]:
    """Return the callbacks of every run, and the trackers that the configuration names."""
    usual = default_callbacks(setup)
    return [*usual, Tracking(setup.config, setup.run, setup.settings.names)] if setup.config.run.track else usual


class Federation:
    """The rounds of a configuration, from where they stand.

    Parameters
    ----------
    config, run, public, name
        The configuration, the folder of the run, what its nodes share, and the federation's name in the run.
    pool
        Does the aggregator's own heavy work.
    mac_keys
        The key that frames of node i must be made with.
    run_key
        Sets the run apart from all others; without one it follows from the seed.
    callbacks
        What looks on; None for those of every run.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        public: Public,
        name: str,
        *,
        pool: Executor,
        mac_keys: Mapping[int, bytes] | None = None,
        run_key: bytes | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> None:
        self.name = name
        self.store = RunFolder(run.path / name)
        weights = 0 if config.update_bits is None else student_weights(config, run)
        spaces = label_spaces(config, run, public)
        settings = protocol_settings(config, public, mac_keys or {}, run_key, weights, spaces)
        self.setup = Setup(config, run, self.store, settings, pool)
        self.identity = self.setup.identity
        self.callbacks = Callbacks(_usual_callbacks(self.setup) if callbacks is None else callbacks)
        first = initial_state(self.setup)
        recalled = recall(self.store, run=self.identity)
        self.state = first if recalled is None else recalled.state
        self.trace = [] if recalled is None else with_means(recalled.trace, self.names)
        self.pending = None if recalled is None else recalled.pending
        self.aggregator: Aggregator | None = None
        # What nodes may have already: the base model, and the student of the round before.
        self.deltas = StudentDeltas(first.student)
        self.deltas.advance(self.state.student)
        self._traffic = Traffic(len(self.names))

    @property
    def done(self) -> bool:
        """Return whether all rounds are closed."""
        return self.state.round >= self.setup.settings.rounds

    @property
    def run_id(self) -> str:
        """Return the run's id, as it is in every plan and in what the nodes keep."""
        return run_id(self.setup.settings.run_key).hex()

    @property
    def names(self) -> Sequence[str]:
        """Return the nodes' names, by their numbers."""
        return self.setup.settings.names

    @property
    def student(self) -> Arrays:
        """Return the student's weights, as of the last close."""
        return self.state.student

    def run(self, engine: Engine) -> None:
        """Make the rounds that are left."""
        with self.watched():
            while not self.done:
                self.advance(engine)
            self.finish(engine)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tell the callbacks when the rounds that are made in this context are over, and whether one has failed."""
        failed = True
        try:
            yield
            failed = False
        finally:
            self.callbacks.ended(failed=failed)

    def advance(self, engine: Engine) -> RoundRecord:
        """Make one round; return its record, which is pending where the losses come with the next one."""
        engine.gather()
        tasks = self.open()
        collected = engine.collect(tasks, self.deliver)
        if collected.heldout is not None:
            if self.pending is None:
                losses = collected.heldout._asdict()
                del losses["refused"]
                self.store.write_json(BASE_LOSSES, losses)
            else:
                self._complete(self.pending, collected.heldout)
        record = self.close(collected.absent)
        return self.commit(record, engine.evaluate(self.student, wait=False))

    def finish(self, engine: Engine) -> None:
        """Complete the record of the last round, if it is pending: nobody has evaluated the last student yet."""
        if self.pending is None:
            return
        heldout = engine.evaluate(self.student, wait=True)
        if heldout is None:
            raise ProtocolError("an engine must evaluate the last student")
        self._complete(self._traffic.added_to(self.pending), heldout)
        commit(self.store, self.state, self.trace, run=self.identity)
        self.callbacks.phase(self.state.round, "closed")

    def open(self) -> dict[int, Task]:
        """Begin the next round: return the task of each node."""
        self.callbacks.begin()
        self._traffic.clear()
        self.aggregator, tasks = open_round(self.setup, self.state)
        bits = [bits / self.setup.settings.context_coordinates for bits in self.aggregator.bits]
        self.callbacks.opened(self.aggregator.round, bits)
        return tasks

    def asked(self, round: int) -> list[int]:
        """Return the numbers of the nodes that a round asks."""
        return self.setup.asked(round)

    def again(self, node: int) -> Task:
        """Return a node's task with the blocks of the prior that it asked for."""
        return self._open.again(node)

    def count(self, node: int, sizes: Mapping[str, int], *, up: bool = False) -> None:
        """Count bytes that went to a node in this round, or came `up` from it, by kind (`fpld.federation.record`)."""
        self._traffic.add(node, sizes, up=up)

    def worked(self, node: int, seconds: float) -> None:
        """Add to the time for which a node was at work in this round, where the engine measures it."""
        self.callbacks.worked(node, seconds)

    def deliver(self, node: int, data: bytes) -> Receipt:
        """Take a frame that came over a node's channel."""
        receipt = self._open.frame(node, data)
        receipt = receipt._replace(reason=printable(receipt.reason))
        if receipt.verdict == "asked":
            log.warning("round %d: %s asks %s", self._open.round, self.names[node], receipt.reason)
        self.callbacks.answered(receipt, len(data), len(self._open.missing))
        return receipt

    def close(self, absent: Sequence[Incident]) -> RoundRecord:
        """End the collecting, combine and distil; `absent` are the nodes that did not answer.

        The state is that after the round from here on, and is not committed yet.
        """
        aggregator = self._open
        missing = {self.names[node] for node in aggregator.missing}
        absent = sorted(incident for incident in absent if incident.node in missing)  # a late frame may just have come
        for incident in absent:
            self.callbacks.missing(aggregator.round, incident)
        try:
            state, record = close_round(self.setup, self.state, aggregator, self.callbacks)
        except QuorumError as error:
            raise QuorumError("; ".join([str(error), *map(str, absent)])) from None
        self.state = state
        self.deltas.advance(state.student)
        self.callbacks.distilled(state)
        self.callbacks.phase(aggregator.round, "evaluating")
        return dataclasses.replace(record, absent=absent)

    def commit(self, record: RoundRecord, heldout: Heldout | None) -> RoundRecord:
        """Commit a closed round with the losses of its student; without them (None) the record is pending."""
        record = self._traffic.added_to(record)
        record = self.callbacks.annotate(dataclasses.replace(record, student_bytes=self.deltas.size))
        self._traffic.clear()
        if heldout is None:
            self.pending = record
        else:
            record = self._complete(record, heldout)
        trace = self.trace if heldout is not None else with_means([*self.trace, record], self.names)
        commit(self.store, self.state, trace, run=self.identity, pending=heldout is None)
        self.callbacks.phase(self.state.round, "closed")
        return record

    def _complete(self, record: RoundRecord, heldout: Heldout) -> RoundRecord:
        """Add the losses of a round's student to its record, and the record to the trace; the next commit writes it."""
        record = dataclasses.replace(
            record,
            heldout_by_node=list(heldout.losses),
            heldout_bytes_per_token=heldout.bytes_per_token,
            refused=[*record.refused, *heldout.refused],
        )
        self.trace = with_means([*self.trace, record], self.names)
        self.pending = None
        self.callbacks.completed(self.trace, self.student)
        return self.trace[-1]

    @property
    def _open(self) -> Aggregator:
        if self.aggregator is None:
            raise ProtocolError("no round is open")
        return self.aggregator
